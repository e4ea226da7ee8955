"""What our source does with TensorRT's objects, each checked against one build of the bindings."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.bindings.api import Api, Member, Signature
from tests.bindings.values import (
    NOTHING,
    PLAIN,
    UNKNOWN,
    Class,
    ClassDefinition,
    Instance,
    Method,
    OurObject,
    Value,
    Values,
    gathered,
)

_PYTHON_TYPES = {"str", "int", "float", "bool", "bytes", "tuple", "list", "dict"}
_UNTOLD = {"", "object", "tuple", "list", "dict"}
"""Return types that do not tell what is returned."""
_CONVERTED = {"typing.SupportsInt": "__int__", "typing.SupportsIndex": "__index__", "typing.SupportsFloat": "__float__"}
"""Types that take whatever has this method."""


@dataclass(frozen=True)
class Arguments:
    """What a call gives."""

    positional: Sequence[Values] = ()
    keywords: Mapping[str, Values] = field(default_factory=dict)
    starred: Sequence[Values] = ()
    """Elements of what is given with ``*``; how many there are is unknown."""
    double_starred: bool = False

    @property
    def all(self) -> list[Values]:
        """However they are given."""
        return [*self.positional, *self.starred, *self.keywords.values()]

    def __str__(self) -> str:
        parts = ["..."] * len(self.positional) + ["*..."] * len(self.starred)
        return ", ".join([*parts, *(f"{name}=..." for name in self.keywords)] + ["**..."] * self.double_starred)


@dataclass(frozen=True)
class Use:
    """One place where our source needs something of TensorRT."""

    path: str
    line: int
    kind: str
    """``read``, ``set``, ``call`` or ``override``."""
    what: str
    node: ast.AST


class Uses:
    """What was found while ``recording``."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.recording = False
        self.found: dict[Use, None] = {}
        self.problems: dict[str, None] = {}

    def start(self) -> None:
        """Forget what was found, and record."""
        self.recording = True
        self.found, self.problems = {}, {}

    def report(self, path: str, node: ast.expr | ast.stmt, problem: str) -> None:
        """Something that does not fit, or cannot be told."""
        if self.recording:
            self.problems[f"{path}:{node.lineno}: {problem}"] = None

    def read(self, path: str, node: ast.expr | ast.stmt, value: Class | Instance, name: str) -> Values:
        """``value.name``; from a class, a method takes the object as its first argument."""
        member = self._member(path, node, value, name, "read")
        if member is None:
            return UNKNOWN
        if member.kind == "method":
            return frozenset({Method(value.name, name, isinstance(value, Instance))})
        if member.kind == "class":
            return frozenset({Class(member.type)})
        return self.values_of(member.type) if member.kind == "value" or isinstance(value, Instance) else PLAIN

    def set(self, path: str, node: ast.expr, owner: str, name: str, values: Values) -> None:
        """``object.name = ...``."""
        member = self._member(path, node, Instance(owner), name, "set")
        if member is not None and member.settable is None:
            self.report(path, node, f"{self._named(owner)}.{name} cannot be set")
        elif member is not None and member.settable is not None and not self._fits(values, member.settable):
            self.report(path, node, f"{self._named(owner)}.{name} is a {member.settable}")

    def call(self, path: str, node: ast.Call, method: Method, arguments: Arguments) -> Values:
        """Check a call against every overload; what those return that take it."""
        title = f"{self._named(method.owner)}.{method.name}".replace(".__init__", "")
        self._use(path, node, "call", f"{title}({arguments})")
        member = self.api.member(method.owner, method.name)
        if member is None or not member.signatures:
            self.report(path, node, f"{title} has no signature")
            return UNKNOWN
        results: list[Values] = []
        reasons = []
        for signature in member.signatures:
            if reason := self._mismatch(signature, method.bound, arguments):
                reasons.append(reason)
            else:
                results.append(self.values_of(signature.returns))
        if not results:
            self.report(path, node, f"{title}({arguments}): {'; or '.join(dict.fromkeys(reasons))}")
        return UNKNOWN.union(*results)

    def make(self, path: str, node: ast.Call, name: str, arguments: Arguments) -> Values:
        """An object of the class ``name``."""
        self.call(path, node, Method(name, "__init__", True), arguments)
        return frozenset({Instance(name)})

    def override(self, path: str, base: str, ours: ClassDefinition) -> None:
        """Our class gives every method that ``base`` leaves open, each with as many parameters as TensorRT gives it."""
        for name, member in self.api.methods(base).items():
            method = ours.methods.get(name)
            if method is None:
                self.report(path, ours.node, f"{ours.node.name} has no {name}, which {self._named(base)} calls")
                continue
            self._use(path, method.node, "override", f"{self._named(base)}.{name}")
            wanted = [len(signature.parameters) for signature in member.signatures]
            if len(method.parameters) not in wanted:
                self.report(path, method.node, f"{self._named(base)}.{name} takes {wanted[0] - 1} arguments")

    def needs(self, path: str, node: ast.expr, value: Value, *methods: str) -> None:
        """An object of TensorRT has to have one of these special methods."""
        if isinstance(value, Instance):
            found = [name for name in methods if self.api.member(value.name, name) is not None]
            if found:
                self._use(path, node, "read", f"{value.name}.{found[0]}")
            else:
                self.report(path, node, f"{value.name} has no {methods[0]}")

    def has(self, value: Value, name: str) -> bool:
        """``hasattr``."""
        return isinstance(value, Class | Instance) and self.api.member(value.name, name) is not None

    def item(self, owner: str) -> Values:
        """What indexing an object of this class gives."""
        member = self.api.member(owner, "__getitem__")
        return UNKNOWN.union(*(self.values_of(each.returns) for each in member.signatures)) if member else UNKNOWN

    def values_of(self, annotation: str) -> Values:
        """What an expression of this type can be."""
        if annotation == "None":
            return NOTHING
        if annotation in _UNTOLD:
            return UNKNOWN
        classes = frozenset[Value](Instance(name) for name in self.api.classes_in(annotation))
        if self.api.is_container(annotation):
            return gathered(classes or PLAIN)
        return classes or PLAIN

    def _member(
        self, path: str, node: ast.expr | ast.stmt, value: Class | Instance, name: str, kind: str
    ) -> Member | None:
        member = self.api.member(value.name, name)
        self._use(path, node, kind, f"{self._named(value.name)}.{name}")
        if member is None:
            self.report(path, node, f"{self._named(value.name)} has no {name}")
        return member

    def _use(self, path: str, node: ast.expr | ast.stmt, kind: str, what: str) -> None:
        if self.recording:
            self.found[Use(path, node.lineno, kind, what, node)] = None

    def _mismatch(self, signature: Signature, bound: bool, arguments: Arguments) -> str | None:
        """Why ``signature`` does not take the call."""
        parameters = list(signature.named)
        if bound and parameters and parameters[0].name == "self":
            del parameters[0]
        given = len(arguments.positional)
        if given > len(parameters) and not signature.takes_any("*"):
            return f"takes {len(parameters)} arguments"
        for name in arguments.keywords:
            if not signature.by_keyword(name) and not signature.takes_any("**"):
                return f"has no parameter {name}"
            if name in (parameter.name for parameter in parameters[:given]):
                return f"is given {name} twice"
        pairs = list(zip(parameters, arguments.positional, strict=False))
        for parameter in parameters[given:]:
            if parameter.name in arguments.keywords:
                pairs.append((parameter, arguments.keywords[parameter.name]))
            elif not parameter.optional and not arguments.starred and not arguments.double_starred:
                return f"needs {parameter.name}"
        wrong = [parameter for parameter, values in pairs if not self._fits(values, parameter.type)]
        return f"{wrong[0].name} is a {wrong[0].type}" if wrong else None

    def _fits(self, values: Values, annotation: str) -> bool:
        """Whether one of ``values`` can be of this type, as far as they are TensorRT's."""
        return not values or any(self._fits_one(value, annotation) for value in values)

    def _fits_one(self, value: Value, annotation: str) -> bool:
        if isinstance(value, OurObject):
            names = sorted(value.definition.bases)
        elif isinstance(value, Instance):
            names = [value.name]
        elif isinstance(value, Class | Method):
            names = []
        else:
            return True  # Which Python objects a class is converted from, such as Dims from a tuple, no docstring says.
        lineage = [base for name in names for base in self.api.lineage(name)]
        if annotation in _CONVERTED:
            return any(self.api.member(name, _CONVERTED[annotation]) is not None for name in lineage)
        if wanted := self.api.classes_in(annotation):
            return not set(wanted).isdisjoint(lineage)
        return annotation not in _PYTHON_TYPES

    def _named(self, owner: str) -> str:
        return owner or self.api.module
