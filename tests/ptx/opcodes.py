"""What each PTX opcode does, as C: the table from which the emulator is compiled.

`form(op)` gives an opcode's operand types and the statements that run it on the lanes of a warp. In them `m` is the
mask of lanes, `l` a lane, and `D(type, k)` and `S(type, k)` are the destination and source registers, 32 values each;
the rest of the names stand in `machine.h`. Predicates are one word of 32 bits.

Some spellings are the parser's (`program.py`): `sreg.tid.x`, `pack.2.b32`, `unpack.2.b64`, `ldparam.b64`,
`ld.global.v4.b32` with modifiers removed.
"""

from __future__ import annotations

import re
from itertools import product
from typing import NamedTuple

C_TYPES = {
    "b8": "uint8_t", "u8": "uint8_t", "s8": "int8_t",
    "b16": "uint16_t", "u16": "uint16_t", "s16": "int16_t", "f16": "uint16_t", "bf16": "uint16_t",
    "b32": "uint32_t", "u32": "uint32_t", "s32": "int32_t", "f32": "float",
    "b64": "uint64_t", "u64": "uint64_t", "s64": "int64_t",
}  # fmt: skip
BITS = {"pred": 1} | {name: int(re.sub(r"\D", "", name)) for name in C_TYPES}
SPECIAL_REGISTERS = {
    "tid.x": "w->index * 32 + l", "ctaid.x": "w->block->x", "ctaid.y": "w->block->y", "ctaid.z": "w->block->z",
    "nctaid.x": "w->machine->grid[0]", "nctaid.y": "w->machine->grid[1]",
}  # fmt: skip
FROM_HALF = {"f16": "from_half", "bf16": "from_bfloat"}
ROUNDINGS = {"rn": "FE_TONEAREST", "rz": "FE_TOWARDZERO"}
TO_INTEGER = {"rzi": "trunc", "rmi": "floor"}


class Unsupported(Exception):
    """An opcode or operand that the emulator does not know."""


class Form(NamedTuple):
    """Types of an opcode's operands and the C statements that run it.

    Types are PTX's, "pred", and "address64" or "address32", which stand for `[register + offset]`.
    """

    destinations: tuple[str, ...]
    sources: tuple[str, ...]
    body: str


def _lanewise(destination: str, sources: tuple[str, ...], value: str, op: str = "", rounding: str = "rn") -> Form:
    """An expression of a, b, c in each lane. With `.ftz` in `op`, float32 operands and results are flushed."""
    flush, is_arithmetic = ".ftz" in op, op.partition(".")[0] not in ("selp", "mov")
    if flush and destination == "f32":
        value = f"flush({value})"
    if destination == "f32" and is_arithmetic:
        value = f"canonical({value})"
    loads = ""
    for k, (kind, name) in enumerate(zip(sources, "abc", strict=False)):
        read = f"S({C_TYPES[kind]}, {k})[l]"
        loads += f"{C_TYPES[kind]} {name} = {f'flush({read})' if flush and kind == 'f32' else read}; "
    body = f"EACH({loads}D({C_TYPES[destination]}, 0)[l] = {value})"
    if rounding != "rn":
        body = f"fesetround({ROUNDINGS[rounding]}); {body} fesetround(FE_TONEAREST);"
    return Form((destination,), sources, body)


def _rounding(words: list[str]) -> str:
    return next((word for word in words if word in ROUNDINGS), "rn")


def _unsigned(kind: str) -> str:
    return C_TYPES["u" + kind[1:]]


def _add_sub_mul(op: str, words: list[str], kind: str) -> Form:
    sign = {"add": "+", "sub": "-", "mul": "*"}[words[0]]
    if "sat" in words or "cc" in words:
        raise Unsupported(op)
    if kind == "f32":
        return _lanewise(kind, (kind, kind), f"a {sign} b", op, _rounding(words))
    if "wide" in words:
        return _lanewise(wide := f"{kind[0]}{2 * BITS[kind]}", (kind, kind), f"({C_TYPES[wide]})a * b", op)
    if "hi" in words:
        product_type = {"s32": "int64_t", "u32": "uint64_t"}[kind]
        return _lanewise(kind, (kind, kind), f"({product_type})a * b >> 32", op)
    return _lanewise(kind, (kind, kind), f"({_unsigned(kind)})a {sign} ({_unsigned(kind)})b", op)


