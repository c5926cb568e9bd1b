"""Conversions between scalar types ("cvt", PTX ISA 9.7.9.21); packed ones: packed_conversions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emulator.machine.registers import carry_by
from emulator.numbers.float_rounding import FORMATS, TF32, FloatFormat, flush, to_odd
from emulator.syntax.ptx_types import TYPE_BITS, UNSIGNED, bits_type, integer_type, is_signed

from .elementwise import apply_function
from .packed_conversions import PACKED, compile_packed
from .registry import Closure, Decoder, instruction

Arrays = Callable[..., np.ndarray]

_INTEGER_ROUNDING: dict[str, Arrays] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


@instruction("cvt")
def compile_cvt(op: Decoder) -> Closure:
    types = [name for name in op.modifiers if name in TYPE_BITS or name in PACKED]
    if len(types) != 2:
        raise op.unsupported("two types are needed")
    if any(name in PACKED for name in types):
        return compile_packed(op, types[0], types[1])
    op.expect_operands(2)
    for name in types:
        op.modifiers.remove(name)
    to_type, from_type = types
    ftz = op.flag("ftz")
    if ftz and "f32" not in types:
        raise op.unsupported(".ftz without f32")
    if from_type in FORMATS and to_type in FORMATS:
        convert = _float_to_float(op, FORMATS[to_type], FORMATS[from_type], ftz)
    elif from_type in FORMATS:
        convert = _float_to_integer(op, to_type, FORMATS[from_type], ftz)
    elif to_type in FORMATS:
        convert = _integer_to_float(op, FORMATS[to_type], from_type)
    else:
        saturates = "sat" in op.modifiers
        convert = _integer_to_integer(op, to_type, from_type)
        op.carry = None if saturates else carry_by(convert, 1)
    source_type = UNSIGNED[TYPE_BITS[from_type]]
    if from_type not in FORMATS:
        source_type = integer_type(from_type)
    return apply_function(convert, op.extended_destination(0, to_type), op.source(1, source_type))


def _float_to_float(op: Decoder, to: FloatFormat, source: FloatFormat, ftz: bool) -> Arrays:
    saturates, relu = op.flag("sat"), op.flag("relu")
    finite = op.flag("satfinite")
    to_integer = op.one_of(*_INTEGER_ROUNDING, default="none")
    mode = op.one_of("rn", "rna", "rz", "rm", "rp", default="none")
    if to is TF32 and source.name != "f32":
        raise op.unsupported("TF32 comes from f32")
    if to_integer == "none" and mode == "none" and to.mantissa_bits < source.mantissa_bits:
        if (to.name, source.name) != ("bf16", "f16"):
            raise op.unsupported("a rounding modifier is needed")
        mode = "rn"  # Triton leaves it out where values are of 8 bits, so that nothing is rounded

    def convert(bits: np.ndarray) -> np.ndarray:
        values = source.decode(bits)
        nan = np.isnan(values)
        if ftz and source.name == "f32":
            values = flush(values)
        if to_integer != "none":
            values = _INTEGER_ROUNDING[to_integer](values)
        elif mode != "none":
            values = to.round(values, mode, finite)
        if saturates:
            values = np.where(values > 0, np.minimum(values, 1.0), 0.0)
        if relu:
            values = np.where(values <= 0, 0.0, values)
        if ftz and to.name == "f32":
            values = flush(values)
        encoded = to.encode(values)
        if saturates or not nan.any():
            return encoded
        payload = nan_bits(bits, to, source, mode, finite)
        return encoded if payload is None else np.where(nan, payload, encoded)

    return convert


def nan_bits(
    bits: np.ndarray, to: FloatFormat, source: FloatFormat, mode: str, finite: bool
) -> np.ndarray | None:
    """What an SM90 makes of NaN where that is not the canonical one, found on an H200.

    The ISA only says NaN. Conversions to or from FP64, and from BF16 to FP32, keep the sign, and of
    the payload what fits.
    """
    if (source.name, to.name) == ("bf16", "f32"):
        return bits.astype(np.uint32) << np.uint32(16)
    if to is TF32:
        if mode == "rna":
            # Rounded like a number; what is then infinite or NaN steps down.
            rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
            return rounded - np.uint32(0x2000) if finite else rounded
        return np.full_like(bits, 0x7FFFE000)
    if "f64" not in (source.name, to.name) or source.name == to.name:
        return None
    wide = bits.astype(np.uint64)
    shift = np.uint64(abs(to.mantissa_bits - source.mantissa_bits))
    payload = wide & np.uint64((1 << source.mantissa_bits) - 1)
    payload = payload << shift if to.name == "f64" else payload >> shift
    sign = wide >> np.uint64(source.bits - 1) << np.uint64(to.bits - 1)
    exponent = ((1 << (to.bits - 1 - to.mantissa_bits)) - 1) << to.mantissa_bits
    quiet = 1 << (to.mantissa_bits - 1)
    return (sign | payload | np.uint64(exponent | quiet)).astype(UNSIGNED[to.bits])


def integer_limits(bits: int, signed: bool) -> tuple[int, int]:
    """The smallest and the largest integer of a type."""
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


def _float_to_integer(op: Decoder, to_type: str, source: FloatFormat, ftz: bool) -> Arrays:
    rounding = _INTEGER_ROUNDING[op.one_of(*_INTEGER_ROUNDING)]
    op.flag("sat")  # "redundant": the result is clamped anyway
    bits = TYPE_BITS[to_type]
    signed = is_signed(to_type)
    lowest, highest = integer_limits(bits, signed)
    dtype = integer_type(to_type)
    # What NaN gives ("Integer Notes").
    nan_value = 1 << (bits - 1) if source.name == "f64" or bits == 64 else 0
    nan_pattern = np.array(nan_value, UNSIGNED[bits]).view(dtype)

    def convert(registers: np.ndarray) -> np.ndarray:
        values = source.decode(registers)
        if ftz:
            values = flush(values)
        nan = np.isnan(values)
        whole = np.where(nan, 0.0, rounding(values))
        below, above = whole < lowest, whole > highest - (0 if bits < 64 else 512)
        inside = np.where(below | above, 0.0, whole)
        result = inside.astype(dtype)
        result = np.where(below, dtype(lowest), np.where(above, dtype(highest), result))
        return np.where(nan, nan_pattern, result).astype(dtype)

    return convert


def _integer_to_float(op: Decoder, to: FloatFormat, from_type: str) -> Arrays:
    mode = op.one_of("rn", "rz", "rm", "rp")
    saturates = op.flag("sat")
    wide = TYPE_BITS[from_type] == 64
    if to.name == "f64" and wide and mode != "rn":
        raise op.unsupported("directed rounding of f64")

    def convert(values: np.ndarray) -> np.ndarray:
        if to.name == "f64":
            exact = values.astype(np.float64)
        else:
            exact = to.round(_to_odd(values) if wide else values.astype(np.float64), mode)
        if saturates:
            exact = np.clip(exact, 0.0, 1.0)
        return to.encode(exact)

    return convert


def _to_odd(values: np.ndarray) -> np.ndarray:
    """64-bit integers as float64, rounded to odd."""
    high = values >> values.dtype.type(32)
    low = (values & values.dtype.type(0xFFFFFFFF)).astype(np.float64)
    high_part = high.astype(np.float64) * 2.0**32
    total = high_part + low
    part = total - high_part
    return to_odd(total, (high_part - (total - part)) + (low - part))


def _integer_to_integer(op: Decoder, to_type: str, from_type: str) -> Arrays:
    saturates = op.flag("sat")
    bits, dtype = TYPE_BITS[to_type], integer_type(to_type)
    if not saturates:
        return lambda values: values.astype(dtype)
    signed = is_signed(to_type)
    lowest, highest = integer_limits(bits, signed)

    def clamp(values: np.ndarray) -> np.ndarray:
        return np.array([min(max(value, lowest), highest) for value in values.tolist()], dtype)

    return clamp


@instruction("cvt.pack")
def compile_cvt_pack(op: Decoder) -> Closure:
    """Two integers clamped to a short type, below the low bits of a third operand."""
    op.one_of("sat")
    name = op.one_of("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2")
    op.one_of("s32")
    operands = op.expect_operands(3, 4)
    if (operands == 4) != op.flag("b32") or (operands == 3) != name.endswith("16"):
        raise op.unsupported()
    bits = int(name[1:])
    lowest, highest = integer_limits(bits, is_signed(name))

    def pack(a: np.ndarray, b: np.ndarray, *above: np.ndarray) -> np.ndarray:
        low, high = (np.clip(value, lowest, highest) & ((1 << bits) - 1) for value in (b, a))
        packed = (low | high << bits).astype(np.uint32)
        return packed | above[0] << np.uint32(2 * bits) if above else packed

    sources = [op.source(1, np.int32), op.source(2, np.int32)]
    if operands == 4:
        sources.append(op.source(3, bits_type("b32")))
    return apply_function(pack, op.destination(0, np.uint32), *sources)
