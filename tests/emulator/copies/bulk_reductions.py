"""Element-wise reductions of `cp.reduce.async.bulk` and `cp.reduce.async.bulk.tensor`.

Source: PTX ISA, `cp.reduce.async.bulk` (operations, types, rounding, flushing of FP32).
"""

from collections.abc import Callable

import numpy as np

Bits = np.ndarray
INTEGERS: dict[str, type] = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b32": np.uint32,
    "b64": np.uint64,
}
FLOATS: dict[str, type] = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}

# Types of each operation by state space of the destination.
GLOBAL_TYPES = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}


def _flush(values: np.ndarray) -> np.ndarray:
    """Subnormal FP32 values become zeros of the same sign."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values)


def _bf16_values(bits: np.ndarray) -> np.ndarray:
    """float64 values of BF16 bit patterns."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def _bf16_bits(values: np.ndarray) -> np.ndarray:
    """BF16 bit patterns of float64 values that FP32 holds exactly, to nearest even."""
    words = values.astype(np.float32).view(np.uint32)
    rounded = words + np.uint32(0x7FFF) + (words >> np.uint32(16) & np.uint32(1))
    return np.where(np.isnan(values), 0x7FFF, rounded >> np.uint32(16)).astype(np.uint16)


def _increment(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """`old >= limit ? 0 : old + 1`"""
    return np.where(old >= limit, 0, old + np.uint32(1)).astype(np.uint32)


def _decrement(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """`old == 0 || old > limit ? limit : old - 1`"""
    return np.where((old == 0) | (old > limit), limit, old - np.uint32(1)).astype(np.uint32)


def _reduce_floats(operation: str, name: str, old: Bits, new: Bits) -> Bits:
    """Floating-point addition, minimum and maximum."""
    if name == "bf16":
        a, b = _bf16_values(old.view(np.uint16)), _bf16_values(new.view(np.uint16))
        if operation == "add":
            return _bf16_bits(a + b)
        return _bf16_bits(np.fmin(a, b) if operation == "min" else np.fmax(a, b))
    a, b = old.view(FLOATS[name]), new.view(FLOATS[name])
    if operation != "add":
        return _with_one_nan(np.fmin(a, b) if operation == "min" else np.fmax(a, b))
    return _with_one_nan(_flush(_flush(a) + _flush(b)) if name == "f32" else a + b)


def _with_one_nan(values: np.ndarray) -> Bits:
    """Bit patterns in which every NaN is the one that an H200 gives (recorded)."""
    bits = values.view(f"u{values.itemsize}")
    if values.itemsize == 8:
        return bits
    most = np.iinfo(bits.dtype).max
    return np.where(np.isnan(values), most >> 1, bits).astype(bits.dtype)


_INTEGER_OPERATIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "inc": _increment,
    "dec": _decrement,
    **BITWISE,
}


def reduce_bytes(operation: str, name: str, old: Bits, new: Bits) -> Bits:
    """`old <operation> new`, element by element.

    Parameters
    ----------
    operation : str
        A key of `GLOBAL_TYPES`.
    name : str
        Element type.
    old, new : np.ndarray
        uint8 `[bytes]`: destination and source.

    Returns
    -------
    np.ndarray
        uint8 `[bytes]`.
    """
    old, new = np.ascontiguousarray(old), np.ascontiguousarray(new)
    with np.errstate(all="ignore"):
        if name in INTEGERS:
            apply = _INTEGER_OPERATIONS[operation]
            result = apply(old.view(INTEGERS[name]), new.view(INTEGERS[name]))
        else:
            result = _reduce_floats(operation, name, old, new)
    return np.ascontiguousarray(result).view(np.uint8)