def _mad(op: str, words: list[str], kind: str) -> Form:
    if "wide" in words:
        wide = f"{kind[0]}{2 * BITS[kind]}"
        return _lanewise(wide, (kind, kind, wide), f"(u{C_TYPES[wide].lstrip('u')})(({C_TYPES[wide]})a * b) + c", op)
    if "lo" not in words:
        raise Unsupported(op)
    unsigned = _unsigned(kind)
    return _lanewise(kind, (kind,) * 3, f"({unsigned})a * ({unsigned})b + ({unsigned})c", op)


def _fma(op: str, words: list[str], kind: str) -> Form:
    if kind != "f32":
        raise Unsupported(op)
    return _lanewise(kind, (kind,) * 3, "__builtin_fmaf(a, b, c)", op, _rounding(words))


def _div(op: str, words: list[str], kind: str) -> Form:
    if kind == "f32":
        return _lanewise(kind, (kind, kind), "a / b", op, _rounding(words))
    least = "b == -1 ? 0 - a : " if kind[0] == "s" else ""
    return _lanewise(kind, (kind, kind), f"b == 0 ? -1 : {least}a / b", op)


def _min_max(op: str, words: list[str], kind: str) -> Form:
    name, sign = words[0], "<" if words[0] == "min" else ">"
    if {"NaN", "xorsign"} & set(words):
        raise Unsupported(op)
    value = f"{name}_number(a, b)" if kind == "f32" else f"a {sign} b ? a : b"
    return _lanewise(kind, (kind, kind), value, op)


def _neg_abs(op: str, words: list[str], kind: str) -> Form:
    is_neg = words[0] == "neg"
    if kind == "f32":
        return _lanewise(kind, (kind,), "-a" if is_neg else "__builtin_fabsf(a)", op.replace("neg", "mov"))
    return _lanewise(kind, (kind,), f"0 - ({_unsigned(kind)})a" if is_neg else f"a < 0 ? 0 - ({_unsigned(kind)})a : a")


def _logic(op: str, words: list[str], kind: str) -> Form:
    value = {"and": "a & b", "or": "a | b", "xor": "a ^ b", "not": "~a"}[words[0]]
    sources = (kind,) * (1 if words[0] == "not" else 2)
    if kind != "pred":
        return _lanewise(kind, sources, value)
    second = "S(uint32_t, 1)[0]" if len(sources) == 2 else "0"
    return Form(("pred",), sources, f"uint32_t a = S(uint32_t, 0)[0], b = {second}; (void)b; PREDICATE(0, {value})")


def _mov(op: str, words: list[str], kind: str) -> Form:
    if kind == "pred":
        return Form(("pred",), ("pred",), "PREDICATE(0, S(uint32_t, 0)[0])")
    return _lanewise(kind, (kind,), "a", "mov")


def _shift(op: str, words: list[str], kind: str) -> Form:
    bits = BITS[kind]
    if words[0] == "shr" and kind[0] == "s":
        return _lanewise(kind, (kind, "u32"), f"a >> (b < {bits} ? b : {bits - 1})")
    sign = "<<" if words[0] == "shl" else ">>"
    return _lanewise(kind, (kind, "u32"), f"b < {bits} ? a {sign} b : 0")


def _funnel_shift(op: str, words: list[str], kind: str) -> Form:
    if words[1:3] != ["l", "wrap"]:
        raise Unsupported(op)
    return _lanewise("b32", ("b32", "b32", "u32"), "(uint32_t)(((uint64_t)b << 32 | a) >> (32 - (c & 31)))")


