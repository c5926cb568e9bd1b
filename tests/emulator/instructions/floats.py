"""Floating-point arithmetic (PTX ISA 9.7.3 to 9.7.5): FP32, FP64, FP16, BF16 and their pairs.

Approximate instructions (`.approx`, `ex2`, `tanh`, ...) give the correctly rounded result, which is
within every error bound that the ISA states, but not always what a GPU gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emulator.numbers.double_precision import compile_double
from emulator.numbers.float_rounding import (
    BF16,
    F16,
    F32,
    F64,
    FORMATS,
    FloatFormat,
    add_to_odd,
    flush,
)

from .elementwise import apply_function, write
from .registry import Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

Arrays = Callable[..., np.ndarray]

_ROUNDING = ("rn", "rz", "rm", "rp")
_NO_LANE = bytes(32)


@dataclass(frozen=True)
class Kind:
    """What an instruction computes on: a format, one or two values a register, and `.ftz`."""

    format: FloatFormat
    count: int
    ftz: bool

    @property
    def dtype(self) -> type:
        """Registers as bits."""
        return np.dtype(f"u{self.format.bits * self.count // 8}").type

    def values(self, bits: np.ndarray) -> np.ndarray:
        """Registers as float64 values; two rows of values for pairs are in one array."""
        if self.count > 1:
            bits = np.ascontiguousarray(bits).view(
                np.uint16 if self.format.bits == 16 else np.uint32
            )
        decoded = self.format.decode(bits)
        return flush(decoded, self.format.minimum_exponent) if self.ftz else decoded

    def bits(self, values: np.ndarray) -> np.ndarray:
        """Registers of values of the format."""
        if self.ftz:
            values = flush(values, self.format.minimum_exponent)
        return self.format.encode(values).view(self.dtype)


def take_kind(op: Decoder) -> Kind:
    """Take the type and `.ftz`."""
    ftz = op.flag("ftz")
    name = op.type()
    pair = name.endswith("x2")
    float_format = FORMATS.get(name.removesuffix("x2"))
    if float_format is None or float_format.name == "tf32":
        raise op.unsupported("no float type")
    flushed = (F32, F16, BF16) if op.instruction.parts[0] == "ex2" else (F32, F16)
    if ftz and float_format not in flushed:
        raise op.unsupported(f".ftz of {name}")
    return Kind(float_format, 2 if pair else 1, ftz)


def _take_rounding(op: Decoder) -> str:
    return op.one_of(*_ROUNDING, default="rn")


def is_float(op: Decoder) -> bool:
    """Whether the instruction's type is a float; integers and floats share names."""
    return any(name.removesuffix("x2") in FORMATS for name in op.modifiers)


def compile_general(op: Decoder, kind: Kind, exact: Arrays, mode: str, operands: int) -> Closure:
    """An operation by its exact result (float64, or rounded to odd), rounded to the format.

    Also takes `.sat`, which clamps to [0, 1] and makes NaN 0, and `.relu`.
    """
    op.expect_operands(operands)
    saturate, relu = op.flag("sat"), op.flag("relu")

    def function(*registers: np.ndarray) -> np.ndarray:
        values = exact(*[kind.values(register) for register in registers])
        rounded = kind.format.round(values, mode)
        if saturate:
            rounded = np.where(rounded > 0, np.minimum(rounded, 1.0), 0.0)
        if relu:
            rounded = np.where(rounded <= 0, 0.0, rounded)
        return kind.bits(rounded)

    sources = [op.source(index, kind.dtype) for index in range(1, operands)]
    return apply_function(function, op.destination(0, kind.dtype), *sources)


def _compile_single(op: Decoder, ufunc: np.ufunc) -> Closure:
    """An operation on two FP32 to nearest even, which numpy rounds the same way."""
    op.expect_operands(3)
    first, second = op.source(1, np.float32), op.source(2, np.float32)
    result, bits = op.destination(0, np.float32), op.destination(0, np.uint32)

    def run(warp: Warp, mask: Mask) -> None:
        slots = warp.slots
        if mask is None:
            value = ufunc(slots[first], slots[second], slots[result])
        else:
            value = ufunc(slots[first], slots[second])
        nan = np.isnan(value)
        if nan.tobytes() != _NO_LANE:
            write(warp, bits, mask, np.where(nan, np.uint32(0x7FFFFFFF), value.view(np.uint32)))
        elif mask is not None:
            write(warp, result, mask, value)

    return run


def _is_plain(op: Decoder, mode: str, kind: Kind) -> bool:
    """Whether an operation is to nearest even without any clamping or flushing."""
    return mode == "rn" and not kind.ftz and not {"sat", "relu"} & set(op.modifiers)


