"""Each kind of opcode of the emulator against NumPy or Python's exact integers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.interpreter import run_as_python
from tests.ptx.assembly import DTYPES, evaluate
from tests.ptx.opcodes import BITS, Unsupported, form

pytestmark = pytest.mark.skipif(run_as_python(), reason="needs a C compiler")

SIZE = 256
RNG = np.random.default_rng(0)
NAN = 0x7FFFFFFF


def integers(kind):
    """Random values, among them the extreme ones."""
    info = np.iinfo(DTYPES[kind])
    values = RNG.integers(info.min, info.max, SIZE, DTYPES[kind], endpoint=True)
    values[::3] >>= DTYPES[kind](BITS[kind] // 2)
    values[:8] = [0, 1, 2, 3, info.max, info.min, info.max - 1, info.min + 1]
    return RNG.permutation(values)


def floats():
    """Random values of all sizes, among them zeros, denormal numbers, infinities and NaN."""
    info = np.finfo(np.float32)
    values = (RNG.standard_normal(SIZE) * 2.0 ** RNG.integers(-8, 8, SIZE)).astype(np.float32)
    values[:16] = [0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, info.max, -info.max, info.tiny,
                   info.smallest_subnormal, -info.tiny / np.float32(2)]  # fmt: skip
    return RNG.permutation(values)


def wrapped(values, kind):
    """Python's integers as `kind` holds them."""
    bits = BITS[kind]
    return np.array([int(value) & (1 << bits) - 1 for value in values], f"u{bits // 8}").view(DTYPES[kind])


def flushed(values):
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)


def same(got, expected):
    """Equal bits, but for the sign and the payload of NaN."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(got[known], expected[known])
    np.testing.assert_array_equal(np.signbit(got[known]), np.signbit(expected[known]))


def run(op, result, *operands):
    """What an instruction gives for operands: (kind, values)."""
    names = ", ".join(f"{{{k}}}" for k in range(len(operands) + 1))
    return evaluate(f"{op} {names};", result, *operands)[0]


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else -1


def permuted(a, b, selector):
    """Bytes of both, each chosen by four bits, of which the highest takes the byte's sign."""
    found = ((b << 32 | a) >> 8 * (selector >> 4 * k & 7) & 255 for k in range(4))
    signed = ((-(byte >> 7) if selector >> 4 * k & 8 else byte) & 255 for k, byte in enumerate(found))
    return sum(byte << 8 * k for k, byte in enumerate(signed))


def field(a, start, length, kind):
    """Some bits of a number; of a signed one the highest of them is their sign."""
    bits = a >> start & (1 << length) - 1
    is_negative = kind[0] == "s" and length > 0 and bits >> length - 1
    return bits - (1 << length) if is_negative else bits


INTEGER_OPCODES = {
    "add.{}": ("s32 s64", 2, lambda a, b, n: a + b),
    "sub.{}": ("s32 s64", 2, lambda a, b, n: a - b),
    "mul.lo.{}": ("s32 s64", 2, lambda a, b, n: a * b),
    "mul.hi.{}": ("s32 u32", 2, lambda a, b, n: a * b >> n),
    "mad.lo.{}": ("s32 s64", 3, lambda a, b, c, n: a * b + c),
    "div.{}": ("s32 u32 s64", 2, lambda a, b, n: quotient(a, b)),
    "max.{}": ("s32 u32 s64", 2, lambda a, b, n: max(a, b)),
    "min.{}": ("s32 u32 s64", 2, lambda a, b, n: min(a, b)),
    "neg.{}": ("s32 s64", 1, lambda a, n: -a),
    "abs.{}": ("s32 s64", 1, lambda a, n: abs(a)),
    "and.{}": ("b16 b64", 2, lambda a, b, n: a & b),
    "or.{}": ("b16 b32", 2, lambda a, b, n: a | b),
    "xor.{}": ("b32 b64", 2, lambda a, b, n: a ^ b),
    "not.{}": ("b32 b64", 1, lambda a, n: ~a),
    "popc.{}": ("b32", 1, lambda a, n: a.bit_count()),
    "prmt.{}": ("b32", 3, lambda a, b, c, n: permuted(a, b, c)),
    "shf.l.wrap.{}": ("b32", 3, lambda a, b, c, n: (b << 32 | a) << (c & 31) >> 32),
}