def _bits(op: str, words: list[str], kind: str) -> Form:
    if words[0] == "popc":
        return _lanewise("u32", (kind,), "__builtin_popcountll(a)")
    if words[0] == "bfe":
        value = f"extract_bits(({_unsigned(kind)})a, b, c, {BITS[kind]}, {int(kind[0] == 's')})"
        return _lanewise(kind, (kind, "u32", "u32"), value)
    return _lanewise("b32", ("b32",) * 3, "permute_bytes(a, b, c)")  # prmt


def _function(op: str, words: list[str], kind: str) -> Form:
    """Of one float; the approximate ones, too, are exact to float32's rounding, which hardware's are not."""
    value = {"ex2": "exp2f(a)", "sqrt": "sqrtf(a)", "rsqrt": "1.0f / sqrtf(a)"}[words[0]]
    if kind != "f32" or _rounding(words) != "rn":
        raise Unsupported(op)
    return _lanewise(kind, (kind,), value, op)


def _selp(op: str, words: list[str], kind: str) -> Form:
    c = C_TYPES[kind].replace("float", "uint32_t")
    take = f"S(uint32_t, 2)[0] >> l & 1 ? S({c}, 0)[l] : S({c}, 1)[l]"
    return Form((kind,), (kind, kind, "pred"), f"EACH(D({c}, 0)[l] = {take})")


def _setp(op: str, words: list[str], kind: str) -> Form:
    words = [word for word in words[1:-1] if word != "ftz"]
    is_float = kind in ("f32", *FROM_HALF)
    if len(words) != 1:
        raise Unsupported(op)
    value = {
        "eq": "a == b", "ne": "(a < b || a > b)" if is_float else "a != b", "lt": "a < b", "le": "a <= b",
        "gt": "a > b", "ge": "a >= b",
        "equ": "!(a < b || a > b)", "neu": "!(a == b)", "ltu": "!(a >= b)", "leu": "!(a > b)", "gtu": "!(a <= b)",
        "geu": "!(a < b)", "num": "(a == a && b == b)", "nan": "(a != a || b != b)",
    }[words[0]]  # fmt: skip
    widen = FROM_HALF.get(kind) or ("flush" if ".ftz" in op else "")
    loads = " ".join(f"{'float' if kind in FROM_HALF else C_TYPES[kind]} {name} = {widen}(S({C_TYPES[kind]}, {k})[l]);"
                     for k, name in enumerate("ab"))  # fmt: skip
    compare = f"uint32_t set = 0; for (int l = 0; l < 32; l++) {{ {loads} set |= (uint32_t)({value}) << l; }}"
    return Form(("pred",), (kind, kind), f"{compare} PREDICATE(0, set)")


def _cvt(op: str, words: list[str], kind: str) -> Form:
    to, source = words[-2], kind
    modes = [word for word in words[1:-2] if word != "ftz"]
    mode = modes[0] if modes else ""
    if len(modes) > 1 or mode not in ("", *ROUNDINGS, *TO_INTEGER) or to in FROM_HALF:
        raise Unsupported(op)
    value = f"{FROM_HALF[source]}(a)" if source in FROM_HALF else "a"
    is_float, from_float = to == "f32", source in ("f32", *FROM_HALF)
    if from_float and mode in TO_INTEGER:
        value = f"{TO_INTEGER[mode]}f({value})"
    if from_float and not is_float:
        if mode not in TO_INTEGER:
            raise Unsupported(op)
        value = f"{'wide' if BITS[to] == 64 else 'narrow'}_to_{to}({value})"
    return _lanewise(to, (source,), f"({C_TYPES[to]})({value})", op if from_float else "mov",
                     mode if mode in ROUNDINGS else "rn")  # fmt: skip


def _pack(op: str, words: list[str], kind: str) -> Form:
    count, bits = int(words[1]), BITS[kind] // int(words[1])
    value = " | ".join(f"({C_TYPES[kind]})S(uint{bits}_t, {k})[l] << {k * bits}" for k in range(count))
    return Form((kind,), (f"b{bits}",) * count, f"EACH(D({C_TYPES[kind]}, 0)[l] = {value})")


