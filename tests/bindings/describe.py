"""Print what a build of TensorRT's bindings offers, as JSON: ``describe.py MODULE [FOLDER]``.

A script of its own, because two builds of the bindings cannot be imported in one process.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from typing import Any


def describe_class(owner: Any, found: dict[str, Any]) -> None:
    """Add ``owner``, and the classes inside it, to ``found``."""
    members = {name: describe_member(getattr(owner, name), value, found) for name, value in vars(owner).items()}
    bases = [base.__qualname__ for base in owner.__mro__[1:] if base.__module__ == owner.__module__]
    found[owner.__qualname__] = {"bases": bases, "members": members}


def describe_member(member: Any, stored: Any, found: dict[str, Any]) -> dict[str, Any]:
    """One attribute of a class or of the module; stored: what its ``__dict__`` holds."""
    if isinstance(member, type):
        if member.__qualname__ not in found and "." in member.__qualname__:
            describe_class(member, found)
        return {"kind": "class", "type": member.__qualname__}
    if isinstance(stored, property):
        setter = stored.fset.__doc__ if stored.fset else None
        return {"kind": "property", "get": stored.fget.__doc__ if stored.fget else None, "set": setter}
    if inspect.isfunction(member):
        return {"kind": "method", "doc": f"{member.__name__}{inspect.signature(member)}"}
    if callable(member):
        return {"kind": "method", "doc": member.__doc__}
    return {"kind": "value", "type": type(member).__qualname__}


def main(name: str, folder: str | None = None) -> None:
    """Describe the module's public names: ``tensorrt`` has no others."""
    if folder is not None:
        sys.path.insert(0, folder)
    module = importlib.import_module(name)
    classes: dict[str, Any] = {}
    members = {}
    for key, value in vars(module).items():
        if not key.startswith("_") or key == "__version__":
            members[key] = describe_member(value, value, classes)
            if isinstance(value, type):
                describe_class(value, classes)
    classes[""] = {"bases": [], "members": members}
    json.dump({"version": module.__version__, "classes": classes}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