@pytest.mark.parametrize("op", INTEGER_OPCODES)
def test_integers(op):
    kinds, num_operands, function = INTEGER_OPCODES[op]
    for kind in kinds.split():
        operands = [integers(kind) for _ in range(num_operands)]
        got = run(op.format(kind), kind, *((kind, values) for values in operands))
        rows = zip(*(values.tolist() for values in operands), strict=True)
        np.testing.assert_array_equal(got, wrapped([function(*row, BITS[kind]) for row in rows], kind))


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_wide_products(kind):
    wide = f"{kind[0]}64"
    a, b, c = integers(kind), integers(kind), integers(wide)
    rows = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    got = run(f"mul.wide.{kind}", wide, (kind, a), (kind, b))
    np.testing.assert_array_equal(got, wrapped([x * y for x, y, _ in rows], wide))
    got = run(f"mad.wide.{kind}", wide, (kind, a), (kind, b), (wide, c))
    np.testing.assert_array_equal(got, wrapped([x * y + z for x, y, z in rows], wide))


@pytest.mark.parametrize("op", ["shl.b16", "shl.b32", "shl.b64", "shr.u32", "shr.s32", "shr.u64", "shr.s64"])
def test_shifts(op):
    kind = op.partition(".")[2]
    a, by = integers(kind), RNG.integers(0, 80, SIZE).astype(np.uint32)
    pairs = zip(a.tolist(), by.tolist(), strict=True)
    expected = [x << n if op.startswith("shl") else x >> n for x, n in pairs]
    np.testing.assert_array_equal(run(op, kind, (kind, a), ("u32", by)), wrapped(expected, kind))


@pytest.mark.parametrize("kind", ["u32", "s64"])
def test_fields_of_bits(kind):
    a, (start, length) = integers(kind), RNG.integers(0, BITS[kind] // 2, (2, SIZE)).astype(np.uint32)
    got = run(f"bfe.{kind}", kind, (kind, a), ("u32", start), ("u32", length))
    rows = zip(a.tolist(), start.tolist(), length.tolist(), strict=True)
    np.testing.assert_array_equal(got, wrapped([field(*row, kind) for row in rows], kind))


@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div.full", "add.rn", "max", "min"])
def test_floats(op, ftz):
    a, b = floats(), floats()
    a[:4], b[:4] = [0.0, -0.0, np.nan, 1.0], [-0.0, 0.0, np.nan, np.nan]
    got = run(f"{op}{ftz}.f32", "f32", ("f32", a), ("f32", b))
    if ftz:
        a, b = flushed(a), flushed(b)
    functions = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "max": np.fmax,
        "min": np.fmin,
    }
    with np.errstate(all="ignore"):
        expected = functions[op.partition(".")[0]](a, b)
    if op in ("max", "min"):  # -0 is less than +0
        are_zeros, choose = (a == 0) & (b == 0), np.logical_or if op == "min" else np.logical_and
        expected = np.where(are_zeros, np.where(choose(np.signbit(a), np.signbit(b)), -0.0, 0.0), expected)
        expected = expected.astype(np.float32)
    same(got, flushed(expected) if ftz else expected)
    assert set(got.view(np.uint32)[np.isnan(got)]) == {NAN}, "NVIDIA's arithmetic has one NaN"