def compile_add_sub(op: Decoder, ufunc: np.ufunc) -> Closure:
    """`add` and `sub` of floats."""
    mode = _take_rounding(op)
    sign = 1 if ufunc is np.add else -1
    if _mixed_types(op):
        return _compile_mixed(op, lambda a, b: add_to_odd(a, sign * b), mode, 3)
    kind = take_kind(op)
    if kind.format is F32 and kind.count == 1 and _is_plain(op, mode, kind):
        return _compile_single(op, ufunc)
    if kind.format is F64:
        return compile_double(op, mode, lambda a, b: a + sign * b, ufunc, 3)
    return compile_general(op, kind, lambda a, b: add_to_odd(a, sign * b), mode, 3)


def _mixed_types(op: Decoder) -> bool:
    """Whether operands have another type than the result ("Mixed Precision", 9.7.5)."""
    return sum(name.removesuffix("x2") in FORMATS for name in op.modifiers) > 1


def _compile_mixed(op: Decoder, exact: Arrays, mode: str, operands: int) -> Closure:
    """FP32 arithmetic of which all operands but the last are halves ("Mixed Precision", 9.7.5)."""
    op.expect_operands(operands)
    saturate = op.flag("sat")
    wide, half = take_kind(op), take_kind(op)
    if wide.format is not F32 or half.format.bits != 16 or wide.count + half.count != 2:
        raise op.unsupported("mixed precision")

    def function(*registers: np.ndarray) -> np.ndarray:
        halves = [half.values(register) for register in registers[:-1]]
        rounded = F32.round(exact(*halves, wide.values(registers[-1])), mode)
        if saturate:
            rounded = np.where(rounded > 0, np.minimum(rounded, 1.0), 0.0)
        return wide.bits(rounded)

    sources = [op.source(index, half.dtype) for index in range(1, operands - 1)]
    sources.append(op.source(operands - 1, wide.dtype))
    return apply_function(function, op.destination(0, wide.dtype), *sources)


def compile_mul(op: Decoder) -> Closure:
    """`mul` of floats."""
    mode = _take_rounding(op)
    kind = take_kind(op)
    if kind.format is F32 and kind.count == 1 and _is_plain(op, mode, kind):
        return _compile_single(op, np.multiply)
    if kind.format is F16 and _is_plain(op, mode, kind):
        return _compile_half_product(op, kind)
    if kind.format is F64:
        return compile_double(op, mode, lambda a, b: a * b, np.multiply, 3)
    # Products of FP32 and shorter are exact in float64.
    return compile_general(op, kind, np.multiply, mode, 3)


def _compile_half_product(op: Decoder, kind: Kind) -> Closure:
    """FP16 to nearest even: numpy's products of halves are exact before they are rounded."""
    op.expect_operands(3)

    def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        product = a.view(np.float16) * b.view(np.float16)
        bits = product.view(np.uint16)
        nan = np.isnan(product)
        if nan.any():
            bits = np.where(nan, np.uint16(0x7FFF), bits)
        return bits.view(kind.dtype)

    return apply_function(
        multiply, op.destination(0, kind.dtype), op.source(1, kind.dtype), op.source(2, kind.dtype)
    )


@instruction("fma")
def compile_fma(op: Decoder) -> Closure:
    """`a * b + c`, rounded once."""
    mode = op.one_of(*_ROUNDING)
    if _mixed_types(op):
        return _compile_mixed(op, lambda a, b, c: add_to_odd(a * b, c), mode, 4)
    kind = take_kind(op)
    if kind.format is F64:
        return compile_double(op, mode, lambda a, b, c: a * b + c, None, 4)
    return compile_general(op, kind, lambda a, b, c: add_to_odd(a * b, c), mode, 4)


def compile_mad(op: Decoder) -> Closure:
    """`mad` of floats, which is `fma` ("mad", sm_20 and later)."""
    return compile_fma(op)


def compile_div(op: Decoder) -> Closure:
    """`div` of floats."""
    mode = op.one_of("approx", "full", *_ROUNDING)
    mode = "rn" if mode in ("approx", "full") else mode
    kind = take_kind(op)
    if kind.format is F64:
        return compile_double(op, mode, lambda a, b: a / b, np.divide, 3)
    # A quotient of 24-bit numbers is further from any FP32, or middle of two, than the error of
    # float64, unless it is one.
    return compile_general(op, kind, np.divide, mode, 3)


_UNARY: dict[str, Arrays] = {
    "rcp": lambda a: 1.0 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "sin": np.sin,
    "cos": np.cos,
    "lg2": np.log2,
    "ex2": np.exp2,
    "tanh": np.tanh,
}


