"""Rounding to floating-point formats, once, in every mode ("Rounding Modifiers", PTX ISA 6.5.2).

Values on their way are float64. Where one operation is not exact in float64 its result is rounded
to odd: of the two float64 around the exact result the one with an odd last bit. Rounding that to a
format of at most 51 bits then gives what rounding the exact result would (Boldo and Melquiond).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Round = Callable[[np.ndarray], np.ndarray]


def _nearest_away(values: np.ndarray) -> np.ndarray:
    return np.trunc(values + np.copysign(0.5, values))


_INTEGER_ROUNDING: dict[str, Round] = {
    "rn": np.rint,
    "rna": _nearest_away,
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
}


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format with subnormals.

    Attributes
    ----------
    bits : int
        Width in a register.
    mantissa_bits, minimum_exponent : int
        Stored bits of the significand; exponent of the smallest normal number.
    maximum : float
        The largest finite number.
    """

    name: str
    bits: int
    mantissa_bits: int
    minimum_exponent: int
    maximum: float

    def round(self, values: np.ndarray, mode: str = "rn", saturate: bool = False) -> np.ndarray:
        """float64 values of this format; overflow gives infinity, or the maximum with `saturate`.

        Rounding modes that do not reach infinity give the maximum.
        """
        magnitude = np.abs(values)
        special = (magnitude < 2.0**self.minimum_exponent) & (values != 0)
        special |= ~(magnitude <= self.maximum)
        if mode == "rn" and not special.any() and self.mantissa_bits < 52:
            return self._overflow(self._round_bits(values), values, mode, saturate)
        return self._round_any(values, mode, saturate)

    def _round_bits(self, values: np.ndarray) -> np.ndarray:
        """Normal numbers to nearest even, by integer arithmetic on their bits."""
        bits = values.view(np.uint64)
        dropped = np.uint64(52 - self.mantissa_bits)
        half = np.uint64((1 << (51 - self.mantissa_bits)) - 1)
        return ((bits + half + (bits >> dropped & np.uint64(1))) >> dropped << dropped).view(
            np.float64
        )

    def _round_any(self, values: np.ndarray, mode: str, saturate: bool) -> np.ndarray:
        _, exponent = np.frexp(values)
        quantum = np.maximum(exponent - 1, self.minimum_exponent) - self.mantissa_bits
        rounded = np.ldexp(_INTEGER_ROUNDING[mode](np.ldexp(values, -quantum)), quantum)
        rounded = np.where(np.isfinite(values), rounded, values)
        return self._overflow(rounded, values, mode, saturate)

    def _overflow(
        self, rounded: np.ndarray, values: np.ndarray, mode: str, saturate: bool
    ) -> np.ndarray:
        """Replace what is above the maximum."""
        over = np.abs(rounded) > self.maximum
        if not over.any():
            return rounded
        largest = np.copysign(self.maximum, values)
        if saturate:
            return np.where(over, largest, rounded)
        if mode == "rz":
            stays = over & np.isfinite(values)
        elif mode in ("rm", "rp"):
            stays = over & np.isfinite(values) & ((values > 0) == (mode == "rm"))
        else:
            stays = np.zeros_like(over)
        limit = np.where(over, np.copysign(np.inf, values), rounded)
        return np.where(stays, largest, limit)

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Bits of float64 values of this format; NaN is the canonical one."""
        nan = np.isnan(values)
        if self.name == "f16":
            bits = values.astype(np.float16).view(np.uint16)
            return np.where(nan, np.uint16(0x7FFF), bits)
        if self.name == "f64":
            return np.ascontiguousarray(values).view(np.uint64)
        single = values.astype(np.float32).view(np.uint32)
        single = np.where(nan, np.uint32(0x7FFFFFFF), single)
        return (single >> np.uint32(16)).astype(np.uint16) if self.name == "bf16" else single

    def decode(self, bits: np.ndarray) -> np.ndarray:
        """float64 values of bits, as unsigned integers of the format's width."""
        if self.name == "f16":
            return bits.view(np.float16).astype(np.float64)
        if self.name == "bf16":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        if self.name == "f64":
            return bits.view(np.float64)
        return bits.view(np.float32).astype(np.float64)


F16 = FloatFormat("f16", 16, 10, -14, 65504.0)
BF16 = FloatFormat("bf16", 16, 7, -126, float.fromhex("0x1.fep127"))
TF32 = FloatFormat("tf32", 32, 10, -126, float.fromhex("0x1.ffcp127"))
F32 = FloatFormat("f32", 32, 23, -126, float.fromhex("0x1.fffffep127"))
F64 = FloatFormat("f64", 64, 52, -1022, float.fromhex("0x1.fffffffffffffp1023"))
FORMATS = {format.name: format for format in (F16, BF16, TF32, F32, F64)}


def to_odd(rounded: np.ndarray, error: np.ndarray) -> np.ndarray:
    """float64 sums `rounded + error`, rounded to odd; `rounded` is to nearest."""
    inexact = (error != 0) & np.isfinite(rounded)
    if not inexact.any():
        return rounded
    bits = rounded.view(np.int64)
    even = (bits & 1) == 0
    outward = (error > 0) == (rounded > 0)
    moved = np.where(rounded == 0, bits, bits + np.where(outward, 1, -1))
    return np.where(inexact & even, moved, bits).view(np.float64)


def add_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float64 `a + b` rounded to odd (Knuth's exact sum)."""
    total = a + b
    part = total - a
    return to_odd(total, (a - (total - part)) + (b - part))


def flush(values: np.ndarray, minimum_exponent: int = -126) -> np.ndarray:
    """Subnormal numbers of a format (FP32) made zeros of the same sign (`.ftz`)."""
    smallest = 2.0**minimum_exponent
    return np.where(np.abs(values) < smallest, np.copysign(0.0, values), values).astype(
        values.dtype
    )