def test_roundings_of_floats():
    """Sums toward zero; and of fused multiply-adds, of which the error of a product is left."""
    a, b = (RNG.standard_normal((2, SIZE)) * 2.0 ** RNG.integers(-4, 4, (2, SIZE))).astype(np.float32)
    exact = a.astype(np.float64) + b
    near = exact.astype(np.float32)
    expected = np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)
    same(run("add.rz.ftz.f32", "f32", ("f32", a), ("f32", b)), expected)
    error = a.astype(np.float64) * b - a * b
    assert np.count_nonzero(error) > SIZE / 2
    for op in ("fma.rn.f32", "fma.rn.ftz.f32"):
        same(run(op, "f32", ("f32", a), ("f32", b), ("f32", -(a * b))), error.astype(np.float32))


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("ex2.approx", np.exp2), ("lg2.approx", np.log2), ("sqrt.approx", np.sqrt),
        ("rsqrt.approx", lambda x: 1 / np.sqrt(x)), ("neg", np.negative), ("abs", np.abs),
    ],
)  # fmt: skip
def test_functions_of_floats(op, function):
    a = floats()
    with np.errstate(all="ignore"):
        plain, small = (function(x.astype(np.float64)).astype(np.float32) for x in (a, flushed(a)))
    np.testing.assert_allclose(run(f"{op}.f32", "f32", ("f32", a)), plain, rtol=3e-7)
    np.testing.assert_allclose(run(f"{op}.ftz.f32", "f32", ("f32", a)), flushed(small), rtol=3e-7)


COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["b16", "s32", "u32", "s64", "u64"])
def test_comparisons_of_integers(kind):
    a = integers(kind)
    b = np.where(RNG.random(SIZE) < 0.3, a, integers(kind))
    for name, function in COMPARISONS.items():
        np.testing.assert_array_equal(run(f"setp.{name}.{kind}", "pred", (kind, a), (kind, b)), function(a, b))


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_comparisons_and_maxima_of_floats(kind):
    a = floats()
    b = np.where(RNG.random(SIZE) < 0.3, a, floats())
    if kind == "bf16":
        a, b = ((v.view(np.uint32) >> 16 << 16).view(np.float32) for v in (a, b))
        given = [("b16", (v.view(np.uint32) >> 16).astype(np.uint16)) for v in (a, b)]
        got = run("max.bf16", "b16", *given)
        got = (got.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(got, np.fmax(a, b))
    else:
        with np.errstate(over="ignore"):
            a, b = a.astype(DTYPES[kind]), b.astype(DTYPES[kind])
        given = [(kind, a), (kind, b)]
    unordered = np.isnan(a) | np.isnan(b)
    for name, function in COMPARISONS.items():
        ordered = function(a, b) & ~unordered
        np.testing.assert_array_equal(run(f"setp.{name}.{kind}", "pred", *given), ordered)
        np.testing.assert_array_equal(run(f"setp.{name}u.{kind}", "pred", *given), ordered | unordered)
    np.testing.assert_array_equal(run(f"setp.nan.{kind}", "pred", *given), unordered)
    np.testing.assert_array_equal(run(f"setp.num.{kind}", "pred", *given), ~unordered)


@pytest.mark.parametrize("source", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_conversions_of_integers(source):
    a = integers(source)
    for to in ("s16", "u16", "s32", "u32", "s64", "u64"):
        np.testing.assert_array_equal(run(f"cvt.{to}.{source}", to, (source, a)), wrapped(a, to))
    if BITS[source] >= 32:
        same(run(f"cvt.rn.f32.{source}", "f32", (source, a)), a.astype(np.float32))


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_conversions_to_whole_numbers(mode):
    a = floats()
    a[:6] = [3e9, -3e9, 1e19, -1e19, 2.0**31, -(2.0**63)]
    whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](a)
    same(run(f"cvt.{mode}.f32.f32", "f32", ("f32", a)), whole)
    for to in ("s32", "u32", "s64", "u64"):
        info, nan = np.iinfo(DTYPES[to]), 0 if BITS[to] == 32 else 1 << 63
        expected = [nan if np.isnan(x) else min(max(int(x), info.min), info.max) if np.isfinite(x)
                    else info.max if x > 0 else info.min for x in whole]  # fmt: skip
        np.testing.assert_array_equal(run(f"cvt.{mode}.{to}.f32", to, ("f32", a)), wrapped(expected, to))


def test_conversions_of_half_precision():
    halves = np.arange(65536, dtype=np.uint16)
    same(run("cvt.f32.f16", "f32", ("b16", halves)), halves.view(np.float16).astype(np.float32))
    same(run("cvt.f32.bf16", "f32", ("b16", halves)), (halves.astype(np.uint32) << 16).view(np.float32))


def test_selection_predicates_and_parts_of_registers():
    a, b, p, q = integers("b64"), integers("b64"), *(RNG.random((2, SIZE)) < 0.5)
    got = run("selp.b64", "b64", ("b64", a), ("b64", b), ("pred", p))
    np.testing.assert_array_equal(got, np.where(p, a, b))
    for op, expected in (("and", p & q), ("or", p | q), ("xor", p ^ q)):
        np.testing.assert_array_equal(run(f"{op}.pred", "pred", ("pred", p), ("pred", q)), expected)
    np.testing.assert_array_equal(run("not.pred", "pred", ("pred", p)), ~p)
    parts = evaluate("mov.b64 {{{0}, {1}}}, {2};", "b32 b32", ("b64", a))
    np.testing.assert_array_equal(parts[0] | parts[1].astype(np.uint64) << np.uint64(32), a)
    (got,) = evaluate("mov.b64 {0}, {{{1}, {2}}};", "b64", ("b32", parts[0]), ("b32", parts[1]))
    np.testing.assert_array_equal(got, a)
    np.testing.assert_array_equal(run("cvt.u32.u8", "b32", ("b32", parts[0])), parts[0] & 0xFF)
    (got,) = evaluate("mov.b32 {0}, 0f3F800000; @{1} add.s32 {0}, {0}, 1;", "b32", ("pred", p))
    np.testing.assert_array_equal(got, 0x3F800000 + p)


def source_of(mode, lane, by, c):
    """The lane that a shuffle reads, as the PTX manual has it: the own one where that is out of bounds."""
    clamp, segment = c & 31, c >> 8 & 31
    last, first = lane & segment | clamp & ~segment, lane & segment
    source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | by & ~segment}[mode]
    return source if (source >= last if mode == "up" else source <= last) else lane


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode):
    a = integers("b32")
    for width in (32, 8):
        c = (32 - width) << 8 | (0 if mode == "up" else 31)
        for by in (0, 1, 3, 16, 31):
            (got,) = evaluate(f"shfl.sync.{mode}.b32 {{0}}, {{1}}, {by}, {c}, -1;", "b32", ("b32", a))
            assert got.tolist() == [a[k // 32 * 32 + source_of(mode, k % 32, by, c)] for k in range(SIZE)]


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_reductions_of_a_warp(kind):
    values = integers(kind)
    for op, function in (("add", np.add), ("min", np.minimum), ("max", np.maximum)):
        (got,) = evaluate(f"redux.sync.{op}.{kind} {{0}}, {{1}}, 0xffffffff;", kind, (kind, values))
        expected = function.reduce(values.reshape(-1, 32), 1, dtype=values.dtype)
        np.testing.assert_array_equal(got, np.repeat(expected, 32))


@pytest.mark.parametrize("op", ["add.s16x2", "add.f64", "fma.rn.bf16", "max.NaN.f32", "max.f16", "cvt.rn.f16.f32",
                                "shfl.sync.bfly.b64", "wgmma.mma", "setp.eq.and.s32"])  # fmt: skip
def test_what_is_not_known_is_refused(op):
    with pytest.raises(Unsupported):
        form(op)