def _unpack(op: str, words: list[str], kind: str) -> Form:
    count, bits = int(words[1]), BITS[kind] // int(words[1])
    stores = " ".join(f"D(uint{bits}_t, {k})[l] = value >> {k * bits};" for k in range(count))
    return Form((f"b{bits}",) * count, (kind,), f"EACH({C_TYPES[kind]} value = S({C_TYPES[kind]}, 0)[l]; {stores})")


def _special_register(op: str, words: list[str], kind: str) -> Form:
    return Form(("u32",), (), f"EACH(D(uint32_t, 0)[l] = {SPECIAL_REGISTERS[op.partition('.')[2]]})")


def _parameter(op: str, words: list[str], kind: str) -> Form:
    return Form((kind,), (), f"EACH(D(uint{BITS[kind]}_t, 0)[l] = w->machine->parameters[i->offset])")


def _load_store(op: str, words: list[str], kind: str) -> Form:
    space, count = words[1].upper(), int(words[2][1:]) if words[2][0] == "v" else 1
    address = "address64" if space == "GLOBAL" else "address32"
    c = f"uint{BITS[kind]}_t"
    if words[0] == "ld":
        return Form((kind,) * count, (address,), f"LOAD({space}, {c}, {count})")
    return Form((), (address, *(kind,) * count), f"STORE({space}, {c}, {count})")


def _atomic(op: str, words: list[str], kind: str) -> Form:
    space, value = words[1].upper(), {"add": "a + b", "max": "a > b ? a : b", "or": "a | b"}[words[2]]
    address = "address64" if space == "GLOBAL" else "address32"
    return Form((kind,) if words[0] == "atom" else (), (address, kind), f"ATOMIC({space}, {C_TYPES[kind]}, {value})")


def _redux(op: str, words: list[str], kind: str) -> Form:
    value = {"add": "x + y", "min": "y < x ? y : x", "max": "y > x ? y : x"}[words[2]]
    c = C_TYPES[kind]
    return Form((kind,), (kind, "b32"), (
        f"int first = __builtin_ctz(m); {c} x = S({c}, 0)[first]; "
        f"for (int l = first + 1; l < 32; l++) if (m >> l & 1) {{ {c} y = S({c}, 0)[l]; x = {value}; }} "
        f"EACH(D({c}, 0)[l] = x)"
    ))  # fmt: skip


def _shuffle(op: str, words: list[str], kind: str) -> Form:
    if kind != "b32":
        raise Unsupported(op)
    source, ok = {
        "bfly": ("l ^ by", "from <= last"), "up": ("l - by", "from >= last"),
        "idx": ("(l & segment) | (by & ~segment)", "from <= last"),
    }[words[2]]  # fmt: skip
    return Form(("b32",), ("b32",) * 4, (
        "uint32_t values[32], got[32]; memcpy(values, S(uint32_t, 0), 128); "
        "for (int l = 0; l < 32; l++) if (m >> l & 1) { int by = S(uint32_t, 1)[l] & 31, c = S(uint32_t, 2)[l], "
        f"segment = c >> 8 & 31, last = (l & segment) | (c & 31 & ~segment), from = {source}; "
        f"if (!({ok})) from = l; "
        "if (!(m >> from & 1)) FAIL(INACTIVE_SOURCE, l, from) got[l] = values[from]; } "
        "EACH(D(uint32_t, 0)[l] = got[l])"
    ))  # fmt: skip


def _matrix(op: str, words: list[str], kind: str) -> Form:
    """8 x 8 matrices of 16-bit values in shared memory: lane r gives row r's address, lane l holds two of row l / 4."""
    count = int(next(word for word in words if word[0] == "x")[1:])
    if "trans" in words or kind != "b16":
        raise Unsupported(op)
    if words[0] == "ldmatrix":
        return Form(("b32",) * count, ("address32",), f"MATRIX_LOAD({count})")
    return Form((), ("address32", *("b32",) * count), f"MATRIX_STORE({count})")


