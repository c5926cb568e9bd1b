"""Values for the operands of probes: the special ones of each type, ties, and random ones."""

from __future__ import annotations

import numpy as np

from .probe import random_integers, raw_bytes

LANES = 128

_U32 = [
    0,
    1,
    2,
    3,
    7,
    8,
    15,
    16,
    31,
    32,
    33,
    63,
    64,
    127,
    128,
    255,
    256,
    32767,
    32768,
    65535,
    65536,
]
_U32 += [0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFF8000, 0xFFFFFF80, 0xFFFFFFFE]
_U32 += [0xFFFFFFFF, 0x00FF00FF, 0xDEADBEEF]
_F32 = [0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x3F000000, 0xBF000000, 0x3FC00000]
_F32 += [0x40200000, 0xC0200000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001]
_F32 += [0x7F7FFFFF, 0xFF7FFFFF, 0x00800000, 0x80800000, 0x007FFFFF, 0x00000001, 0x80000001]
_F32 += [0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x4F7FFFFF, 0x4F800000, 0x5EFFFFFF, 0x5F000000]
_F16 = [0x0000, 0x8000, 0x3C00, 0xBC00, 0x3800, 0x3E00, 0x4100, 0x7C00, 0xFC00, 0x7E00, 0xFE01]
_F16 += [0x7C01, 0x7BFF, 0xFBFF, 0x0400, 0x8400, 0x03FF, 0x0001, 0x8001, 0x57F8, 0x5BFF]
_BF16 = [0x0000, 0x8000, 0x3F80, 0xBF80, 0x3F00, 0x3FC0, 0x4020, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1]
_BF16 += [0x7F81, 0x7F7F, 0xFF7F, 0x0080, 0x8080, 0x007F, 0x0001, 0x8001, 0x43E0, 0x4F00]


def _shuffled(name: str, values: np.ndarray) -> np.ndarray:
    order = np.argsort(raw_bytes(f"order of {name}", 8 * len(values)).view("<u8"), kind="stable")
    return values[order]


def _u32(name: str) -> np.ndarray:
    special = np.array(_U32, dtype="<u4")
    return np.concatenate([special, raw_bytes(name, 4 * (LANES - len(special))).view("<u4")])


def _near_ties(name: str, count: int) -> np.ndarray:
    """float32 bits with few significant bits, at or one step beside them: ties of short formats."""
    exponents = random_integers(f"{name} exponents", count, 127 - 18, 127 + 18)
    kept = random_integers(f"{name} kept", count, 1, 13)  # bits of the mantissa, the last is set
    bits = raw_bytes(f"{name} bits", 8 * count).view("<u8").astype(np.int64) & 0x7FFFFF
    mantissas = (bits >> (23 - kept) | 1) << (23 - kept)
    steps = random_integers(f"{name} steps", count, -1, 2)
    signs = random_integers(f"{name} signs", count, 0, 2)
    return ((signs << 31) + (exponents << 23) + mantissas + steps).astype("<u4")


def _f32(name: str) -> np.ndarray:
    special = np.array(_F32, dtype="<u4")
    rest = LANES - len(special)
    wild = raw_bytes(name, 4 * (rest // 4)).view("<u4")
    return np.concatenate([special, wild, _near_ties(name, rest - rest // 4)])


def _halves(name: str, special: list[int]) -> np.ndarray:
    given = np.array(special, dtype="<u2")
    return np.concatenate([given, raw_bytes(name, 2 * (LANES - len(given))).view("<u2")])


def _half(name: str, special: list[int], exponent_bits: int) -> np.ndarray:
    """Special and random bits, half of these with exponents near 1, so that sums round."""
    values = _halves(name, special)
    bias, mantissa_bits = (1 << (exponent_bits - 1)) - 1, 15 - exponent_bits
    tame = np.arange(LANES) % 2 == 1
    tame[: len(special)] = False
    exponents = random_integers(f"{name} tame", LANES, bias - 6, bias + 7)
    keep = np.uint16(0x8000 | ((1 << mantissa_bits) - 1))
    tamed = (values & keep) | (exponents << mantissa_bits).astype("<u2")
    return np.where(tame, tamed, values).astype("<u2")


def _f64(name: str) -> np.ndarray:
    singles = _f32(name).view("<f4")
    with np.errstate(invalid="ignore"):
        values = singles.astype("<f8").view("<u8")
    low = raw_bytes(f"{name} low", 8 * LANES).view("<u8") & np.uint64(0x1FFFFFFF)
    use = np.isfinite(singles) & (np.arange(LANES) % 2 == 1)
    return np.where(use, values | low, values)


def _u64(name: str) -> np.ndarray:
    high = _shuffled(f"{name} high", _u32(f"{name} high")).astype("<u8")
    return (high << np.uint64(32)) | _u32(f"{name} low").astype("<u8")


def _pairs(name: str, halves: np.ndarray) -> np.ndarray:
    return halves.astype("<u4") | (_shuffled(name, halves).astype("<u4") << np.uint32(16))


def operand(kind: str, name: str) -> np.ndarray:
    """Bits of `LANES` values of a kind, unsigned of its width, in an order of their own."""
    makers = {
        "u32": _u32,
        "f32": _f32,
        "f64": _f64,
        "u64": _u64,
        "u16": lambda name: _halves(name, [0, 1, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF]),
        "f16": lambda name: _half(name, _F16, 5),
        "bf16": lambda name: _half(name, _BF16, 8),
        "f16x2": lambda name: _pairs(name, _half(name, _F16, 5)),
        "bf16x2": lambda name: _pairs(name, _half(name, _BF16, 8)),
        "shift": lambda name: random_integers(name, LANES, 0, 70).astype("<u4"),
        "field": lambda name: random_integers(name, LANES, 0, 40).astype("<u4"),
        "nonzero": lambda name: np.maximum(_u32(name), 1),
        "selector": lambda name: raw_bytes(name, 4 * LANES).view("<u4") & np.uint32(0xFFFF),
        "small": lambda name: random_integers(name, LANES, 0, 5).astype("<u4"),
    }
    return _shuffled(f"{name} {kind}", makers[kind](f"{name} {kind}"))