@instruction("rcp.approx.ftz.f64")
def compile_gross_reciprocal(op: Decoder) -> Closure:
    """A start for Newton's method: the low words of operand and result count as zero."""
    op.expect_operands(2)
    high = np.uint64(0xFFFFFFFF << 32)

    def function(bits: np.ndarray) -> np.ndarray:
        values = flush((bits & high).view(np.float64), F64.minimum_exponent)
        reciprocal = flush(1.0 / values, F64.minimum_exponent)
        return reciprocal.view(np.uint64) & high

    return apply_function(function, op.destination(0, np.uint64), op.source(1, np.uint64))


@instruction(*_UNARY)
def compile_unary(op: Decoder) -> Closure:
    """Reciprocals, roots and transcendental functions."""
    name = op.instruction.parts[0]
    only_approximate = name not in ("rcp", "sqrt")
    mode = op.one_of("approx", *(() if only_approximate else _ROUNDING), default="approx")
    kind = take_kind(op)
    if kind.format is F64 and mode not in ("approx", "rn"):
        raise op.unsupported("directed rounding of f64")
    return compile_general(op, kind, _UNARY[name], "rn" if mode == "approx" else mode, 2)


def compile_sign(op: Decoder, name: str) -> Closure:
    """`abs` and `neg`: only the sign bit changes, but NaN becomes the canonical one."""
    kind = take_kind(op)
    op.expect_operands(2)
    bits = kind.format.bits
    sign = sum(1 << (bits * place + bits - 1) for place in range(kind.count))
    constant = kind.dtype(sign)

    def change(a: np.ndarray) -> np.ndarray:
        if kind.format is not F64:
            a = kind.bits(kind.values(a))
        changed = a ^ constant if name == "neg" else a & ~constant
        return changed if kind.format is F64 else kind.bits(kind.values(changed))

    return apply_function(change, op.destination(0, kind.dtype), op.source(1, kind.dtype))


@instruction("copysign")
def compile_copysign(op: Decoder) -> Closure:
    """The sign of the first operand, the magnitude of the second."""
    kind = take_kind(op)
    op.expect_operands(3)
    sign = kind.dtype(1 << (kind.format.bits - 1))
    return apply_function(
        lambda a, b: (a & sign) | (b & ~sign),
        op.destination(0, kind.dtype),
        op.source(1, kind.dtype),
        op.source(2, kind.dtype),
    )


@instruction("testp")
def compile_testp(op: Decoder) -> Closure:
    """Tests of a float's class."""
    names = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    test = op.one_of(*names)
    kind = take_kind(op)
    op.expect_operands(2)
    smallest = 2.0**kind.format.minimum_exponent
    tests: dict[str, Arrays] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        # "Positive and negative zero are considered normal numbers."
        "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= smallest) | (a == 0)),
        "subnormal": lambda a: (a != 0) & (np.abs(a) < smallest),
    }
    return apply_function(
        lambda bits: tests[test](kind.values(bits)),
        op.destination(0, np.bool_),
        op.source(1, kind.dtype),
    )


@dataclass(frozen=True)
class FloatChoice:
    """`min` or `max` of two floats: a NaN loses unless it is kept, and -0 is below +0."""

    name: str
    keeps_nan: bool

    def choose(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The chosen of each pair."""
        smaller = (a < b) | ((a == b) & np.signbit(a))
        chosen = np.where(smaller == (self.name == "min"), a, b)
        nan = np.isnan(a) | np.isnan(b)
        kept = np.nan if self.keeps_nan else np.where(np.isnan(a), b, a)
        return np.where(nan, kept, chosen)


def compile_min_max(op: Decoder, name: str) -> Closure:
    """`min` and `max` of floats: of two or three, a NaN loses unless `.NaN` is there."""
    keeps_nan, xor_sign = op.flag("NaN"), op.flag("xorsign")
    absolute = op.flag("abs")
    kind = take_kind(op)
    operands = op.expect_operands(3, 4)
    if xor_sign != absolute:
        raise op.unsupported("xorsign without abs, or abs without it")
    choice = FloatChoice(name, keeps_nan)

    def function(*registers: np.ndarray) -> np.ndarray:
        values = [kind.values(register) for register in registers]
        negative = np.signbit(values[0])
        if absolute:
            for value in values[1:]:
                negative = negative ^ np.signbit(value)
            values = [np.abs(value) for value in values]
        result = values[0]
        for value in values[1:]:
            result = choice.choose(result, value)
        if absolute:
            result = np.where(negative, -result, result)
        return kind.bits(result)

    sources = [op.source(index, kind.dtype) for index in range(1, operands)]
    return apply_function(function, op.destination(0, kind.dtype), *sources)
