"""What the expressions of our source can be: which are objects of TensorRT, and of which class."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from tests.bindings.calls import Calls
from tests.bindings.uses import Arguments, Uses
from tests.bindings.values import (
    NOTHING,
    PLAIN,
    UNKNOWN,
    Class,
    ContainerMethod,
    Group,
    Instance,
    Many,
    Nothing,
    OurClass,
    OurFunction,
    OurObject,
    Scope,
    Value,
    Values,
    gathered,
    is_tensorrt,
)

_ORDERED = {ast.Lt: "__lt__", ast.LtE: "__le__", ast.Gt: "__gt__", ast.GtE: "__ge__"}


class Expressions(Calls):
    """Evaluates expressions. Statements, and what is remembered between them, are ``Program``'s."""

    def __init__(self, uses: Uses) -> None:
        super().__init__(uses)
        self._comprehensions: dict[ast.comprehension, Scope] = {}

    def evaluate(self, node: ast.expr, scope: Scope) -> Values:
        """See ``Calls.evaluate``."""
        match node:
            case ast.Constant(None):
                return NOTHING
            case ast.Name(name):
                found = scope.find(name)
                return PLAIN if found is None else found
            case ast.Attribute():
                return self._attribute(node, scope)
            case ast.Call():
                return self.call(node, scope)
            case ast.NamedExpr(target, value):
                values = self.evaluate(value, scope)
                while scope.parent is not None and scope in self._comprehensions.values():
                    scope = scope.parent
                self.store(target, values, scope)
                return values
            case ast.IfExp(test, body, orelse):
                self.evaluate(test, scope)
                truth = self.truth(test, scope)
                found = UNKNOWN if truth is False else self.evaluate(body, scope)
                return found if truth is True else found | self.evaluate(orelse, scope)
            case ast.BoolOp(operator, operands):
                found = UNKNOWN
                for operand in operands:
                    found |= self.evaluate(operand, scope)
                    if self.truth(operand, scope) is isinstance(operator, ast.Or):
                        break
                return found
            case ast.BinOp(left, _, right):
                return self.evaluate(left, scope) | self.evaluate(right, scope)
            case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
                return self._display(node, elements, scope)
            case ast.Dict(keys, contents):
                found = UNKNOWN.union(*(self.evaluate(key, scope) for key in keys if key is not None))
                for key, value in zip(keys, contents, strict=True):
                    inner = self.evaluate(value, scope)
                    found |= inner if key is not None else self.elements(value, inner, scope)
                return gathered(found)
            case ast.ListComp(element) | ast.SetComp(element) | ast.GeneratorExp(element):
                return self._comprehension(node.generators, [element], scope)
            case ast.DictComp(key, value):
                return self._comprehension(node.generators, [key, value], scope)
            case ast.Subscript(value, index):
                self.evaluate(index, scope)
                return self._subscript(node, self.evaluate(value, scope), scope)
            case ast.Starred(value):
                return self.elements(value, self.evaluate(value, scope), scope)
            case ast.Compare(left, operators, comparators):
                self._compare(node, [left, *comparators], operators, scope)
                return PLAIN
            case ast.Lambda(arguments, body):
                inside = Scope(scope, scope.path)
                for parameter in ast.walk(arguments):
                    if isinstance(parameter, ast.arg):
                        inside.names[parameter.arg] = set()
                self.evaluate(body, inside)
                return PLAIN
            case ast.Yield() | ast.YieldFrom() | ast.Await():
                raise NotImplementedError(f"{scope.path}:{node.lineno}: {type(node).__name__} within an expression")
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.evaluate(child, scope)
                return PLAIN

    def truth(self, test: ast.expr, scope: Scope) -> bool | None:
        """What a test says of these bindings: whether they have something, or whether something is there at all."""
        match test:
            case ast.UnaryOp(ast.Not(), inner):
                inverse = self.truth(inner, scope)
                return None if inverse is None else not inverse
            case ast.BoolOp(operator, operands):
                decisive = isinstance(operator, ast.Or)
                return decisive if any(self.truth(each, scope) is decisive for each in operands) else None
            case ast.Call(ast.Name("hasattr"), [owner, ast.Constant(str(name))]):
                values = self._known(owner, scope) - NOTHING
                if values and all(self.uses.has(value, name) for value in values):
                    return True
                return None if any(self.uses.has(value, name) or not is_tensorrt(value) for value in values) else False
            case ast.Compare(left, [ast.Is() | ast.IsNot() as operator], [ast.Constant(None)]):
                if self._known(left, scope) <= NOTHING:
                    return isinstance(operator, ast.Is)
        return None

    def _known(self, node: ast.expr, scope: Scope) -> Values:
        """What ``node`` can be; it is reported where that cannot be told."""
        values = self.evaluate(node, scope)
        if not values:
            self.uses.report(scope.path, node, f"cannot tell what {ast.unparse(node)} is")
        return values

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Values:
        found = UNKNOWN
        values = self._known(node.value, scope)
        if values == NOTHING:
            self.uses.report(scope.path, node, f"{ast.unparse(node.value)} is always None")
        owners = {value for value in values if self._has_attribute(value, node.attr)}
        for value in owners or values:
            match value:
                case Class() | Instance():
                    found |= self.uses.read(scope.path, node, value, node.attr)
                case OurObject() | OurClass():
                    found |= self._our_attribute(node, value, scope)
                case Many() | Group():
                    found |= {ContainerMethod(value, node.attr, node.value)}
                case Nothing():
                    pass
                case _:
                    found |= PLAIN
        return found

    @staticmethod
    def _has_attribute(value: Value, name: str) -> bool:
        """Whether it is ours and known to have it, where the annotation of a container names several classes."""
        known = isinstance(value, OurObject) and name in value.definition.fields | value.definition.methods
        return known or isinstance(value, Class | Instance)

    def _our_attribute(self, node: ast.Attribute, value: OurObject | OurClass, scope: Scope) -> Values:
        definition = value.definition
        if (method := definition.methods.get(node.attr)) is not None:
            if method.is_a("staticmethod"):
                return frozenset({OurFunction(method)})
            if method.is_a("classmethod"):
                return frozenset({OurFunction(method, OurClass(definition))})
            if method.is_a("property"):
                return self.enter(method, Arguments(), OurObject(definition))
            return frozenset({OurFunction(method, value if isinstance(value, OurObject) else None)})
        if node.attr in definition.fields:
            return frozenset(definition.fields[node.attr])
        kind = Instance if isinstance(value, OurObject) else Class
        inherited = [kind(base) for base in sorted(definition.bases) if self.uses.has(kind(base), node.attr)]
        return UNKNOWN.union(*(self.uses.read(scope.path, node, base, node.attr) for base in inherited)) or PLAIN

    def _display(self, node: ast.expr, elements: Iterable[ast.expr], scope: Scope) -> Values:
        found = [(isinstance(each, ast.Starred), self.evaluate(each, scope)) for each in elements]
        if isinstance(node, ast.Tuple) and not any(starred for starred, _ in found):
            return frozenset({Group(tuple(values for _, values in found))})
        return gathered(UNKNOWN.union(*(values for _, values in found)))

    def _comprehension(self, generators: list[ast.comprehension], results: list[ast.expr], scope: Scope) -> Values:
        inside = self._comprehensions.setdefault(generators[0], Scope(scope, scope.path))
        for generator in generators:
            values = self.elements(generator.iter, self.evaluate(generator.iter, inside), inside)
            for name in ast.walk(generator.target):
                if isinstance(name, ast.Name):
                    inside.names.setdefault(name.id, set())
            self.store(generator.target, values, inside)
            for condition in generator.ifs:
                self.evaluate(condition, inside)
                if self.truth(condition, inside) is False:
                    return gathered(UNKNOWN)
        return gathered(UNKNOWN.union(*(self.evaluate(result, inside) for result in results)))

    def _subscript(self, node: ast.Subscript, values: Values, scope: Scope) -> Values:
        found = UNKNOWN
        for value in values:
            match value, node.slice:
                case ((Many() | Group()), ast.Slice()):
                    found |= gathered(self.elements(node, frozenset({value}), scope))
                case Group(items), ast.Constant(int(index)) if -len(items) <= index < len(items):
                    found |= items[index]
                case _:
                    found |= self.elements(node, frozenset({value}), scope)
        return found

    def _compare(self, node: ast.Compare, operands: list[ast.expr], operators: list[ast.cmpop], scope: Scope) -> None:
        values = [self.evaluate(operand, scope) for operand in operands]
        for left, operator in zip(values, operators, strict=False):
            for value in left if type(operator) in _ORDERED else ():
                self.uses.needs(scope.path, node, value, _ORDERED[type(operator)])