FAMILIES = {
    "add": _add_sub_mul, "sub": _add_sub_mul, "mul": _add_sub_mul, "mad": _mad, "fma": _fma, "div": _div,
    "min": _min_max, "max": _min_max, "neg": _neg_abs, "abs": _neg_abs, "and": _logic, "or": _logic,
    "xor": _logic, "not": _logic, "mov": _mov, "shl": _shift, "shr": _shift, "shf": _funnel_shift, "popc": _bits,
    "bfe": _bits, "prmt": _bits, "ex2": _function, "sqrt": _function, "rsqrt": _function,
    "selp": _selp, "setp": _setp, "cvt": _cvt, "pack": _pack, "unpack": _unpack, "sreg": _special_register,
    "ldparam": _parameter, "ld": _load_store, "st": _load_store, "atom": _atomic, "red": _atomic, "redux": _redux,
    "shfl": _shuffle, "ldmatrix": _matrix, "stmatrix": _matrix,
}  # fmt: skip
OF_HALVES = ("cvt", "setp")


def form(op: str) -> Form:
    """The opcode's operands and C statements; raises `Unsupported` where it is not known."""
    words = op.split(".")
    if words[-1] in FROM_HALF and words[0] not in OF_HALVES:
        raise Unsupported(op)
    try:
        return FAMILIES[words[0]](op, words, words[-1])
    except (KeyError, IndexError, ValueError, StopIteration):
        raise Unsupported(op) from None


def _expand(*patterns: str) -> list[str]:
    """ "add.{s32,u32}" gives add.s32 and add.u32."""
    found = []
    for pattern in patterns:
        parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
        found += ["".join(choice) for choice in product(*parts)]
    return found


def common_forms() -> list[str]:
    """Opcodes that Triton emits: these are compiled at once, further ones when a kernel has them."""
    return _expand(
        "{add,sub}.{s32,s64}", "mul.lo.{s32,s64}", "mul.hi.{s32,u32}", "mul.wide.{s32,u32}", "mad.lo.{s32,s64}",
        "mad.wide.{s32,u32}", "div.{s32,s64,u32}", "{max,min}.{s32,s64,u32,f32}", "{neg,abs}.{s32,s64,f32}",
        "{add,sub,mul}.{f32,rn.f32}", "fma.rn.{f32,ftz.f32}", "div.full.f32", "{and,or,xor}.{pred,b16,b32,b64}",
        "not.{pred,b32,b64}", "mov.{pred,b16,u16,b32,u32,b64,u64}", "shl.{b16,b32,b64}", "shr.{u32,s32,u64,s64}",
        "shf.l.wrap.b32", "popc.{b32,b64}", "prmt.b32", "bfe.{u32,s64}", "ex2.approx.{f32,ftz.f32}",
        "{sqrt,rsqrt}.approx.ftz.f32", "selp.{b16,b32,b64,f32}", "setp.{eq,ne,lt,le,gt,ge}.{s32,u32,s64,u64}",
        "setp.{eq,ne}.{b16,b32,b64}", "setp.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.f32",
        "setp.{ne,le,ge}.{f16,bf16}", "cvt.{u32.u64,u64.u32,s64.s32,u16.u8,u8.u16,u32.u16}", "cvt.f32.{f16,bf16}",
        "cvt.rn.f32.{s32,u32,s64}", "cvt.rzi.{s32,u32,s64}.f32", "cvt.rmi.ftz.f32.f32", "{pack,unpack}.2.b32",
        "unpack.2.b64", "sreg.{tid.x,ctaid.x,ctaid.y,ctaid.z,nctaid.x,nctaid.y}", "ldparam.{b32,b64}",
        "{ld,st}.global.{b8,b16,b32,b64}", "{ld,st}.global.{v2,v4}.b32", "{ld,st}.global.v2.b64",
        "{ld,st}.shared.{b8,b32,b64}", "{ld,st}.shared.{v2,v4}.b32", "{ld,st}.shared.v2.b64",
        "{red,atom}.global.add.{u32,u64}", "redux.sync.{add,min,max}.s32", "redux.sync.{min,max}.u32",
        "shfl.sync.{bfly,up,idx}.b32", "{ldmatrix,stmatrix}.sync.aligned.m8n8.{x1,x4}.shared.b16",
    )  # fmt: skip
