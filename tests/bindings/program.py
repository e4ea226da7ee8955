"""Modules of ours that use TensorRT, followed from call to call.

Nothing is run. Every name, attribute and parameter gathers what it can be, over all paths and calls, until nothing new
comes up. A parameter that is annotated with ``Any`` can be what the calls give it; any other annotation says what it
is. Code behind a test for something that these bindings lack is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from tests.bindings.api import Api
from tests.bindings.definitions import Definitions
from tests.bindings.expressions import Expressions
from tests.bindings.uses import Arguments, Uses
from tests.bindings.values import (
    NOTHING,
    PLAIN,
    UNKNOWN,
    Class,
    ClassDefinition,
    FunctionDefinition,
    Group,
    Instance,
    Nothing,
    OurClass,
    OurFunction,
    OurObject,
    Scope,
    Value,
    Values,
    gathered,
)

_MAX_ROUNDS = 50
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class Program(Expressions):
    """Our modules, by path, against one build of the bindings."""

    def __init__(self, api: Api, modules: Mapping[str, ast.Module]) -> None:
        super().__init__(Uses(api))
        self._modules = modules
        self._scopes = {path: Scope(None, path) for path in modules}
        self._definitions = Definitions()
        self._changed = True
        for path, module in modules.items():
            self._definitions.declare(module.body, self._scopes[path], None)
        for _ in range(_MAX_ROUNDS):
            if not self._changed:
                break
            self._changed = False
            self._round()
        else:
            raise RecursionError("the values of these modules grow without end")

    def record(self) -> Uses:
        """Every use of TensorRT, and what is wrong with it."""
        self.uses.start()
        self._round()
        self.uses.recording = False
        return self.uses

    def unreached(self) -> set[str]:
        """Functions that nothing calls with objects known here, so that nothing in them was checked."""
        missing = [each for each in self._definitions.functions.values() if not each.reached]
        return {f"{each.scope.path}: {each.node.name}" for each in missing}

    def _round(self) -> None:
        for path, module in self._modules.items():
            self._block(module.body, self._scopes[path], None)
        for definition in list(self._definitions.functions.values()):
            if definition.reached:
                self._annotate(definition)
                self._block(definition.node.body, definition.scope, definition)

    def store(self, target: ast.expr, values: Values, scope: Scope) -> None:
        """See ``Calls.store``."""
        match target:
            case ast.Name(name):
                self._add(scope.names.setdefault(name, set()), values)
            case ast.Starred(inner):
                self.store(inner, gathered(values), scope)
            case ast.Tuple(targets) | ast.List(targets):
                groups = [value.items for value in values if isinstance(value, Group)]
                exact = len(groups) == len(values) and all(len(items) == len(targets) for items in groups)
                for index, each in enumerate(targets):
                    parts = [items[index] for items in groups] if exact else [self.elements(target, values, scope)]
                    self.store(each, UNKNOWN.union(*parts), scope)
            case ast.Attribute(owner, name):
                for value in self.evaluate(owner, scope):
                    if isinstance(value, Instance):
                        self.uses.set(scope.path, target, value.name, name, values)
                    elif isinstance(value, OurObject | OurClass):
                        self._add(value.definition.fields.setdefault(name, set()), values)
            case ast.Subscript(owner, index):
                self.evaluate(index, scope)
                for value in self.evaluate(owner, scope):
                    self.uses.needs(scope.path, target, value, "__setitem__")
                self.store(owner, gathered(values), scope)

    def enter(self, definition: FunctionDefinition, arguments: Arguments, first: Value | None) -> Values:
        """See ``Calls.enter``."""
        self._reach(definition)
        positional = [*([frozenset({first})] if first is not None else []), *arguments.positional]
        names = [parameter.arg for parameter in definition.parameters]
        keywords = {*names, *(parameter.arg for parameter in definition.node.args.kwonlyargs)}
        for index, name in enumerate(names):
            given = positional[index : index + 1] or arguments.starred
            self._add(definition.scope.names[name], UNKNOWN.union(*given))
        for name in keywords & arguments.keywords.keys():
            self._add(definition.scope.names[name], arguments.keywords[name])
        if (rest := definition.node.args.vararg) is not None:
            extra = UNKNOWN.union(*positional[len(names) :], *arguments.starred)
            self._add(definition.scope.names[rest.arg], gathered(extra))
        if (rest := definition.node.args.kwarg) is not None:
            extra = UNKNOWN.union(*(arguments.keywords[name] for name in arguments.keywords.keys() - keywords))
            self._add(definition.scope.names[rest.arg], gathered(extra))
        return frozenset(definition.returns)

    def construct(self, definition: ClassDefinition, node: ast.Call, arguments: Arguments, path: str) -> Values:
        """See ``Calls.construct``. Without a constructor, as a dataclass has it."""
        if (constructor := definition.methods.get("__init__")) is not None:
            self.enter(constructor, arguments, OurObject(definition))
        elif definition.bases:
            for base in definition.bases:
                self.uses.make(path, node, base, arguments)
        else:
            given = zip(definition.constructor_fields, arguments.positional, strict=False)
            for name, values in [*given, *arguments.keywords.items()]:
                self._add(definition.fields.setdefault(name, set()), values)
        return frozenset({OurObject(definition)})

    def _add(self, where: set[Value], values: Iterable[Value]) -> None:
        before = len(where)
        where.update(values)
        self._changed |= len(where) > before

    def _reach(self, definition: FunctionDefinition) -> None:
        self._changed |= not definition.reached
        definition.reached = True

    def _annotate(self, definition: FunctionDefinition) -> None:
        """What annotations and defaults say of a function's parameters."""
        arguments = definition.node.args
        first = definition.parameters[:1] if definition.owner and not definition.is_a("staticmethod") else []
        for parameter in first:
            kind = OurClass if definition.is_a("classmethod") else OurObject
            assert definition.owner is not None
            self._add(definition.scope.names[parameter.arg], {kind(definition.owner)})
        defaults = [*arguments.defaults, *(value for value in arguments.kw_defaults if value is not None)]
        values = UNKNOWN.union(*(self.evaluate(default, definition.scope) for default in defaults))
        for parameter in [*definition.parameters[len(first) :], *arguments.kwonlyargs]:
            self._add(definition.scope.names[parameter.arg], self._annotated(parameter.annotation, definition.scope))
            if Nothing() in values:
                self._add(definition.scope.names[parameter.arg], NOTHING)

    def _annotated(self, annotation: ast.expr | None, scope: Scope) -> Values:
        """What something of this annotation can be; unknown where ``Any`` stands in it."""
        if annotation is None or any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation)):
            return UNKNOWN
        names = [node for node in ast.walk(annotation) if isinstance(node, ast.Name)]
        found = UNKNOWN.union(*(self.evaluate(name, scope) for name in names))
        ours = frozenset[Value](OurObject(value.definition) for value in found if isinstance(value, OurClass))
        return (gathered(ours) if isinstance(annotation, ast.Subscript) else ours) if ours else PLAIN

    def _block(self, body: Iterable[ast.stmt], scope: Scope, function: FunctionDefinition | None) -> bool:
        """Follow statements; whether the rest of what they stand in is left out."""
        return any(self._statement(statement, scope, function) for statement in body)

    def _statement(self, node: ast.stmt, scope: Scope, function: FunctionDefinition | None) -> bool:
        match node:
            case ast.If(test, body, orelse):
                self.evaluate(test, scope)
                truth = self.truth(test, scope)
                left = truth is not False and self._block(body, scope, function)
                other = truth is not True and self._block(orelse, scope, function)
                return left if truth is True else other if truth is False else left and other and bool(orelse)
            case ast.For(target, iterator, body, orelse):
                self.store(target, self.elements(iterator, self.evaluate(iterator, scope), scope), scope)
                self._block([*body, *orelse], scope, function)
            case ast.While(test, body, orelse):
                self.evaluate(test, scope)
                self._block([*body, *orelse], scope, function)
            case ast.With(items, body):
                for item in items:
                    values = self.evaluate(item.context_expr, scope)
                    for value in values:
                        self.uses.needs(scope.path, item.context_expr, value, "__enter__")
                    if item.optional_vars is not None:
                        self.store(item.optional_vars, values, scope)
                self._block(body, scope, function)  # Some managers swallow errors, so what follows may run.
            case ast.Try(body, handlers, orelse, last):
                left = self._block([*body, *orelse], scope, function)
                for handler in handlers:
                    if handler.name is not None:
                        self._add(scope.names.setdefault(handler.name, set()), PLAIN)
                    left &= self._block(handler.body, scope, function)
                return self._block(last, scope, function) or left
            case ast.Assign(targets, value):
                values = self.evaluate(value, scope)
                for target in targets:
                    self.store(target, values, scope)
            case ast.AugAssign(target, _, value):
                self.store(target, self.evaluate(value, scope), scope)
            case ast.AnnAssign(target, annotation, value):
                values = self._annotated(annotation, scope)
                self.store(target, values | (UNKNOWN if value is None else self.evaluate(value, scope)), scope)
            case ast.Expr(ast.Yield(value)):
                if function is not None and value is not None:
                    self._add(function.returns, self.evaluate(value, scope))
            case ast.Return(value):
                values = NOTHING if value is None else self.evaluate(value, scope)
                if function is not None:
                    self._add(function.returns, values)
            case ast.FunctionDef(name):
                definition = self._definitions.functions[node]
                if definition.owner is None:
                    self._add(scope.names.setdefault(name, set()), {OurFunction(definition)})
                if definition.is_annotated:
                    self._reach(definition)
            case ast.ClassDef():
                self._class(self._definitions.classes[node], scope)
            case ast.Import(names) | ast.ImportFrom(names=names):
                for alias in names:
                    values = self._imported(node, alias.name, scope.path)
                    self._add(scope.names.setdefault(alias.asname or alias.name, set()), values)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.evaluate(child, scope)
        return isinstance(node, _LEAVES)

    def _class(self, definition: ClassDefinition, scope: Scope) -> None:
        node = definition.node
        self._add(scope.names.setdefault(node.name, set()), {OurClass(definition)})
        for base in node.bases:
            for value in self.evaluate(base, scope):
                if isinstance(value, Class):
                    self._changed |= value.name not in definition.bases
                    definition.bases.add(value.name)
                    self.uses.override(scope.path, value.name, definition)
                    self._let_tensorrt_call(definition, value.name)
                elif isinstance(value, OurClass):
                    self.uses.report(scope.path, base, f"that {node.name} inherits from this class is not followed")
        self._block(node.body, definition.scope, None)
        for name, values in definition.scope.names.items():
            self._add(definition.fields.setdefault(name, set()), values)

    def _let_tensorrt_call(self, definition: ClassDefinition, base: str) -> None:
        """The methods that ``base`` leaves open are called with what their signatures say."""
        for name, member in self.uses.api.methods(base).items():
            if (method := definition.methods.get(name)) is not None:
                for signature in member.signatures:
                    given = [self.uses.values_of(parameter.type) for parameter in signature.parameters[1:]]
                    self.enter(method, Arguments(given), OurObject(definition))

    def _imported(self, node: ast.Import | ast.ImportFrom, name: str, path: str) -> Values:
        """A name of TensorRT or from another of the modules; anything else that is imported is neither."""
        source = (node.module or "") if isinstance(node, ast.ImportFrom) else name
        if source.startswith("tensorrt"):
            bindings = Class("")
            return (
                self.uses.read(path, node, bindings, name)
                if isinstance(node, ast.ImportFrom)
                else frozenset({bindings})
            )
        other = self._scopes.get(source.replace(".", "/") + ".py")
        if other is None or isinstance(node, ast.Import):
            return PLAIN
        return other.find(name) or UNKNOWN
