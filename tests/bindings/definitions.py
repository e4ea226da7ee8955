"""The functions and classes of our modules."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.bindings.values import ClassDefinition, FunctionDefinition, OurClass, Scope

_INNER_SCOPES = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NOT_FOLLOWED = (ast.AsyncFunctionDef, ast.Match, ast.TryStar, ast.Global, ast.Nonlocal)


@dataclass
class Definitions:
    """All that were declared."""

    functions: dict[ast.FunctionDef, FunctionDefinition] = field(default_factory=dict)
    classes: dict[ast.ClassDef, ClassDefinition] = field(default_factory=dict)

    def declare(self, body: Iterable[ast.stmt], scope: Scope, owner: ClassDefinition | None) -> None:
        """Find the functions and classes of a block, and the names that functions bind; owner: whose body it is."""
        for node in _inside(body):
            if isinstance(node, _NOT_FOLLOWED):
                raise NotImplementedError(f"{scope.path}:{node.lineno}: {type(node).__name__} is not followed")
            if isinstance(node, ast.FunctionDef):
                inside = Scope(scope, scope.path)
                definition = self.functions[node] = FunctionDefinition(node, inside, owner)
                arguments = [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]
                inside.names = {name: set() for name in [*arguments, *_bound(node.body)]}
                if owner is not None:
                    owner.methods[node.name] = definition
                    owner.fields |= {name: set() for name in _fields(node)}
                    inside.names["__class__"] = {OurClass(owner)}
                self.declare(node.body, inside, None)
            elif isinstance(node, ast.ClassDef):
                described = self.classes[node] = ClassDefinition(node, Scope(scope, scope.path))
                self.declare(node.body, scope, described)


def _inside(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes of a block but those within scopes of their own."""
    for node in nodes:
        yield node
        if not isinstance(node, _INNER_SCOPES):
            yield from _inside(ast.iter_child_nodes(node))


def _bound(body: Iterable[ast.stmt]) -> list[str]:
    """The names that a block binds by assignment."""
    return [node.id for node in _inside(body) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _fields(method: ast.FunctionDef) -> list[str]:
    """The attributes of ``self`` that a method sets."""
    attributes = [
        node for node in ast.walk(method) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    return [node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "self"]
