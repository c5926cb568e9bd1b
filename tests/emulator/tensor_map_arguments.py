"""The arguments of cuTensorMapEncodeTiled: which of them a driver refuses, and a form of 128 bytes.

The driver's own form of a tensor map is not documented. The stand-in for the driver writes this one,
which carries every argument; it starts with `MAGIC`, so that an emulated copy that is given
anything else is noticed. The rules are those of the CUDA driver API reference, "Tensor Map Object
Management", cuTensorMapEncodeTiled.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

MAP_BYTES = 128
MAP_ALIGNMENT = 64
MAGIC = b"tiledmap"
MAX_RANK = 5
_FORM = struct.Struct("<8sQ5I4Q5H5B6B")  # sizes are stored less 1: they go up to 2^32
_BOX_LIMIT = 256
_STEP_LIMIT = 8


class DataType(enum.IntEnum):
    """CUtensorMapDataType."""

    UINT8 = 0
    UINT16 = 1
    UINT32 = 2
    INT32 = 3
    UINT64 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT32_FTZ = 10
    TFLOAT32 = 11
    TFLOAT32_FTZ = 12
    U4_ALIGN8 = 13  # 16U4_ALIGN8B: two values a byte
    U4_ALIGN16 = 14  # 16U4_ALIGN16B: as U4_ALIGN8 in global memory, with gaps in shared memory
    U6_ALIGN16 = 15  # 16U6_ALIGN16B


class Interleave(enum.IntEnum):
    """CUtensorMapInterleave."""

    NONE = 0
    BYTES_16 = 1
    BYTES_32 = 2


class Swizzle(enum.IntEnum):
    """CUtensorMapSwizzle."""

    NONE = 0
    BYTES_32 = 1
    BYTES_64 = 2
    BYTES_128 = 3
    BYTES_128_ATOM_32 = 4
    BYTES_128_ATOM_32_FLIP_8 = 5
    BYTES_128_ATOM_64 = 6


class Fill(enum.IntEnum):
    """CUtensorMapFloatOOBfill."""

    ZERO = 0
    NAN = 1


ELEMENT_BITS = {
    DataType.UINT8: 8,
    DataType.UINT16: 16,
    DataType.UINT32: 32,
    DataType.INT32: 32,
    DataType.UINT64: 64,
    DataType.INT64: 64,
    DataType.FLOAT16: 16,
    DataType.FLOAT32: 32,
    DataType.FLOAT64: 64,
    DataType.BFLOAT16: 16,
    DataType.FLOAT32_FTZ: 32,
    DataType.TFLOAT32: 32,
    DataType.TFLOAT32_FTZ: 32,
    DataType.U4_ALIGN8: 4,
    DataType.U4_ALIGN16: 4,
    DataType.U6_ALIGN16: 6,
}
FLOATS = {
    DataType.FLOAT16,
    DataType.FLOAT32,
    DataType.FLOAT64,
    DataType.BFLOAT16,
    DataType.FLOAT32_FTZ,
    DataType.TFLOAT32,
    DataType.TFLOAT32_FTZ,
}
PADDED = {DataType.U4_ALIGN16, DataType.U6_ALIGN16}
_PADDED_SWIZZLES = {
    DataType.U4_ALIGN16: {Swizzle.NONE, Swizzle.BYTES_128, Swizzle.BYTES_128_ATOM_32},
    DataType.U6_ALIGN16: {
        Swizzle.NONE,
        Swizzle.BYTES_128,
        Swizzle.BYTES_128_ATOM_32,
        Swizzle.BYTES_128_ATOM_64,
    },
}
_SWIZZLE_SPAN_BYTES = {Swizzle.BYTES_32: 32, Swizzle.BYTES_64: 64}  # 128 for every other


@dataclass(frozen=True)
class TensorMapArguments:
    """A tiled tensor map.

    Attributes
    ----------
    data_type : DataType
    address : int
        Of the first element.
    sizes : tuple of int
        Elements of each dimension, the innermost first; its length is the rank.
    strides : tuple of int
        Bytes between elements of every dimension but the innermost.
    box : tuple of int
        Elements that one copy takes, before `steps`.
    steps : tuple of int
        Elements from one that is copied to the next (elementStrides).
    interleave : Interleave
    swizzle : Swizzle
    promotion : int
        CUtensorMapL2promotion: a hint.
    fill : Fill
        What stands for elements outside of the tensor.
    """

    data_type: DataType
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    interleave: Interleave
    swizzle: Swizzle
    promotion: int
    fill: Fill

    @property
    def rank(self) -> int:
        return len(self.sizes)

    def pack(self) -> bytes:
        """The map's 128 bytes."""
        missing = MAX_RANK - self.rank
        ones = (1,) * missing
        form = _FORM.pack(
            MAGIC,
            self.address,
            *(size - 1 for size in (*self.sizes, *ones)),
            *(*self.strides, *(0,) * missing),
            *(*self.box, *ones),
            *(*self.steps, *ones),
            self.data_type,
            self.rank,
            self.interleave,
            self.swizzle,
            self.promotion,
            self.fill,
        )
        return form.ljust(MAP_BYTES, b"\0")

    @staticmethod
    def unpack(form: bytes) -> TensorMapArguments:
        """The arguments in a map's 128 bytes.

        Raises
        ------
        ValueError
            The bytes are not a tensor map.
        """
        if len(form) != MAP_BYTES or not form.startswith(MAGIC):
            raise ValueError(f"not a tensor map: {form[:16].hex()}... of {len(form)} bytes")
        _, address, *fields = _FORM.unpack_from(form)
        data_type, rank, interleave, swizzle, promotion, fill = fields[19:]
        return TensorMapArguments(
            DataType(data_type),
            address,
            tuple(size + 1 for size in fields[0:rank]),
            tuple(fields[5 : 5 + rank - 1]),
            tuple(fields[9 : 9 + rank]),
            tuple(fields[14 : 14 + rank]),
            Interleave(interleave),
            Swizzle(swizzle),
            promotion,
            Fill(fill),
        )


