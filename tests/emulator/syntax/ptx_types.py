"""PTX's fundamental types as numpy types ("Types", PTX ISA 5.2)."""

from __future__ import annotations

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATING = {16: np.float16, 32: np.float32, 64: np.float64}

# Bits of every type that a register, a variable or an instruction may have.
TYPE_BITS: dict[str, int] = {
    **{f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)},
    "b128": 128,
    **{f"f{bits}": bits for bits in (16, 32, 64)},
    "bf16": 16,
    "tf32": 32,
    **dict.fromkeys(("f16x2", "bf16x2", "u16x2", "s16x2", "e4m3x4", "e5m2x4", "e2m1x8"), 32),
    **dict.fromkeys(("e4m3x2", "e5m2x2", "ue8m0x2", "e2m1x4", "e2m3x2", "e3m2x2"), 16),
    "e2m1x2": 8,
    "f32x2": 64,
    "pred": 1,
}


def is_signed(type_name: str) -> bool:
    """Whether values of the type are signed integers."""
    return type_name[0] == "s"


def integer_type(type_name: str) -> type[np.generic]:
    """The numpy integer that holds a value of the type: signed for `s`, else its bits."""
    bits = TYPE_BITS[type_name]
    return SIGNED[bits] if is_signed(type_name) else UNSIGNED[bits]


def bits_type(type_name: str) -> type[np.generic]:
    """The unsigned numpy integer of the type's width; bool for predicates."""
    return np.bool_ if type_name == "pred" else UNSIGNED[TYPE_BITS[type_name]]
