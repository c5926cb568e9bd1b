"""Conversions of two values at a time to and from short floats ("cvt", PTX ISA 9.7.9.21).

In every form the first operand, or the upper part of a packed one, is the upper part of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from emulator.numbers import number_formats
from emulator.numbers.float_rounding import BF16, F16, F32, FloatFormat
from emulator.numbers.number_formats import SmallFloat

from .elementwise import write
from .registry import Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

Decode = Callable[..., np.ndarray]

# Bits of one value's place in the packed register, and the format.
_WIDE: dict[str, FloatFormat] = {"f16x2": F16, "bf16x2": BF16}
_SMALL: dict[str, tuple[int, SmallFloat]] = {
    "e4m3x2": (8, number_formats.E4M3),
    "e5m2x2": (8, number_formats.E5M2),
    "e2m3x2": (8, number_formats.E2M3),
    "e3m2x2": (8, number_formats.E3M2),
    "e2m1x2": (4, number_formats.E2M1),
    "ue8m0x2": (8, number_formats.UE8M0),
}
PACKED = {*_WIDE, *_SMALL, "e4m3x4", "e5m2x4", "e2m3x4", "e3m2x4", "e2m1x4", "s2f6x2"}

# Stored bits of the significand, and exponent of the smallest normal number.
_PRECISION = {
    "e4m3": (3, -6),
    "e5m2": (2, -14),
    "e2m3": (3, 0),
    "e3m2": (2, -2),
    "e2m1": (1, 0),
}


class SmallEncoder:
    """Values to codes of a short signed format, to nearest even, saturating."""

    def __init__(self, small: SmallFloat) -> None:
        mantissa, minimum = _PRECISION[small.name]
        magnitudes = small.table[: 1 << (small.bits - 1)]
        finite = magnitudes[np.isfinite(magnitudes)]
        self._values = finite
        self._format = FloatFormat(small.name, small.bits, mantissa, minimum, float(finite.max()))
        self._sign = 1 << (small.bits - 1)
        # Without a NaN, NaN becomes the largest positive number.
        has_nan = len(finite) < len(magnitudes)
        self._nan = (1 << (small.bits - 1)) - 1 if has_nan else len(finite) - 1

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Codes of float64 values, int64."""
        rounded = self._format.round(values, "rn", saturate=True)
        magnitude = np.abs(rounded)
        codes = np.searchsorted(self._values, np.where(np.isnan(magnitude), 0.0, magnitude))
        codes = codes | np.where(np.signbit(rounded), self._sign, 0)
        return np.where(np.isnan(values), self._nan, codes)


_ENCODERS = {
    name: SmallEncoder(small)
    for name, (_, small) in _SMALL.items()
    if small is not number_formats.UE8M0
}


def encode_ue8m0(values: np.ndarray, mode: str, saturate: bool) -> np.ndarray:
    """Codes of powers of two: the exponent of a magnitude, rounded down or up."""
    magnitude = np.abs(values)
    fraction, exponent = np.frexp(magnitude)
    power = exponent - 1 + ((fraction > 0.5) if mode == "rp" else 0)
    codes = np.clip(power + 127, 0, 255)
    top = 254 if saturate else 255
    codes = np.where(magnitude == 0, 0, np.minimum(codes, top))
    codes = np.where(np.isinf(magnitude), top, codes)
    return np.where(np.isnan(values), 255, codes)


def compile_packed(op: Decoder, to_type: str, from_type: str) -> Closure:
    """A `cvt` of which one type is packed."""
    for name in (to_type, from_type):
        op.modifiers.remove(name)
    mode = op.one_of("rn", "rz", "rp", "rna", default="none")
    if "rs" in op.modifiers or to_type.endswith("x4") or "s2f6x2" in (to_type, from_type):
        raise op.unsupported("stochastic rounding, or fixed point")
    if mode == "none":
        raise op.unsupported("a rounding modifier is needed")
    relu, saturate = op.flag("relu"), op.flag("satfinite")
    sources, decode = _sources(op, from_type)
    bits, encode = _encoder(op, to_type, mode, saturate)
    result_bits = max(bits * 2, 8)
    result = op.extended_destination(0, f"b{result_bits}")

    def run(warp: Warp, mask: Mask) -> None:
        slots = warp.slots
        # [32, 2] values: low part, high part.
        values = decode(*[slots[source] for source in sources])
        if relu:
            values = np.where(values <= 0, 0.0, values)
        codes = encode(values).astype(np.uint32)
        write(warp, result, mask, codes[:, 0] | codes[:, 1] << np.uint32(bits))

    return run


def _sources(op: Decoder, from_type: str) -> tuple[list[int], Decode]:
    """The source slots, and how to decode them to float64 [32, 2]."""
    if from_type == "f32":
        op.expect_operands(3)

        def decode_pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
            return np.stack((F32.decode(low), F32.decode(high)), 1)

        return [op.source(2, np.uint32), op.source(1, np.uint32)], decode_pair
    op.expect_operands(2)
    if from_type in _WIDE:
        wide = _WIDE[from_type]
        return [op.source(1, np.uint32)], lambda both: wide.decode(
            np.ascontiguousarray(both).view(np.uint16).reshape(-1, 2)
        )
    if from_type not in _SMALL:
        raise op.unsupported(f"from .{from_type}")
    bits, small = _SMALL[from_type]
    source = op.source(1, np.uint8 if bits == 4 else np.uint16)
    mask = (1 << small.bits) - 1
    shifts = np.array([0, bits])
    return [source], lambda both: small.table[both.astype(np.int64)[:, None] >> shifts & mask]


def _encoder(op: Decoder, to_type: str, mode: str, saturate: bool) -> tuple[int, Decode]:
    """Bits of one code, and how to round float64 values to codes."""
    if to_type in _WIDE:
        wide = _WIDE[to_type]
        if mode not in ("rn", "rz"):
            raise op.unsupported()
        return 16, lambda values: wide.encode(wide.round(values, mode, saturate))
    if to_type == "ue8m0x2":
        if mode not in ("rz", "rp"):
            raise op.unsupported()
        return 8, lambda values: encode_ue8m0(values, mode, saturate)
    if to_type not in _SMALL or not saturate or mode != "rn":
        raise op.unsupported("short floats need .rn.satfinite")
    bits, _ = _SMALL[to_type]
    return bits, _ENCODERS[to_type].encode


@instruction("cvt.rs")
def compile_stochastic(op: Decoder) -> Closure:
    raise op.unsupported("stochastic rounding")
