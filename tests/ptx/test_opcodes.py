"""Each opcode of the emulator against NumPy or Python's exact integers and fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.interpreter import run_as_python
from tests.ptx.assembly import DTYPES, evaluate
from tests.ptx.opcodes import BITS, Unsupported, form

pytestmark = pytest.mark.skipif(run_as_python(), reason="needs a C compiler")

SIZE = 256
RNG = np.random.default_rng(0)
NAN = 0x7FFFFFFF


def integers(kind, low=None, high=None):
    """Random values, among them the extreme ones."""
    info = np.iinfo(DTYPES[kind])
    if low is not None:
        return RNG.integers(low, high, SIZE).astype(DTYPES[kind])
    values = RNG.integers(info.min, info.max, SIZE, DTYPES[kind], endpoint=True)
    values[::3] >>= DTYPES[kind](BITS[kind] // 2)
    values[:8] = [0, 1, 2, 3, info.max, info.min, info.max - 1, info.min + 1]
    return RNG.permutation(values)


def floats(dtype=np.float32):
    """Random values of all sizes, among them zeros, denormal numbers, infinities and NaN."""
    info = np.finfo(dtype)
    values = (RNG.standard_normal(SIZE) * 2.0 ** RNG.integers(-8, 8, SIZE)).astype(dtype)
    values[:16] = [0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, info.max, -info.max, info.tiny,
                   info.smallest_subnormal, -info.tiny / dtype(2)]  # fmt: skip
    return RNG.permutation(values)


def wrapped(values, kind):
    """Python's integers as `kind` holds them."""
    bits = BITS[kind]
    return np.array([int(value) & (1 << bits) - 1 for value in values], f"u{bits // 8}").view(DTYPES[kind])