def _bytes_of(elements: int, data_type: DataType) -> float:
    return elements * ELEMENT_BITS[data_type] / 8


def reason_refused(arguments: TensorMapArguments) -> str | None:
    """Why the driver refuses a tensor map, None where it takes it."""
    checks = (_refused_address, _refused_sizes, _refused_box, _refused_combination)
    return next(filter(None, (check(arguments) for check in checks)), None)


def _refused_address(given: TensorMapArguments) -> str | None:
    wide = given.interleave == Interleave.BYTES_32 or given.data_type in PADDED
    alignment = 32 if wide else 16
    if given.address % alignment:
        return f"the address must be aligned to {alignment} bytes, got {given.address:#x}"
    for stride in given.strides:
        if stride % alignment or not 0 <= stride < 2**40:
            return f"strides must be multiples of {alignment} below 2^40 bytes, got {stride}"
    return None


def _refused_sizes(given: TensorMapArguments) -> str | None:
    if not 1 <= given.rank <= MAX_RANK:
        return f"the rank must be 1 to {MAX_RANK}, got {given.rank}"
    if given.interleave != Interleave.NONE and given.rank < 3:
        return f"an interleaved map must have rank 3 to 5, got {given.rank}"
    for size in given.sizes:
        if not 1 <= size <= 2**32:
            return f"sizes must be 1 to 2^32, got {size}"
    multiple = 128 if given.data_type in PADDED else 2 if given.data_type == DataType.U4_ALIGN8 else 1
    if given.sizes[0] % multiple:
        return f"the innermost size must be a multiple of {multiple}, got {given.sizes[0]}"
    return None


def _refused_box(given: TensorMapArguments) -> str | None:
    for extent in given.box:
        if not 1 <= extent <= _BOX_LIMIT:
            return f"a box must be 1 to {_BOX_LIMIT} elements wide, got {extent}"
    for step in given.steps:
        if not 1 <= step <= _STEP_LIMIT:
            return f"element strides must be 1 to {_STEP_LIMIT}, got {step}"
    if given.data_type in PADDED and given.box[0] != 128:
        return f"the innermost box must be 128 elements, got {given.box[0]}"
    if given.interleave != Interleave.NONE:
        return None
    inner = _bytes_of(given.box[0], given.data_type)
    if given.data_type not in PADDED and inner % 16:
        return f"the innermost box must be a multiple of 16 bytes, got {inner:g}"
    span = _SWIZZLE_SPAN_BYTES.get(given.swizzle, 128)
    if given.swizzle != Swizzle.NONE and inner > span:
        return f"the innermost box must be at most {span} bytes in this swizzle, got {inner:g}"
    return None


def _refused_combination(given: TensorMapArguments) -> str | None:
    if given.interleave == Interleave.BYTES_32 and given.swizzle != Swizzle.BYTES_32:
        return f"a 32-byte interleave needs the 32-byte swizzle, got {given.swizzle.name}"
    if given.data_type == DataType.U6_ALIGN16 and given.interleave != Interleave.NONE:
        return f"6-bit elements take no interleave, got {given.interleave.name}"
    allowed = _PADDED_SWIZZLES.get(given.data_type)
    if allowed is not None and given.swizzle not in allowed:
        return f"{given.data_type.name} takes no swizzle {given.swizzle.name}"
    if given.fill == Fill.NAN and given.data_type not in FLOATS:
        return f"only floats can be filled with NaN, got {given.data_type.name}"
    return None
