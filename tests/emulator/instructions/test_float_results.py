"""Floating-point instructions round exact results once, here by fractions."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from emulator.programs.lane_programs import run_lanes

# Stored bits of the significand, smallest normal exponent, largest number.
PRECISIONS = {
    "f16": (10, -14, 65504.0),
    "bf16": (7, -126, float.fromhex("0x1.fep127")),
    "f32": (23, -126, float.fromhex("0x1.fffffep127")),
    "f64": (52, -1022, float.fromhex("0x1.fffffffffffffp1023")),
}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0**-149, 2.0**-126, 1e38, 3e38, 2.0**-24, 65504.0]


def rounded(value: Fraction, name: str, mode: str) -> float:
    """A number rounded to a format, by comparing its neighbours."""
    mantissa, minimum, maximum = PRECISIONS[name]
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    exponent = max(exponent, minimum)
    quantum = Fraction(2) ** (exponent - mantissa)
    steps = magnitude / quantum
    whole, rest = steps.__floor__(), steps - steps.__floor__()
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
        "rz": False,
        "rp": value > 0 and rest > 0,
        "rm": value < 0 and rest > 0,
    }[mode]
    result = (whole + up) * quantum
    if result > Fraction(maximum):
        finite = mode == "rz" or (mode == "rp" and value < 0) or (mode == "rm" and value > 0)
        result_float = maximum if finite else float("inf")
    else:
        result_float = float(result)
    return -result_float if value < 0 else result_float


def operands(name: str, count: int) -> list[np.ndarray]:
    """Numbers of a format as float64, 64 of each: of all sizes, some next to each other."""
    generator = np.random.default_rng(5)
    _, minimum, maximum = PRECISIONS[name]
    arrays = []
    for index in range(count):
        exponents = generator.integers(-12, 13, 64)
        if index == 2:
            exponents = exponents * 2
        values = generator.standard_normal(64) * np.exp2(exponents)
        values[:10] = SPECIAL
        values[:10] = generator.permutation(values[:10])
        values[10:14] *= 2.0 ** (minimum // 2)
        values = np.clip(values, -maximum, maximum)
        arrays.append(np.array([rounded(Fraction(v), name, "rn") for v in values]))
    return arrays


def encoded(values: np.ndarray, name: str) -> np.ndarray:
    """Bits of numbers of a format."""
    if name == "f64":
        return values.view(np.uint64)
    if name == "f16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if name == "bf16" else bits


def decoded(bits: np.ndarray, name: str) -> np.ndarray:
    if name == "f64":
        return bits.view(np.float64)
    if name == "f16":
        return bits.view(np.float16).astype(float)
    wide = bits.astype(np.uint32) << np.uint32(16) if name == "bf16" else bits
    return wide.view(np.float32).astype(float)


OPERATIONS: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b,
}


HALVES = ("f16", "bf16")
# The ISA has halves only to nearest even, and no division of them.
INSTRUCTIONS = [
    *(f"{operation}.rn.{half}" for operation in ("add", "sub", "mul", "fma") for half in HALVES),
    *(
        f"{operation}.{mode}.{name}"
        for operation in OPERATIONS
        for mode in ("rn", "rz", "rm", "rp")
        for name in ("f32", "f64")
    ),
]


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_results_are_rounded_once(instruction: str) -> None:
    operation, mode, name = instruction.split(".")
    count = 3 if operation == "fma" else 2
    values = operands(name, count)
    if operation == "div":
        values[1] = np.where(values[1] == 0, 1.5, values[1])
    listed = ", ".join(f"%a{index}" for index in range(count))
    bits = [encoded(v, name) for v in values]
    (got,) = run_lanes(f"{instruction} %d0, {listed};", bits, [bits[0].dtype.type], block=64)
    for result, row in zip(decoded(got, name), zip(*values, strict=True), strict=True):
        expected = rounded(OPERATIONS[operation](*map(Fraction, row)), name, mode)
        assert result == expected, row


@pytest.mark.parametrize("name", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("operation", ["add", "mul", "fma"])
def test_pairs_are_two_results(operation: str, name: str) -> None:
    element = name.removesuffix("x2")
    count = 3 if operation == "fma" else 2
    values = operands(element, count)
    listed = ", ".join(f"%a{index}" for index in range(count))
    words = [encoded(v, element).view(np.uint32) for v in values]
    (got,) = run_lanes(f"{operation}.rn.{name} %d0, {listed};", words, [np.uint32])
    for result, row in zip(
        decoded(got.view(np.uint16), element), zip(*values, strict=True), strict=True
    ):
        assert result == rounded(OPERATIONS[operation](*map(Fraction, row)), element, "rn")


@pytest.mark.parametrize("operation", ["add", "mul", "fma"])
def test_pairs_of_singles(operation: str) -> None:
    count = 3 if operation == "fma" else 2
    values = operands("f32", count)
    listed = ", ".join(f"%a{index}" for index in range(count))
    words = [encoded(v, "f32").view(np.uint64) for v in values]
    (got,) = run_lanes(f"{operation}.rn.f32x2 %d0, {listed};", words, [np.uint64])
    for result, row in zip(got.view(np.float32), zip(*values, strict=True), strict=True):
        assert result == rounded(OPERATIONS[operation](*map(Fraction, row)), "f32", "rn")


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_halves_with_singles(half: str, mode: str) -> None:
    a, b = operands(half, 2)
    (c,) = operands("f32", 1)
    body = f"""
        fma.{mode}.f32.{half} %d0, %a0, %a1, %a2;
        add.{mode}.f32.{half} %d1, %a0, %a2;
        sub.{mode}.f32.{half} %d2, %a0, %a2;
    """
    bits = [encoded(a, half), encoded(b, half), encoded(c, "f32")]
    got = run_lanes(body, bits, [np.uint32] * 3, block=64)
    for lane, (x, y, z) in enumerate(zip(*(map(Fraction, v) for v in (a, b, c)), strict=True)):
        exact = [x * y + z, x + z, x - z]
        results = [column.view(np.float32)[lane] for column in got]
        assert results == [rounded(value, "f32", mode) for value in exact]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("text", "a", "b", "expected"),
    [
        ("min.f32", NAN, 2.0, 2.0),
        ("max.f32", 2.0, NAN, 2.0),
        ("min.NaN.f32", NAN, 2.0, NAN),
        ("min.f32", 0.0, -0.0, -0.0),
        ("max.f32", -0.0, 0.0, 0.0),
        ("max.xorsign.abs.f32", -3.0, 2.0, -3.0),
        ("min.xorsign.abs.f32", -3.0, -2.0, 2.0),
        ("add.f32", INF, -INF, NAN),
        ("mul.f32", 0.0, INF, NAN),
        ("mul.ftz.f32", 2.0**-140, 1.0, 0.0),
        ("mul.ftz.f32", -(2.0**-100), 2.0**-30, -0.0),
        ("add.sat.f32", 0.75, 0.75, 1.0),
        ("add.sat.f32", -0.75, 0.5, 0.0),
        ("add.sat.f32", NAN, 0.5, 0.0),
        ("copysign.f32", -1.0, 3.0, -3.0),
        ("div.approx.f32", 1.0, 0.0, INF),
    ],
)
def test_special_cases(text: str, a: float, b: float, expected: float) -> None:
    lanes = [np.full(32, value, np.float32).view(np.uint32) for value in (a, b)]
    (got,) = run_lanes(f"{text} %d0, %a0, %a1;", lanes, [np.uint32])
    wanted = np.float32(expected).view(np.uint32) if expected == expected else 0x7FFFFFFF
    assert got[0] == wanted


def test_three_operands_of_max() -> None:
    lanes = [np.full(32, value, np.float32).view(np.uint32) for value in (1.0, NAN, 4.0)]
    (got,) = run_lanes("max.f32 %d0, %a0, %a1, %a2;", lanes, [np.uint32])
    assert got.view(np.float32)[0] == 4.0


COMPARISONS = {
    "eq": (False, True, False),  # of 1 and 2, of 1 and 1, of NaN and 1
    "ne": (True, False, False),
    "lt": (True, False, False),
    "le": (True, True, False),
    "gt": (False, False, False),
    "ge": (False, True, False),
    "equ": (False, True, True),
    "neu": (True, False, True),
    "ltu": (True, False, True),
    "leu": (True, True, True),
    "gtu": (False, False, True),
    "geu": (False, True, True),
    "num": (True, True, False),
    "nan": (False, False, True),
}


@pytest.mark.parametrize("name", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("comparison", COMPARISONS)
def test_comparisons_of_floats(comparison: str, name: str) -> None:
    a = np.array([1.0, 1.0, NAN] + [0.0] * 29)
    b = np.array([2.0, 1.0, 1.0] + [0.0] * 29)
    body = f"""
        .reg .pred %p, %q; .reg .pred %c;
        setp.ne.u32 %c, %t, 1;
        setp.{comparison}.and.{name} %p|%q, %a0, %a1, %c;
        selp.u32 %d0, 1, 0, %p; selp.u32 %d1, 1, 0, %q;
    """
    bits = [encoded(v, name) for v in (a, b)]
    first, second = run_lanes(body, bits, [np.uint32, np.uint32])
    truth = COMPARISONS[comparison]
    allowed = (True, False, True)
    assert first[:3].tolist() == [t and c for t, c in zip(truth, allowed, strict=True)]
    assert second[:3].tolist() == [not t and c for t, c in zip(truth, allowed, strict=True)]


def test_comparisons_of_integers() -> None:
    a = np.array([1, 0xFFFFFFFF, 5, 0x80000000] * 8, np.uint32)
    b = np.array([2, 1, 5, 0x7FFFFFFF] * 8, np.uint32)
    for comparison, function in {
        "lt.s32": lambda x, y: np.int32(x) < np.int32(y),
        "lt.u32": lambda x, y: x < y,
        "hi.u32": lambda x, y: x > y,
        "hs.u32": lambda x, y: x >= y,
        "ne.b32": lambda x, y: x != y,
    }.items():
        operation, kind = comparison.split(".")
        body = f"""
            .reg .pred %p, %q;
            setp.{comparison} %p, %a0, %a1;
            setp.{operation}.xor.{kind} %q, %a0, %a1, !%p;
            selp.u32 %d0, 1, 0, %p; selp.u32 %d1, 1, 0, %q;
        """
        plain, combined = run_lanes(body, [a, b], [np.uint32, np.uint32])
        expected = [bool(function(x, y)) for x, y in zip(a, b, strict=True)]
        assert plain.tolist() == expected
        assert combined.tolist() == [1] * 32


def test_set_gives_integers_and_floats() -> None:
    a, b = (np.array([1, 3] * 16, np.uint32), np.array([2, 2] * 16, np.uint32))
    body = """
        set.lt.u32.u32 %d0, %a0, %a1;
        set.lt.f32.u32 %d1, %a0, %a1;
    """
    integers, floats = run_lanes(body, [a, b], [np.uint32, np.uint32])
    assert integers[:2].tolist() == [0xFFFFFFFF, 0]
    assert floats.view(np.float32)[:2].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("rcp.rn.f32", lambda a: 1 / a),
        ("sqrt.rn.f32", lambda a: np.sqrt(np.abs(a))),
        ("rsqrt.approx.f32", lambda a: 1 / np.sqrt(np.abs(a))),
        ("ex2.approx.f32", np.exp2),
        ("lg2.approx.f32", lambda a: np.log2(np.abs(a))),
        ("sin.approx.f32", np.sin),
        ("cos.approx.f32", np.cos),
        ("tanh.approx.f32", np.tanh),
    ],
)
def test_functions_of_one_operand(text: str, function: Callable[[np.ndarray], np.ndarray]) -> None:
    values = np.linspace(-3.1, 3.2, 32)
    if text.split(".")[0] in ("sqrt", "rsqrt", "lg2"):
        values = np.abs(values)
    bits = values.astype(np.float32)
    (got,) = run_lanes(f"{text} %d0, %a0;", [bits.view(np.uint32)], [np.uint32])
    assert np.array_equal(got.view(np.float32), function(bits.astype(float)).astype(np.float32))


def test_ex2_of_bf16_flushes() -> None:
    values = np.array([[1.5, -3.0], [2.0**-130, -140.0]], np.float32)
    pairs = (values.view(np.uint32) >> 16).astype(np.uint32)
    words = np.resize(pairs[:, 0] | pairs[:, 1] << 16, 32)
    (got,) = run_lanes("ex2.approx.ftz.bf16x2 %d0, %a0;", [words], [np.uint32])
    found = np.stack([got[:2] << 16, got[:2] & 0xFFFF0000], 1).view(np.float32)
    assert found.tolist() == [[2.828125, 0.125], [1.0, 0.0]]


def test_testp_classes() -> None:
    values = np.array([1.0, 0.0, 2.0**-140, INF, NAN] + [1.0] * 27, np.float32).view(np.uint32)
    tests = {
        "finite": [1, 1, 1, 0, 0],
        "infinite": [0, 0, 0, 1, 0],
        "number": [1, 1, 1, 1, 0],
        "notanumber": [0, 0, 0, 0, 1],
        "normal": [1, 1, 0, 0, 0],
        "subnormal": [0, 0, 1, 0, 0],
    }
    for name, expected in tests.items():
        body = f".reg .pred %p; testp.{name}.f32 %p, %a0; selp.u32 %d0, 1, 0, %p;"
        (got,) = run_lanes(body, [values], [np.uint32])
        assert got[:5].tolist() == expected, name