def same(got, expected):
    """Equal bits, but for the sign and the payload of NaN."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(got[known], expected[known])
    np.testing.assert_array_equal(np.signbit(got[known]), np.signbit(expected[known]))


def trunc_div(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY = {
    "add": lambda a, b, bits: a + b,
    "sub": lambda a, b, bits: a - b,
    "mul.lo": lambda a, b, bits: a * b,
    "mul.hi": lambda a, b, bits: a * b >> bits,
    "min": lambda a, b, bits: min(a, b),
    "max": lambda a, b, bits: max(a, b),
    "div": lambda a, b, bits: trunc_div(a, b) if b else -1,
    "rem": lambda a, b, bits: a - trunc_div(a, b) * b if b else a,
}


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("op", BINARY)
def test_integer_arithmetic(op, kind):
    a, b = integers(kind), integers(kind)
    (got,) = evaluate(f"{op}.{kind} {{0}}, {{1}}, {{2}};", kind, (kind, a), (kind, b))
    expected = [BINARY[op](int(x), int(y), BITS[kind]) for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(got, wrapped(expected, kind))


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_wide_products(kind):
    a, b = integers(kind), integers(kind)
    wide = f"{kind[0]}{2 * BITS[kind]}"
    c = integers(wide)
    product = [int(x) * int(y) for x, y in zip(a, b, strict=True)]
    (got,) = evaluate(f"mul.wide.{kind} {{0}}, {{1}}, {{2}};", wide, (kind, a), (kind, b))
    np.testing.assert_array_equal(got, wrapped(product, wide))
    (got,) = evaluate(f"mad.wide.{kind} {{0}}, {{1}}, {{2}}, {{3}};", wide, (kind, a), (kind, b), (wide, c))
    np.testing.assert_array_equal(got, wrapped([p + int(z) for p, z in zip(product, c, strict=True)], wide))


@pytest.mark.parametrize("kind", ["s32", "s64"])
def test_multiply_add(kind):
    a, b, c = integers(kind), integers(kind), integers(kind)
    (got,) = evaluate(f"mad.lo.{kind} {{0}}, {{1}}, {{2}}, {{3}};", kind, (kind, a), (kind, b), (kind, c))
    expected = [int(x) * int(y) + int(z) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(got, wrapped(expected, kind))


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_logic(kind):
    a, b = integers(kind), integers(kind)
    for op, expected in (("and", a & b), ("or", a | b), ("xor", a ^ b)):
        (got,) = evaluate(f"{op}.{kind} {{0}}, {{1}}, {{2}};", kind, (kind, a), (kind, b))
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(evaluate(f"not.{kind} {{0}}, {{1}};", kind, (kind, a))[0], ~a)


def test_logic_of_predicates():
    a, b = RNG.random(SIZE) < 0.5, RNG.random(SIZE) < 0.5
    for op, expected in (("and", a & b), ("or", a | b), ("xor", a ^ b)):
        (got,) = evaluate(f"{op}.pred {{0}}, {{1}}, {{2}};", "pred", ("pred", a), ("pred", b))
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(evaluate("not.pred {0}, {1};", "pred", ("pred", a))[0], ~a)
    np.testing.assert_array_equal(evaluate("mov.pred {0}, {1};", "pred", ("pred", a))[0], a)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_shifts_also_beyond_the_width(kind):
    a, by = integers(kind), integers("u32", 0, 2 * BITS[kind])
    by[:3] = 2**31, 2**32 - 1, BITS[kind]
    (left,) = evaluate(f"shl.b{BITS[kind]} {{0}}, {{1}}, {{2}};", kind, (kind, a), ("u32", by))
    (right,) = evaluate(f"shr.{kind} {{0}}, {{1}}, {{2}};", kind, (kind, a), ("u32", by))
    shifts = [min(int(n), BITS[kind]) for n in by]
    np.testing.assert_array_equal(left, wrapped([int(x) << n for x, n in zip(a, shifts, strict=True)], kind))
    np.testing.assert_array_equal(right, wrapped([int(x) >> n for x, n in zip(a, shifts, strict=True)], kind))


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shifts(mode):
    a, b, by = integers("b32"), integers("b32"), integers("u32", 0, 70)
    shifts = [int(n) & 31 if mode == "wrap" else min(int(n), 32) for n in by]
    both = [int(x) | int(y) << 32 for x, y in zip(a, b, strict=True)]
    operands = ("b32", a), ("b32", b), ("u32", by)
    (left,) = evaluate(f"shf.l.{mode}.b32 {{0}}, {{1}}, {{2}}, {{3}};", "b32", *operands)
    (right,) = evaluate(f"shf.r.{mode}.b32 {{0}}, {{1}}, {{2}}, {{3}};", "b32", *operands)
    np.testing.assert_array_equal(left, wrapped([x << n >> 32 for x, n in zip(both, shifts, strict=True)], "b32"))
    np.testing.assert_array_equal(right, wrapped([x >> n for x, n in zip(both, shifts, strict=True)], "b32"))


@pytest.mark.parametrize("bits", [32, 64])
def test_single_bits(bits):
    a = integers(f"u{bits}")
    for op, expected in (
        ("popc.b", [int(x).bit_count() for x in a]),
        ("clz.b", [bits - int(x).bit_length() for x in a]),
        ("bfind.u", [int(x).bit_length() - 1 for x in a]),
    ):
        (got,) = evaluate(f"{op}{bits} {{0}}, {{1}};", "u32", (f"u{bits}", a))
        np.testing.assert_array_equal(got, wrapped(expected, "u32"))
    (got,) = evaluate(f"brev.b{bits} {{0}}, {{1}};", f"u{bits}", (f"u{bits}", a))
    assert [f"{int(x):0{bits}b}" for x in got] == [f"{int(x):0{bits}b}"[::-1] for x in a]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind):
    bits = BITS[kind]
    a, b, start, length = integers(kind), integers(kind), integers("u32", 0, bits + 9), integers("u32", 0, bits + 9)
    (got,) = evaluate(f"bfe.{kind} {{0}}, {{1}}, {{2}}, {{3}};", kind, (kind, a), ("u32", start), ("u32", length))
    expected, inserted = [], []
    for x, y, s, n in zip(a, b, (int(s) for s in start), (int(n) for n in length), strict=True):
        sign = int(x) >> min(s + n - 1, bits - 1) & 1 if kind[0] == "s" and n else 0
        field = [(int(x) >> s + k & 1 if s + k < bits else sign) if k < n else sign for k in range(bits)]
        expected.append(sum(bit << k for k, bit in enumerate(field)))
        mask = ((1 << n) - 1 << s) & (1 << bits) - 1
        inserted.append(int(y) & ~mask | int(x) << s & mask)
    np.testing.assert_array_equal(got, wrapped(expected, kind))
    operands = (kind, a), (kind, b), ("u32", start), ("u32", length)
    (got,) = evaluate(f"bfi.b{bits} {{0}}, {{1}}, {{2}}, {{3}}, {{4}};", kind, *operands)
    np.testing.assert_array_equal(got, wrapped(inserted, kind))


def test_permuted_bytes_and_any_logic():
    a, b, c = integers("b32"), integers("b32"), integers("b32")
    operands = ("b32", a), ("b32", b), ("b32", c)
    (got,) = evaluate("prmt.b32 {0}, {1}, {2}, {3};", "b32", *operands)
    expected = []
    for x, y, z in zip(a, b, c, strict=True):
        data, value = (int(x) | int(y) << 32).to_bytes(8, "little"), 0
        for k in range(4):
            choice = int(z) >> 4 * k & 15
            byte = data[choice & 7]
            value |= (255 * (byte >> 7) if choice & 8 else byte) << 8 * k
        expected.append(value)
    np.testing.assert_array_equal(got, np.array(expected, np.uint32))
    for table, result in ((0x80, a & b & c), (0xFE, a | b | c), (0x96, a ^ b ^ c), (0xCA, (a & b) | (~a & c))):
        (got,) = evaluate(f"lop3.b32 {{0}}, {{1}}, {{2}}, {{3}}, {table};", "b32", *operands)
        np.testing.assert_array_equal(got, result)


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_signs_of_integers(kind):
    a = integers(kind)
    for op, expected in (("neg", [-int(x) for x in a]), ("abs", [abs(int(x)) for x in a])):
        (got,) = evaluate(f"{op}.{kind} {{0}}, {{1}};", kind, (kind, a))
        np.testing.assert_array_equal(got, wrapped(expected, kind))


def flushed(values):
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)


@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div.full", "div.rn", "add.rn"])
def test_float_arithmetic(op, ftz):
    a, b = floats(), floats()
    (got,) = evaluate(f"{op}{ftz}.f32 {{0}}, {{1}}, {{2}};", "f32", ("f32", a), ("f32", b))
    if ftz:
        a, b = flushed(a), flushed(b)
    numpys = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
    with np.errstate(all="ignore"):
        expected = numpys[op.partition(".")[0]](a, b)
    same(got, flushed(expected) if ftz else expected)
    assert set(got.view(np.uint32)[np.isnan(got)]) == {NAN}, "NVIDIA's arithmetic has one NaN"


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div.rn", "fma.rn"])
def test_float64_arithmetic(op):
    a, b, c = floats(np.float64), floats(np.float64), np.full(SIZE, -0.0)
    with np.errstate(all="ignore"):
        expected = {"add": a + b, "sub": a - b, "mul": a * b, "div.rn": a / b, "fma.rn": a * b + c}[op]
    operands = [("f64", a), ("f64", b), ("f64", c)][: 3 if op == "fma.rn" else 2]
    names = ", ".join(f"{{{k}}}" for k in range(len(operands) + 1))
    same(evaluate(f"{op}.f64 {names};", "f64", *operands)[0], expected)


def rounded(exact: Fraction, mode: str, dtype=np.float32):
    """A number as a float, by the distance to the floats around it."""
    near = dtype(float(exact))
    around = sorted({float(np.nextafter(near, dtype(-np.inf))), float(near), float(np.nextafter(near, dtype(np.inf)))})
    if mode == "rn":
        is_odd = {x: int(dtype(x).view(f"u{dtype().itemsize}")) & 1 for x in around}
        return dtype(min(around, key=lambda x: (abs(Fraction(x) - exact), is_odd[x])))
    below, above = max(x for x in around if x <= exact), min(x for x in around if x >= exact)
    toward_zero = below if exact > 0 else above
    return dtype({"rm": below, "rp": above, "rz": toward_zero}[mode])


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_every_rounding(mode):
    a, b, c = ((RNG.standard_normal(SIZE) * 2.0 ** RNG.integers(-20, 20, SIZE)).astype(np.float32) for _ in range(3))
    c[::2] = (-a.astype(np.float64) * b)[::2].astype(np.float32)  # what is left is the product's error
    x, y, z = ([Fraction(float(v)) for v in values] for values in (a, b, c))
    for op, results in (
        ("add", [p + q for p, q in zip(x, z, strict=True)]),
        ("mul", [p * q for p, q in zip(x, y, strict=True)]),
        ("div", [p / q for p, q in zip(x, y, strict=True)]),
        ("fma", [p * q + r for p, q, r in zip(x, y, z, strict=True)]),
    ):
        operands = {"add": (a, c), "fma": (a, b, c)}.get(op, (a, b))
        names = ", ".join(f"{{{k}}}" for k in range(len(operands) + 1))
        (got,) = evaluate(f"{op}.{mode}.f32 {names};", "f32", *(("f32", values) for values in operands))
        np.testing.assert_array_equal(got, [rounded(result, mode) for result in results])


@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma.rn", "max", "min"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("pairs", [False, True])
def test_half_precision(op, kind, pairs):
    def widen(bits):
        is_half = kind == "f16"
        return bits.view(np.float16).astype(np.float32) if is_half else (bits.astype(np.uint32) << 16).view(np.float32)

    a, b, c = (integers("b16") for _ in range(3))
    x, y, z = widen(a), widen(b), widen(c)
    operands, names = (3, "{0}, {1}, {2}, {3}") if op == "fma.rn" else (2, "{0}, {1}, {2}")
    if pairs:
        packed = [("b32", v.view(np.uint32)) for v in (np.tile(v, 2) for v in (a, b, c))][:operands]
        got = evaluate(f"{op}.{kind}x2 {names};", "b32", *packed)[0].view(np.uint16)[:SIZE]
    else:
        (got,) = evaluate(f"{op}.{kind} {names};", "b16", *[("b16", v) for v in (a, b, c)][:operands])
    around = [widen(got + np.uint16(step)) for step in (0, 1, 65535)]
    for k in range(SIZE):
        if not np.isfinite([x[k], y[k], z[k], *(values[k] for values in around)]).all():
            continue
        p, q, r = (Fraction(float(v[k])) for v in (x, y, z))
        exact = {"add": p + q, "sub": p - q, "mul": p * q, "fma.rn": p * q + r, "max": max(p, q), "min": min(p, q)}[op]
        distance, *others = (abs(Fraction(float(values[k])) - exact) for values in around)
        assert distance <= min(others), (x[k], y[k], z[k], around[0][k])


def test_minimum_and_maximum():
    a, b = floats(), floats()
    a[:4], b[:4] = [0.0, -0.0, np.nan, 1.0], [-0.0, 0.0, np.nan, np.nan]
    for name, function in (("max", np.fmax), ("min", np.fmin)):
        (got,) = evaluate(f"{name}.f32 {{0}}, {{1}}, {{2}};", "f32", ("f32", a), ("f32", b))
        np.testing.assert_array_equal(got, function(a, b))
        assert np.signbit(got[:2]).tolist() == [name == "min"] * 2, "-0 is less than +0"
        assert got.view(np.uint32)[2] == NAN
        (got,) = evaluate(f"{name}.NaN.f32 {{0}}, {{1}}, {{2}};", "f32", ("f32", a), ("f32", b))
        np.testing.assert_array_equal(got, np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), function(a, b)))


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("ex2.approx", np.exp2), ("lg2.approx", np.log2), ("rcp.rn", np.reciprocal), ("sqrt.rn", np.sqrt),
        ("rsqrt.approx", lambda x: 1 / np.sqrt(x)), ("sin.approx", np.sin), ("cos.approx", np.cos),
        ("tanh.approx", np.tanh), ("neg", np.negative), ("abs", np.abs),
    ],
)  # fmt: skip
def test_functions_of_floats(op, function):
    a = floats()
    with np.errstate(all="ignore"):
        expected = function(a.astype(np.float64)).astype(np.float32)
    (got,) = evaluate(f"{op}.f32 {{0}}, {{1}};", "f32", ("f32", a))
    np.testing.assert_allclose(got, expected, rtol=3e-7)
    (got,) = evaluate(f"{op}.ftz.f32 {{0}}, {{1}};", "f32", ("f32", a))
    with np.errstate(all="ignore"):
        expected = flushed(function(flushed(a).astype(np.float64)).astype(np.float32))
    np.testing.assert_allclose(got, expected, rtol=3e-7)


COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_comparisons_of_integers(kind):
    a = integers(kind)
    b = np.where(RNG.random(SIZE) < 0.3, a, integers(kind))
    for name, function in COMPARISONS.items():
        (got,) = evaluate(f"setp.{name}.{kind} {{0}}, {{1}}, {{2}};", "pred", (kind, a), (kind, b))
        np.testing.assert_array_equal(got, function(a, b))


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_comparisons_of_floats(kind):
    a = floats(np.float32)
    b = np.where(RNG.random(SIZE) < 0.3, a, floats(np.float32))
    if kind == "bf16":
        a, b = ((v.view(np.uint32) >> 16 << 16).view(np.float32) for v in (a, b))
        given = [("b16", (v.view(np.uint32) >> 16).astype(np.uint16)) for v in (a, b)]
    else:
        with np.errstate(over="ignore"):
            a, b = a.astype(DTYPES[kind]), b.astype(DTYPES[kind])
        given = [(kind, a), (kind, b)]
    unordered = np.isnan(a) | np.isnan(b)
    for name, function in COMPARISONS.items():
        ordered = function(a, b) & ~unordered
        (got,) = evaluate(f"setp.{name}.{kind} {{0}}, {{1}}, {{2}};", "pred", *given)
        np.testing.assert_array_equal(got, ordered)
        (got,) = evaluate(f"setp.{name}u.{kind} {{0}}, {{1}}, {{2}};", "pred", *given)
        np.testing.assert_array_equal(got, ordered | unordered)
    np.testing.assert_array_equal(evaluate(f"setp.nan.{kind} {{0}}, {{1}}, {{2}};", "pred", *given)[0], unordered)
    np.testing.assert_array_equal(evaluate(f"setp.num.{kind} {{0}}, {{1}}, {{2}};", "pred", *given)[0], ~unordered)


@pytest.mark.parametrize("to", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("source", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_conversions_of_integers(to, source):
    a = integers(source)
    (got,) = evaluate(f"cvt.{to}.{source} {{0}}, {{1}};", to, (source, a))
    np.testing.assert_array_equal(got, wrapped(a, to))


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("to", ["s32", "u32", "s64", "u64", "f32"])
def test_conversions_of_floats_to_integers(mode, to):
    a = floats()
    a[:6] = [3e9, -3e9, 1e19, -1e19, 2.0**31, -(2.0**63)]
    (got,) = evaluate(f"cvt.{mode}.{to}.f32 {{0}}, {{1}};", to, ("f32", a))
    whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](a)
    if to == "f32":
        same(got, whole)
        return
    info = np.iinfo(DTYPES[to])
    nan = 0 if BITS[to] == 32 else 1 << 63
    expected = [nan if np.isnan(x) else min(max(int(x), info.min), info.max) if np.isfinite(x)
                else info.max if x > 0 else info.min for x in whole]  # fmt: skip
    np.testing.assert_array_equal(got, wrapped(expected, to))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
def test_conversions_of_integers_to_floats(mode, source):
    a = integers(source)
    (got,) = evaluate(f"cvt.{mode}.f32.{source} {{0}}, {{1}};", "f32", (source, a))
    np.testing.assert_array_equal(got, [rounded(Fraction(int(x)), mode) for x in a])


def test_conversions_between_floats():
    halves = np.arange(65536, dtype=np.uint16)
    same(evaluate("cvt.f32.f16 {0}, {1};", "f32", ("b16", halves))[0], halves.view(np.float16).astype(np.float32))
    brains = (halves.astype(np.uint32) << 16).view(np.float32)
    same(evaluate("cvt.f32.bf16 {0}, {1};", "f32", ("b16", halves))[0], brains)
    a = floats()
    with np.errstate(over="ignore"):
        same(evaluate("cvt.rn.f16.f32 {0}, {1};", "b16", ("f32", a))[0].view(np.float16), a.astype(np.float16))
    got = (evaluate("cvt.rn.bf16.f32 {0}, {1};", "b16", ("f32", a))[0].astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(got) & np.isfinite(a)
    for x, y in zip(a[finite], got[finite], strict=True):
        bits, exact = int(np.float32(y).view(np.uint32)), Fraction(float(x))
        for other in (bits - 0x10000, bits + 0x10000):
            neighbour = np.uint32(other & 0xFFFFFFFF).view(np.float32)
            if np.isfinite(neighbour) and np.signbit(neighbour) == np.signbit(y):
                assert abs(Fraction(float(y)) - exact) <= abs(Fraction(float(neighbour)) - exact)
    assert np.isnan(got[np.isnan(a)]).all()
    (pair,) = evaluate("cvt.rn.bf16x2.f32 {0}, {1}, {2};", "b32", ("f32", a), ("f32", np.ones(SIZE, np.float32)))
    assert set(pair & 0xFFFF) == {0x3F80}, "the second operand is the lower half"
    same((pair >> 16 << 16).view(np.float32), got)
    wide = floats(np.float64)
    with np.errstate(over="ignore"):
        same(evaluate("cvt.rn.f32.f64 {0}, {1};", "f32", ("f64", wide))[0], wide.astype(np.float32))
    same(evaluate("cvt.f64.f32 {0}, {1};", "f64", ("f32", a))[0], a.astype(np.float64))


def test_selection_packing_and_parts_of_registers():
    a, b, p = integers("b64"), integers("b64"), RNG.random(SIZE) < 0.5
    (got,) = evaluate("selp.b64 {0}, {1}, {2}, {3};", "b64", ("b64", a), ("b64", b), ("pred", p))
    np.testing.assert_array_equal(got, np.where(p, a, b))
    parts = evaluate("mov.b64 {{{0}, {1}}}, {2};", "b32 b32", ("b64", a))
    np.testing.assert_array_equal(parts[0] | parts[1].astype(np.uint64) << np.uint64(32), a)
    (got,) = evaluate("mov.b64 {0}, {{{1}, {2}}};", "b64", ("b32", parts[0]), ("b32", parts[1]))
    np.testing.assert_array_equal(got, a)
    (got,) = evaluate("cvt.u32.u8 {0}, {1};", "b32", ("b32", parts[0]))
    np.testing.assert_array_equal(got, parts[0] & 0xFF)
    (got,) = evaluate("cvt.s32.s8 {0}, {1};", "s32", ("b32", parts[0]))
    np.testing.assert_array_equal(got, parts[0].astype(np.uint8).view(np.int8))
    (got,) = evaluate("mov.b32 {0}, 0f3F800000; @{1} add.s32 {0}, {0}, 1;", "b32", ("pred", p))
    np.testing.assert_array_equal(got, 0x3F800000 + p)


def shuffled(mode, lane, by, c):
    """(source lane, whether it is in bounds), as the PTX manual has it."""
    clamp, segment = c & 31, c >> 8 & 31
    last, first = lane & segment | clamp & ~segment, lane & segment
    source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | by & ~segment}[mode]
    valid = source >= last if mode == "up" else source <= last
    return (source if valid else lane), valid


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 8])
def test_shuffles(mode, width):
    a, c = integers("b32"), (32 - width) << 8 | (0 if mode == "up" else 31)
    for by in (0, 1, 3, 16, 31):
        got, valid = evaluate(f"shfl.sync.{mode}.b32 {{0}}|{{1}}, {{2}}, {by}, {c}, -1;", "b32 pred", ("b32", a))
        for k in range(SIZE):
            source, is_valid = shuffled(mode, k % 32, by, c)
            assert got[k] == a[k // 32 * 32 + source]
            assert valid[k] == is_valid


def test_reductions_and_votes_of_a_warp():
    a, u, p = integers("s32"), integers("u32"), RNG.random(SIZE) < 0.5
    for kind, values in (("s32", a), ("u32", u)):
        rows = values.reshape(-1, 32)
        for op, function in (("add", np.add), ("min", np.minimum), ("max", np.maximum)):
            (got,) = evaluate(f"redux.sync.{op}.{kind} {{0}}, {{1}}, 0xffffffff;", kind, (kind, values))
            expected = function.reduce(rows, 1, dtype=values.dtype)
            np.testing.assert_array_equal(got, np.repeat(expected, 32))
    for op, function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        (got,) = evaluate(f"redux.sync.{op}.b32 {{0}}, {{1}}, -1;", "u32", ("u32", u))
        np.testing.assert_array_equal(got, np.repeat(function.reduce(u.reshape(-1, 32), 1), 32))
    p[:32], p[32:64] = True, False
    rows = p.reshape(-1, 32)
    for op, expected in (("any", rows.any(1)), ("all", rows.all(1)), ("uni", rows.all(1) | ~rows.any(1))):
        (got,) = evaluate(f"vote.sync.{op}.pred {{0}}, {{1}}, -1;", "pred", ("pred", p))
        np.testing.assert_array_equal(got, np.repeat(expected, 32))
    (got,) = evaluate("vote.sync.ballot.b32 {0}, {1}, -1;", "b32", ("pred", p))
    np.testing.assert_array_equal(got, np.repeat(np.packbits(rows, 1, bitorder="little").view(np.uint32)[:, 0], 32))


@pytest.mark.parametrize("op", ["add.s16x2", "cvt.f32.s8x4", "shfl.sync.bfly.b64", "wgmma.mma", "setp.eq.and.s32"])
def test_what_is_not_known_is_refused(op):
    with pytest.raises(Unsupported):
        form(op)
