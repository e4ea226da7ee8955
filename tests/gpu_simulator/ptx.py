"""PTX, NVIDIA's assembly language, as C++: every kernel becomes a function that one thread of it runs.

From the PTX ISA. Registers are unsigned integers of their size; an instruction reads them as its type says. An
instruction that is not known here is an error, and so is a kernel that was not translated whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_WORDS = {"8": "uint8_t", "16": "u16", "32": "u32", "64": "u64"}
_SPECIAL = re.compile(r"%(tid|ctaid|ntid|nctaid)\.([xyz])")
_AXES = {"x": 0, "y": 1, "z": 2}
_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)\s*([^{]*)\{(.*?)\n\}", re.DOTALL)
_PARAMETER = re.compile(r"\.param \.(?:align (\d+) )?\.?([bus]\d+|f\d+) (\w+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"\.shared \.align (\d+) \.[bfsu](\d+) (\w+)(?:\[(\d+)\])?;")
_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">"}


class PtxError(ValueError):
    """PTX that this translator does not know."""


@dataclass(frozen=True)
class Parameter:
    """Of a kernel."""

    name: str
    offset: int
    size: int
    """In bytes."""


@dataclass(frozen=True)
class Kernel:
    """A kernel's head, and its body as C++."""

    name: str
    parameters: list[Parameter]
    max_threads: int
    source: str


@dataclass
class _Function:
    """What the instructions of one kernel share."""

    parameters: dict[str, Parameter]
    shared: dict[str, int]
    ranges: int = 0
    lines: list[str] = field(default_factory=list)


def kernels(ptx: str) -> list[Kernel]:
    """Every kernel of a module. Raises PtxError."""
    text = re.sub(r"//[^\n]*", "", ptx)
    shared, size = _shared(text)
    found = [_kernel(match, text, shared, size) for match in _ENTRY.finditer(text)]
    if len(found) != text.count(".entry"):
        raise PtxError(f"{text.count('.entry')} kernels, of which {len(found)} are understood")
    return found


