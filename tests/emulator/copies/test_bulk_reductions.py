"""Reductions of bulk copies, against plain Python."""

import ml_dtypes
import numpy as np
import pytest

from .bulk_reductions import GLOBAL_TYPES, reduce_bytes

INTEGERS = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}
INTEGERS |= {"b32": np.uint32, "b64": np.uint64}


def wrapped(value: int, dtype: type) -> int:
    """An integer modulo the width of a type."""
    bits = np.dtype(dtype).itemsize * 8
    value &= (1 << bits) - 1
    return value - (1 << bits) if np.dtype(dtype).kind == "i" and value >> (bits - 1) else value


def python_reduce(operation: str, old: int, new: int) -> int:
    """The ISA's words for each integer operation."""
    if operation == "inc":
        return 0 if old >= new else old + 1
    if operation == "dec":
        return new if old == 0 or old > new else old - 1
    if operation in ("min", "max"):
        return min(old, new) if operation == "min" else max(old, new)
    return {"add": old + new, "and": old & new, "or": old | new, "xor": old ^ new}[operation]


CASES = [(op, t) for op, types in GLOBAL_TYPES.items() for t in types if t in INTEGERS]


@pytest.mark.parametrize(("operation", "name"), CASES, ids=lambda x: x)
def test_integers(operation: str, name: str) -> None:
    dtype = INTEGERS[name]
    info = np.iinfo(dtype)
    values = [info.min, info.min + 1, 0, 1, 5, 6, info.max - 1, info.max]
    old, new = (np.array(x, dtype) for x in zip(*[(a, b) for a in values for b in values]))  # noqa: B905
    result = reduce_bytes(operation, name, old.view(np.uint8), new.view(np.uint8)).view(dtype)
    expected = [
        wrapped(python_reduce(operation, int(a), int(b)), dtype)
        for a, b in zip(old, new, strict=True)
    ]
    assert result.tolist() == expected


def test_fp32_addition_flushes_subnormals() -> None:
    tiny = np.float32(2.0**-127)
    old = np.array([tiny, -tiny, 1.5, 2.0**-126], np.float32)
    new = np.array([1.0, -tiny, 2.25, -(2.0**-126) * 1.5], np.float32)
    result = reduce_bytes("add", "f32", old.view(np.uint8), new.view(np.uint8)).view(np.float32)
    assert result.tolist() == [1.0, 0.0, 3.75, 0.0]
    assert np.signbit(result).tolist() == [False, True, False, True]


@pytest.mark.parametrize("operation", ["add", "min", "max"])
def test_bf16(operation: str) -> None:
    random = np.random.default_rng(5)
    old, new = random.normal(size=(2, 512)).astype(ml_dtypes.bfloat16)
    result = reduce_bytes(operation, "bf16", old.view(np.uint8), new.view(np.uint8))
    theirs = {"add": np.add, "min": np.minimum, "max": np.maximum}[operation](old, new)
    np.testing.assert_array_equal(result.view(np.uint16), theirs.view(np.uint16))


def test_f16_keeps_subnormals_and_f64_is_plain() -> None:
    half = np.array([2.0**-24, 1.0], np.float16)
    doubled = reduce_bytes("add", "f16", half.view(np.uint8), half.view(np.uint8)).view(np.float16)
    assert doubled.tolist() == [2.0**-23, 2.0]
    double = np.array([0.1, 1e300])
    total = reduce_bytes("add", "f64", double.view(np.uint8), double.view(np.uint8))
    assert total.view(np.float64).tolist() == [0.2, 2e300]
