"""What an expression of our source can be, as far as TensorRT is concerned."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field


class Scope:
    """The names of a module, class body, function or comprehension."""

    def __init__(self, parent: Scope | None, path: str) -> None:
        self.parent = parent
        self.path = path
        self.names: dict[str, set[Value]] = {}

    def find(self, name: str) -> frozenset[Value] | None:
        """What ``name`` can be; None for names that nothing here binds, such as Python's own."""
        if name in self.names:
            return frozenset(self.names[name])
        return None if self.parent is None else self.parent.find(name)


@dataclass(eq=False)
class FunctionDefinition:
    """A function of ours."""

    node: ast.FunctionDef
    scope: Scope
    owner: ClassDefinition | None
    returns: set[Value] = field(default_factory=set)
    reached: bool = False
    """Whether it can be called: by those of our functions that can, or from modules that know nothing of TensorRT."""

    @property
    def parameters(self) -> list[ast.arg]:
        """The positional ones."""
        return [*self.node.args.posonlyargs, *self.node.args.args]

    @property
    def is_annotated(self) -> bool:
        """Whether the annotations alone say what every parameter is."""
        skipped = 0 if self.owner is None or self.is_a("staticmethod") else 1
        rest = [*self.parameters[skipped:], *self.node.args.kwonlyargs]
        annotations = [parameter.annotation for parameter in rest]
        return not any(each is None or (isinstance(each, ast.Name) and each.id == "Any") for each in annotations)

    def is_a(self, decorator: str) -> bool:
        """decorator: such as ``property``."""
        return any(isinstance(node, ast.Name) and node.id == decorator for node in self.node.decorator_list)


@dataclass(eq=False)
class ClassDefinition:
    """A class of ours."""

    node: ast.ClassDef
    scope: Scope
    methods: dict[str, FunctionDefinition] = field(default_factory=dict)
    fields: dict[str, set[Value]] = field(default_factory=dict)
    bases: set[str] = field(default_factory=set)
    """Those of TensorRT."""

    @property
    def constructor_fields(self) -> list[str]:
        """What a dataclass or named tuple is made from."""
        return [
            node.target.id
            for node in self.node.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]


@dataclass(frozen=True)
class Plain:
    """Nothing of TensorRT's."""


@dataclass(frozen=True)
class Nothing:
    """``None``."""


@dataclass(frozen=True)
class Class:
    """A class of the bindings; ``Class("")`` is the module itself."""

    name: str


@dataclass(frozen=True)
class Instance:
    """An object of a class of the bindings."""

    name: str


@dataclass(frozen=True)
class Method:
    """A method of a class of the bindings, or a function of the module."""

    owner: str
    name: str
    bound: bool


@dataclass(frozen=True)
class OurFunction:
    """A function of ours; bound: with the first parameter filled in."""

    definition: FunctionDefinition
    bound: Value | None = None


@dataclass(frozen=True)
class OurClass:
    """A class of ours itself."""

    definition: ClassDefinition


@dataclass(frozen=True)
class OurObject:
    """An object of a class of ours."""

    definition: ClassDefinition


@dataclass(frozen=True)
class Many:
    """A container with this among its contents; None: an empty one."""

    element: Value | None


@dataclass(frozen=True)
class Group:
    """A tuple, of which is known what stands where."""

    items: tuple[frozenset[Value], ...]


@dataclass(frozen=True)
class ContainerMethod:
    """Such as the ``append`` of a list; where: the expression that is the list."""

    container: Many | Group
    name: str
    where: ast.expr


Value = (
    Plain | Nothing | Class | Instance | Method | OurFunction | OurClass | OurObject | Many | Group | ContainerMethod
)
Values = frozenset[Value]

UNKNOWN: Values = frozenset()
"""An expression that nothing is known of yet; at the end, one that could not be followed."""
PLAIN: Values = frozenset({Plain()})
NOTHING: Values = frozenset({Nothing()})


def gathered(values: Iterable[Value]) -> Values:
    """A container of these."""
    return frozenset(Many(value) for value in values) or frozenset({Many(None)})


def is_tensorrt(value: Value) -> bool:
    """Whether it is TensorRT's, or holds what is."""
    match value:
        case Class() | Instance() | Method():
            return True
        case Many(element):
            return element is not None and is_tensorrt(element)
        case Group(items):
            return any(is_tensorrt(item) for values in items for item in values)
        case _:
            return False