def _shared(text: str) -> tuple[dict[str, int], int]:
    """Where every shared variable lies, and the bytes of all."""
    places, end = {}, 0
    for align, bits, name, count in _SHARED.findall(text):
        end = -(-end // int(align)) * int(align)
        places[name] = end
        end += int(bits) // 8 * int(count or 1)
    return places, end


def _parameters(text: str) -> list[Parameter]:
    found, end = [], 0
    for align, kind, name, count in _PARAMETER.findall(text):
        element = int(kind[1:]) // 8
        step = int(align or element)
        end = -(-end // step) * step
        found.append(Parameter(name, end, element * int(count or 1)))
        end += found[-1].size
    return found


def _kernel(match: re.Match[str], text: str, shared: dict[str, int], shared_bytes: int) -> Kernel:
    name, head, directives, body = match.groups()
    parameters = _parameters(head)
    function = _Function({parameter.name: parameter for parameter in parameters}, shared)
    first_line = text.count("\n", 0, match.start(4)) + 1
    for number, statement in _statements(body, first_line):
        function.lines.append(f"  {_statement(statement, number, function)}")
    limit = re.search(r"\.(?:max|req)ntid (\d+)", directives)
    max_threads = int(limit.group(1)) if limit else 1024
    source = "\n".join(
        [
            '#include "arithmetic.hpp"',
            '#include "kernel.hpp"',
            '#include "tiles.hpp"',
            "using namespace gpu;",
            f"static Range ranges[{function.ranges + 1}];",
            "static void run(Thread* thread, const char* parameters) {",
            "  (void)parameters;",
            *function.lines,
            "}",
            f"static const unsigned sizes[] = {{{', '.join(str(p.size) for p in parameters) or 0}}};",
            f"static const unsigned offsets[] = {{{', '.join(str(p.offset) for p in parameters) or 0}}};",
            f'extern const Kernel kernel_{name} = {{"{name}", run, {len(parameters)}, sizes, offsets, {max_threads}, '
            f"{shared_bytes}, ranges, {function.ranges}}};",
            "",
        ]
    )
    return Kernel(name, parameters, max_threads, source)


def _statements(body: str, first_line: int) -> Iterator[tuple[int, str]]:
    """Labels, declarations and instructions, with their lines."""
    number, pending = first_line, ""
    for line in body.split("\n"):
        pending += line.strip()
        while match := re.match(r"[{}]|\$?\w+:(?!:)|[^;]*;", pending):
            yield number, match.group(0).rstrip(";").strip()
            pending = pending[match.end() :].strip()
        number += 1
    if pending:
        raise PtxError(f"line {number}: {pending}")


def _statement(statement: str, line: int, function: _Function) -> str:
    if statement in ("{", "}"):
        return statement
    if statement.endswith(":"):
        return f"{_label(statement[:-1])}:;"
    if not statement or statement.startswith((".pragma", ".loc ", ".shared ")):  # _shared has those.
        return ";"
    if match := re.fullmatch(r"\.reg \.(\w+)\s+(%\w+)(?:<(\d+)>)?", statement):
        return _registers(*match.groups())
    if match := re.fullmatch(r"\.local \.align (\d+) \.b8\s+(\w+)\[(\d+)\]", statement):
        return f"alignas({match.group(1)}) char {match.group(2)}[{match.group(3)}];"
    match = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([a-z]\w*(?:[.:]+\w+)*)\s*(.*)", statement, re.DOTALL)
    if not match:
        raise PtxError(f"line {line}: {statement}")
    negated, guard, operation, operands = match.groups()
    try:
        work = _instruction(operation.split("."), _split(operands), line, function)
    except (KeyError, ValueError) as error:
        raise PtxError(f"line {line}: {statement}: not simulated ({error})") from error
    return f"if ({negated}{_register(guard)}) {{ {work} }}" if guard else f"{{ {work} }}"


def _registers(kind: str, name: str, count: str | None) -> str:
    word = "bool" if kind == "pred" else _WORDS[kind[1:]]
    names = [f"{_register(name)}{number}" for number in range(int(count))] if count else [_register(name)]
    return f"{word} {', '.join(f'{name} = 0' for name in names)};"


def _register(name: str) -> str:
    return name.replace("%", "r_")


def _label(name: str) -> str:
    return name.replace("$", "label_")


def _split(operands: str) -> list[str]:
    """At commas outside of braces and brackets."""
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", operands)
    return [part.strip() for part in parts]


def _type(name: str) -> str:
    return f"u{name[1:]}" if name[0] == "b" else name


def _value(operand: str, kind: str, function: _Function) -> str:
    """An operand as a C++ expression of type ``kind``."""
    if match := _SPECIAL.fullmatch(operand):
        name, axis = match.group(1), _AXES[match.group(2)]
        return f"thread->tid[{axis}]" if name == "tid" else f"thread->block->{name}[{axis}]"
    if operand.startswith("0f"):
        return f"as<f32>(0x{operand[2:]}u)"
    if operand.startswith("0d"):
        return f"as<f64>(0x{operand[2:]}ull)"
    if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+U?", operand):
        to = "bool" if kind == "pred" else kind
        return f"static_cast<{to}>({operand.rstrip('U')}ll)"
    if operand in function.shared:
        return f"u64({function.shared[operand]})"
    if operand.startswith("!"):
        return f"!{_register(operand[1:])}"
    if operand.startswith("%"):
        if kind == "pred":
            return _register(operand)
        return f"as<{kind}>({_register(operand)})" if kind[0] == "f" else f"{kind}({_register(operand)})"
    if re.fullmatch(r"__local_depot\d+", operand):
        return f"reinterpret_cast<u64>({operand})"
    raise ValueError(f"the operand {operand}")


def _store(to: str, kind: str, value: str) -> str:
    """``to = value``: registers hold bits."""
    if to == "_":
        return ""
    word = _WORDS[kind[1:]]
    if kind[0] == "f":
        return f"{_register(to)} = as<{word}>(static_cast<{kind}>({value}));"
    # Between integers a cast keeps the bits, and takes the compiler half as long as as<>.
    return f"{_register(to)} = {word}({kind}({value}));"


_BINARY = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "rem": "{0} % {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "shl": "left({0}, u32({1}))",
    "shr": "right({0}, u32({1}))",
}
_UNARY = {
    "neg": "-{0}",
    "not": "~{0}",
    "abs": "std::abs({0})",
    "mov": "{0}",
    "sqrt": "std::sqrt({0})",
    "rcp": "1 / {0}",
}


def _instruction(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    base, modifiers, last = words[0], words[1:-1], words[-1]
    if special := _OTHERS.get(base):
        return special(words, operands, line, function)
    if last in ("f16x2", "bf16x2") and words[:-1] == ["fma", "rn"]:
        return _fma_pairs(words, operands, function)
    kind = _type(last)
    if base == "mov" and operands[0].startswith("{"):
        low, high = (part.strip() for part in operands[0].strip("{}").split(","))
        half = int(kind[1:]) // 2
        value = _value(operands[1], kind, function)
        return f"{_store(low, f'u{half}', value)} {_store(high, f'u{half}', f'{value} >> {half}')}"
    if base == "mov" and operands[1].startswith("{"):
        half = int(kind[1:]) // 2
        low, high = (_value(part.strip(), f"u{half}", function) for part in operands[1].strip("{}").split(","))
        return _store(operands[0], kind, f"{kind}({high}) << {half} | {low}")
    if kind == "pred":
        values = [_value(operand, "pred", function) for operand in operands[1:]]
        formula = (_BINARY | {"not": "!{0}", "mov": "{0}"})[base]
        return f"{_register(operands[0])} = {formula.format(*values)};"
    if base in ("shl", "shr"):
        values = [_value(operands[1], kind, function), _value(operands[2], "u32", function)]
        return _store(operands[0], kind, _BINARY[base].format(*values))
    values = [_value(operand, kind, function) for operand in operands[1:]]
    if kind[0] == "f":
        formula = _float_formula(base, modifiers, kind)
    elif base in ("min", "max"):
        formula = "{0} < {1} ? {0} : {1}" if base == "min" else "{0} > {1} ? {0} : {1}"
    elif base in ("mul", "mad") and modifiers:
        formula = _integer_product(base, modifiers[0], kind)
        if modifiers[0] == "wide":
            values[2:] = [_value(operand, f"{kind[0]}{int(kind[1:]) * 2}", function) for operand in operands[3:]]
            kind = f"{kind[0]}{int(kind[1:]) * 2}"
    else:
        # Signed arithmetic wraps around.
        formula = {**_BINARY, **_UNARY}[base]
        if base in ("add", "sub") or base == "neg":
            values = [f"u{kind[1:]}({value})" for value in values]
    return _store(operands[0], kind, formula.format(*values))


def _float_formula(base: str, modifiers: list[str], kind: str) -> str:
    """Flags that change what is computed must be known."""
    exact = {"rn"}
    formulas: dict[tuple[str, ...], str] = {
        ("fma", "rm", "f32"): "fma_down({0}, {1}, {2})",
        ("add", "rz", "f32"): "add_to_zero({0}, {1})",
        ("ex2", "approx", "ftz", "f32"): "exp2_approx({0})",
        ("rcp", "approx", "ftz", "f64"): "reciprocal_approx({0})",
    }
    if found := formulas.get((base, *modifiers, kind)):
        return found
    if set(modifiers) - exact:
        raise ValueError(f"flags {modifiers}")
    plain = {**_BINARY, **_UNARY, "fma": "std::fma({0}, {1}, {2})", "min": "smaller({0}, {1})"}
    return {**plain, "max": "larger({0}, {1})"}[base]


def _integer_product(base: str, part: str, kind: str) -> str:
    width = int(kind[1:])
    products = {
        "lo": f"u{width}({{0}}) * u{width}({{1}})",
        "wide": f"{kind[0]}{width * 2}({{0}}) * {{1}}",
    }
    if width == 64 and kind[0] == "u":
        products["hi"] = "high_product({0}, {1})"
    elif width == 32:
        products["hi"] = f"({kind[0]}64({{0}}) * {{1}}) >> 32"
    product = products[part]
    if base == "mul":
        return product
    return f"{kind[0]}{width * 2}({product}) + {{2}}" if part == "wide" else f"{product} + u{width}({{2}})"


def _setp(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    compare, kind = words[1], _type(words[-1])
    left, right = (_value(operand, kind, function) for operand in operands[1:3])
    if len(words) > 3 or len(operands) > 3 or "|" in operands[0]:
        raise ValueError("a comparison with more than a result")
    if compare in ("num", "nan"):
        both = f"std::isnan({left}) || std::isnan({right})"
        value = both if compare == "nan" else f"!({both})"
    elif kind[0] == "f" and compare == "ne":
        value = f"{left} < {right} || {left} > {right}"
    elif kind[0] == "f" and compare.endswith("u"):
        opposite = {"eq": "!({0} < {1} || {0} > {1})", "ne": "{0} != {1}"}
        formula = opposite.get(compare[:-1]) or {"lt": "!({0} >= {1})", "le": "!({0} > {1})"}.get(compare[:-1])
        formula = formula or {"gt": "!({0} <= {1})", "ge": "!({0} < {1})"}[compare[:-1]]
        value = formula.format(left, right)
    else:
        operator = ">=" if compare == "hs" else _ORDERED[compare]
        value = f"{left} {operator} {right}"
    return f"{_register(operands[0])} = {value};"


def _selp(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    kind = _type(words[-1])
    yes, no = (_value(operand, kind, function) for operand in operands[1:3])
    return _store(operands[0], kind, f"{_register(operands[3])} ? {yes} : {no}")


def _cvt(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    *flags, to, source = words[1:]
    if (flags, to, source) == (["rn"], "bf16", "f32"):
        return f"{_register(operands[0])} = round_to_bf16({_value(operands[1], 'f32', function)});"
    to, source = _type(to), _type(source)
    value = _value(operands[1], source, function)
    to_float, from_float = to[0] == "f", source[0] == "f"
    match flags:
        case ["sat"] if to == source == "f32":
            value = f"saturate({value})"
        case ["rzi"] if from_float and not to_float:
            value = f"truncate<{to}>({value})"
        case ["rpi"] if to == source:
            value = f"std::ceil({value})"
        case ["rmi"] if to == source:
            value = f"std::floor({value})"
        case ["rn"] if to_float:
            pass
        case [] if to_float == from_float:
            pass
        case _:
            raise ValueError(f"flags {flags}")
    # A result may go to a register that is wider: it is extended as its type says.
    return f"{_register(operands[0])} = " + (
        f"as<{_WORDS[to[1:]]}>(static_cast<{to}>({value}));" if to_float else f"static_cast<{to}>({value});"
    )


def _address(operand: str, function: _Function) -> str:
    match = re.fullmatch(r"\[([%\w]+)(?:\+(-?\d+))?\]", operand)
    if not match:
        raise ValueError(f"the address {operand}")
    return f"{_value(match.group(1), 'u64', function)} + ({match.group(2) or 0})"


def _place(words: list[str], address: str, size: int, writes: bool, line: int, function: _Function) -> str:
    """A pointer to ``size`` bytes of memory."""
    if "shared" in words:
        return f"thread->services->shared(thread, {address}, {size}, {str(writes).lower()}, {line})"
    if "local" in words:
        return f"reinterpret_cast<void*>({address})"
    if "const" in words:
        raise ValueError("the kind of memory")
    # Global, or whatever the address says: shared memory has no such addresses here (see _cvta), so it is global.
    function.ranges += 1
    return f"global(thread, {address}, {size}, ranges[{function.ranges - 1}], {line})"


def _memory(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    """Loads and stores, of one value or a vector."""
    loads, kind = words[0] == "ld", _type(words[-1])
    value, address = operands if loads else reversed(operands)
    if "param" in words:
        parameter = function.parameters[address.strip("[]")]
        return _store(value, kind, f"*reinterpret_cast<const {kind}*>(parameters + {parameter.offset})")
    parts = [part.strip() for part in value.strip("{}").split(",")]
    element = int(kind[1:]) // 8
    place = _place(words, _address(address, function), element * len(parts), not loads, line, function)
    work = [f"auto* memory = static_cast<{kind}*>({place});"]
    # What waits for another thread must let it run.
    if {"volatile", "acquire", "relaxed"} & set(words):
        work.insert(0, "thread->services->yield(thread);")
    for number, part in enumerate(parts):
        if loads:
            # A register that is wider holds the value extended as its type says.
            stored = f"as<{_WORDS[kind[1:]]}>(memory[{number}])" if kind[0] == "f" else f"memory[{number}]"
            work.append(f"{_register(part)} = {stored};")
        else:
            work.append(f"memory[{number}] = {_value(part, kind, function)};")
    return " ".join(work)


def _atom(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    operation, kind = (
        next(word for word in words if word in ("add", "max", "min", "exch", "or", "and")),
        _type(words[-1]),
    )
    result = operands[0] if words[0] == "atom" else "_"
    address, value = operands[-2:]
    place = _place(words, _address(address, function), int(kind[1:]) // 8, True, line, function)
    formula = {
        "add": "before + value",
        "max": "before > value ? before : value",
        "min": "before < value ? before : value",
        "exch": "value",
        "or": "before | value",
        "and": "before & value",
    }[operation]
    return (
        f"thread->services->yield(thread); auto* memory = static_cast<{kind}*>({place}); {kind} before = *memory, "
        f"value = {_value(value, kind, function)}; *memory = {formula}; {_store(result, kind, 'before')}"
    )


def _branch(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    return f"goto {_label(operands[0])};"


def _barrier(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    if words == ["bar", "warp", "sync"]:
        own = f"int(thread->tid[0] & 31), {_value(operands[0], 'u32', function)}"
        return f"thread->services->shuffle(thread, 0, {own}, {line});"
    if operands != ["0"]:
        raise ValueError("a barrier of some threads")
    return f"thread->services->barrier(thread, {line});"


def _shuffle(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    to, value, lane, limits, mask = operands
    to, _, within = to.partition("|")
    if words[1:] != ["sync", "bfly", "b32"]:
        raise ValueError("this shuffle")
    whole = f'if ({_value(limits, "u32", function)} != 31) thread->services->fail(thread, "a part of a warp", {line});'
    inside = f" {_register(within)} = true;" if within else ""  # Of 32 lanes, each xor is one.
    other = f"int((thread->tid[0] & 31) ^ {_value(lane, 'u32', function)})"
    source, own = _value(mask, "u32", function), _value(value, "u32", function)
    received = f"thread->services->shuffle(thread, {own}, {other}, {source}, {line})"
    return f"{whole} {_store(to, 'u32', received)}{inside}"


def _vote(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    to, own, mask = operands
    if words[1:] != ["sync", "any", "pred"]:
        raise ValueError("this vote")
    value = _value(own, "pred", function)
    received = f"thread->services->shuffle(thread, {value}, ANY_LANE, {_value(mask, 'u32', function)}, {line})"
    return f"{_register(to)} = {received};"


def _prmt(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    if words[1:] != ["b32"]:
        raise ValueError("this permutation")
    values = [_value(operand, "u32", function) for operand in operands[1:]]
    return _store(operands[0], "u32", f"permute_bytes({', '.join(values)})")


def _mma(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    number = {"f16": "Half", "bf16": "Bfloat"}[words[-2]]
    if words[1:] != ["sync", "aligned", "m16n8k16", "row", "col", "f32", words[-2], words[-2], "f32"]:
        raise ValueError("this product")
    to, a, b, c = ([part.strip() for part in operand.strip("{}").split(",")] for operand in operands)
    left, right = (", ".join(_value(part, "u32", function) for part in parts) for parts in (a, b))
    sums = ", ".join(_value(part, "f32", function) for part in c)
    stores = " ".join(_store(part, "f32", f"own.c[{index}]") for index, part in enumerate(to))
    work = f"thread->services->together(thread, &own, multiply<{number}>, {line});"
    return f"Fragment own{{{{{left}}}, {{{right}}}, {{{sums}}}}}; {work} {stores}"


def _fma_pairs(words: list[str], operands: list[str], function: _Function) -> str:
    """Of two numbers of 16 bits in a word."""
    number = {"f16x2": "Half", "bf16x2": "Bfloat"}[words[-1]]
    values = ", ".join(_value(operand, "u32", function) for operand in operands[1:])
    return _store(operands[0], "u32", f"fma_pairs<{number}>({values})")


def _bfi(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    kind = _type(words[-1])
    kinds = (kind, kind, "u32", "u32")
    values = [_value(operand, of, function) for operand, of in zip(operands[1:], kinds, strict=True)]
    return _store(operands[0], kind, f"insert_bits<{kind}>({', '.join(values)})")


def _cvta(words: list[str], operands: list[str], line: int, function: _Function) -> str:
    """Every kind of memory but shared has the addresses of this process."""
    if not {"global", "local"} & set(words):
        raise ValueError("this kind of memory")
    return _store(operands[0], "u64", _value(operands[1], "u64", function))


_Translate = Callable[[list[str], list[str], int, _Function], str]
_OTHERS: dict[str, _Translate] = {
    "ld": _memory,
    "st": _memory,
    "atom": _atom,
    "red": _atom,
    "setp": _setp,
    "selp": _selp,
    "cvt": _cvt,
    "cvta": _cvta,
    "bfi": _bfi,
    "mma": _mma,
    "prmt": _prmt,
    "bra": _branch,
    "bar": _barrier,
    "shfl": _shuffle,
    "vote": _vote,
    "ret": lambda words, operands, line, function: "return;",
    "exit": lambda words, operands, line, function: "return;",
    "membar": lambda words, operands, line, function: "",
    "fence": lambda words, operands, line, function: "",
}
