"""The tensor map that the hardware reads, as compiled host code of CuTe DSL writes it inline.

NVIDIA does not document this form. The fields below were found by compiling copies whose arguments
differ in one place and comparing what the host code wrote (`test_tensor_map_hardware` repeats
that); a bit without a known meaning stops the emulator. Of the 128 bytes the first 64 are used, as
32-bit words; fields of word 2 by bits:

| where           | what                                                                  |
| --------------- | --------------------------------------------------------------------- |
| words 0-1       | address                                                               |
| word 2, 0-3     | 2                                                                     |
| 4-6             | rank - 1                                                              |
| 7-10            | element type, in the order of `TYPES`; 16 is set for TF32             |
| 11-12           | interleave                                                            |
| 13-14           | swizzle: none, 32, 64, 128 bytes; 19-20 the atoms of the last         |
| 17-18           | L2 promotion                                                          |
| 21              | set for large tensors; a hint                                         |
| words 3-6       | strides of dimensions 1 to 4 in units of 16 bytes, low 32 bits        |
| word 7          | four more bits of each stride                                         |
| words 8-12      | dimensions - 1                                                        |
| bytes 55-59     | box - 1                                                               |
"""

import struct

from .errors import UnsupportedInstruction
from .tensor_map import MAX_RANK, DataType, TensorMap

_WORDS = struct.Struct("<Q14I")
TYPES = {
    0: DataType.UINT8,
    1: DataType.UINT16,
    2: DataType.UINT32,
    4: DataType.UINT64,
    6: DataType.FLOAT16,
    7: DataType.FLOAT32,
    9: DataType.FLOAT64,
    10: DataType.BFLOAT16,
    11: DataType.U4_ALIGN_8B,
}
_SIGNATURE = 2
_TENSOR_FLOAT = 1 << 16
_KNOWN_BITS = (1 << 22) - 1 & ~(1 << 15)
# Of the driver, by swizzle and atoms: CU_TENSOR_MAP_SWIZZLE_*.
_SWIZZLES = {(0, 0): 0, (1, 0): 1, (2, 0): 2, (3, 0): 3, (3, 1): 4}


def decode_hardware_form(form: bytes) -> TensorMap:
    """The tensor map in the hardware's form.

    Raises
    ------
    ValueError
        The bytes are not one.
    UnsupportedInstruction
        A field holds what has never been seen.
    """
    address, control, *words = _WORDS.unpack_from(form)
    if control & 15 != _SIGNATURE:
        raise ValueError(f"not a tensor map: {form[:16].hex()}... of {len(form)} bytes")
    rank = (control >> 4 & 7) + 1
    strides = [words[i] | (words[4] >> 4 * i & 15) << 32 for i in range(MAX_RANK - 1)]
    dimensions, (steps, boxes, rest) = words[5:10], words[10:]
    unknown = control & ~_KNOWN_BITS or words[4] >> 16 or steps & 0xFFFFFF or rest
    if unknown or rank > MAX_RANK:
        raise UnsupportedInstruction(f"tensor map with unknown fields: {form[:64].hex()}")
    box = [steps >> 24, *boxes.to_bytes(4, "little")]
    return TensorMap(
        _data_type(control),
        address,
        tuple(extent + 1 for extent in dimensions[:rank]),
        tuple(stride << 4 for stride in strides[: rank - 1]),
        tuple(extent + 1 for extent in box[:rank]),
        (1,) * rank,
        interleave=control >> 11 & 3,
        swizzle=_swizzle(control),
        l2_promotion=control >> 17 & 3,
    )


def _data_type(control: int) -> DataType:
    """The element type."""
    code = control >> 7 & 15
    if control & _TENSOR_FLOAT:
        if code == 7:
            return DataType.TFLOAT32
    elif code in TYPES:
        return TYPES[code]
    raise UnsupportedInstruction(f"tensor map with element type {code} in {control:#010x}")


def _swizzle(control: int) -> int:
    """The swizzle, in the driver's enumeration."""
    key = control >> 13 & 3, control >> 19 & 3
    if key not in _SWIZZLES:
        raise UnsupportedInstruction(f"tensor map with swizzle {key} in {control:#010x}")
    return _SWIZZLES[key]
