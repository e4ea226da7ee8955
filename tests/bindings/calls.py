"""What calls in our source give: calls of TensorRT, of our own functions, and of Python's."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from tests.bindings.uses import Arguments, Uses
from tests.bindings.values import (
    NOTHING,
    PLAIN,
    UNKNOWN,
    Class,
    ClassDefinition,
    ContainerMethod,
    FunctionDefinition,
    Group,
    Instance,
    Many,
    Method,
    Nothing,
    OurClass,
    OurFunction,
    Scope,
    Value,
    Values,
    gathered,
    is_tensorrt,
)

_TO_PLAIN = {
    *("all", "any", "bool", "bytes", "float", "hash", "hasattr", "id", "int", "isinstance", "len", "memoryview"),
    *("print", "range", "repr", "str", "sum", "type"),
}
"""Python's functions whose results are not TensorRT's, whatever they are given."""
_TO_CONTAINER = {"frozenset", "iter", "list", "reversed", "set", "sorted", "tuple"}
_TO_ELEMENT = {"max", "min", "next"}
_SPECIAL: Mapping[str, tuple[str, ...]] = {"int": ("__int__", "__index__"), "len": ("__len__",)}
_TAKES_BUFFERS = {"write", "write_bytes"}
"""Methods of files, which may be given what TensorRT allocated."""


class Calls:
    """Follows calls. ``Expressions`` evaluates what is called and what is given, ``Program`` remembers it."""

    def __init__(self, uses: Uses) -> None:
        self.uses = uses

    def evaluate(self, node: ast.expr, scope: Scope) -> Values:
        """What ``node`` can be."""
        raise NotImplementedError

    def truth(self, test: ast.expr, scope: Scope) -> bool | None:
        """What a test says of these bindings."""
        raise NotImplementedError

    def store(self, target: ast.expr, values: Values, scope: Scope) -> None:
        """``target = values``."""
        raise NotImplementedError

    def enter(self, definition: FunctionDefinition, arguments: Arguments, first: Value | None) -> Values:
        """A call of a function of ours; first: what stands before the arguments."""
        raise NotImplementedError

    def construct(self, definition: ClassDefinition, node: ast.Call, arguments: Arguments, path: str) -> Values:
        """A call of a class of ours."""
        raise NotImplementedError

    def elements(self, node: ast.expr, values: Values, scope: Scope) -> Values:
        """What iterating over ``values`` gives, or an index that nothing is known of."""
        found = UNKNOWN
        for value in values:
            match value:
                case Many(element):
                    found |= UNKNOWN if element is None else frozenset({element})
                case Group(items):
                    found |= UNKNOWN.union(*items)
                case Instance(name):
                    self.uses.needs(scope.path, node, value, "__getitem__")
                    found |= self.uses.item(name)
                case Nothing():
                    pass
                case _:
                    found |= PLAIN
        return found

    def call(self, node: ast.Call, scope: Scope) -> Values:
        """What ``node`` can give."""
        match node.func:
            case ast.Attribute(ast.Name("importlib"), "import_module") | ast.Name("import_module" | "import_package"):
                named = [value.value for value in node.args if isinstance(value, ast.Constant)]
                return frozenset({Class("")}) if all(str(name).startswith("tensorrt") for name in named) else UNKNOWN
        arguments = self._arguments(node, scope)
        if isinstance(node.func, ast.Name) and scope.find(node.func.id) is None:
            return self._builtin(node, node.func.id, arguments, scope)
        found = UNKNOWN
        for callee in self.evaluate(node.func, scope):
            match callee:
                case Class(name):
                    found |= self.uses.make(scope.path, node, name, arguments)
                case Method():
                    found |= self.uses.call(scope.path, node, callee, arguments)
                case OurFunction(definition, bound):
                    found |= self.enter(definition, arguments, bound)
                case OurClass(definition):
                    found |= self.construct(definition, node, arguments, scope.path)
                case ContainerMethod():
                    found |= self._container_method(callee, arguments, scope)
                case Instance(name):
                    self.uses.report(scope.path, node, f"an object of {name} is called")
                case _:
                    found |= self._foreign(node, arguments, scope)
        return found

    def _foreign(self, node: ast.Call, arguments: Arguments, scope: Scope) -> Values:
        """A call of what is neither TensorRT's nor ours."""
        consumes = isinstance(node.func, ast.Attribute) and node.func.attr in _TAKES_BUFFERS
        if not consumes and any(is_tensorrt(value) for values in arguments.all for value in values):
            problem = f"an object of TensorRT is passed on to {ast.unparse(node.func)}, which is not followed"
            self.uses.report(scope.path, node, problem)
        return PLAIN

    def _builtin(self, node: ast.Call, name: str, arguments: Arguments, scope: Scope) -> Values:
        given = [*arguments.positional, *arguments.starred]
        for value in given[0] if given and name in _SPECIAL else ():
            self.uses.needs(scope.path, node, value, *_SPECIAL[name])
        if name in _TO_PLAIN:
            return PLAIN
        if name == "super":
            owner = self.evaluate(ast.Name("__class__", ast.Load()), scope)
            bases = {base for value in owner if isinstance(value, OurClass) for base in value.definition.bases}
            return frozenset[Value](Instance(base) for base in bases) or PLAIN
        if name == "getattr":
            return self._getattr(node, given, scope)
        inner = [self.elements(node, values, scope) for values in given]
        if name in _TO_CONTAINER:
            return gathered(UNKNOWN.union(*inner))
        if name in _TO_ELEMENT:
            return UNKNOWN.union(*(inner if len(inner) == 1 else given))
        if name == "enumerate":
            return frozenset({Many(Group((PLAIN, inner[0])))})
        if name == "zip":
            return frozenset({Many(Group(tuple(inner)))})
        return self._foreign(node, arguments, scope)

    def _getattr(self, node: ast.Call, given: list[Values], scope: Scope) -> Values:
        match node.args:
            case [owner, ast.Constant(str(name)), *default]:
                guard = ast.Call(ast.Name("hasattr", ast.Load()), node.args[:2], [])
                if default and self.truth(guard, scope) is False:
                    return given[2]
                attribute = ast.copy_location(ast.Attribute(owner, name, ast.Load()), node)
                return self.evaluate(attribute, scope).union(*given[2:])
        return self._foreign(node, Arguments(given), scope)

    def _container_method(self, method: ContainerMethod, arguments: Arguments, scope: Scope) -> Values:
        inner = self.elements(method.where, frozenset({method.container}), scope)
        given = UNKNOWN.union(*arguments.all)
        if method.name in ("append", "add", "insert", "appendleft", "setdefault"):
            self.store(method.where, gathered(given), scope)
            return inner | given if method.name == "setdefault" else NOTHING
        if method.name in ("extend", "update"):
            self.store(method.where, frozenset(value for value in given if isinstance(value, Many)), scope)
            return NOTHING
        if method.name in ("get", "pop", "popleft", "popitem"):
            return inner | (given if len(arguments.positional) > 1 else NOTHING)
        if method.name == "items":
            return frozenset({Many(Group((inner, inner)))})
        return gathered(inner) if method.name in ("copy", "keys", "values") else PLAIN

    def _arguments(self, node: ast.Call, scope: Scope) -> Arguments:
        positional = [self.evaluate(each, scope) for each in node.args if not isinstance(each, ast.Starred)]
        starred = [self.evaluate(each, scope) for each in node.args if isinstance(each, ast.Starred)]
        evaluated = [(keyword.arg, self.evaluate(keyword.value, scope)) for keyword in node.keywords]
        keywords = {name: values for name, values in evaluated if name is not None}
        return Arguments(positional, keywords, starred, len(keywords) < len(evaluated))
