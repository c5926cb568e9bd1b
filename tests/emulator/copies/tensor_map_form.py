"""Tensor maps in the 128 bytes that the hardware reads, and back.

The form is opaque to PTX and not documented. What is here was found from what the driver wrote on
an H200 for maps that differ in one argument at a time (``probes/encodings.py``; the recorded forms
are a test), and agrees with what host code compiled by CuTe DSL writes without the driver, for SM90
and SM100. In 32-bit words, lower bits first:

====== =====================================================================================
0, 1   address
2      0-3 kind, 4-6 rank - 1, 7-10 element type, 11-12 interleave, 13-14 swizzle, 15 fill,
       16 tf32, 17-18 L2 promotion, 19-20 atomicity of the swizzle, 21 a hint
3-6    strides / 16 of dimensions 1 to 4, their lower 32 bits
7      their upper 4 bits each
8-12   sizes - 1
13     0-14 element strides - 1, 3 bits each; 24-31 box - 1 of dimension 0
14     box - 1 of dimensions 1 to 4, 8 bits each
====== =====================================================================================

The driver leaves the kind 0, CuTe DSL writes 2; CuTe DSL also sets the hint, for large tensors.
Words 16 to 31 are not read: CuTe DSL does not write them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from .tensor_map import DataType, TensorMap

MAP_BYTES = 128
_WORDS = struct.Struct("<16I")
_KINDS = (0, 2)

# Element type and tf32 bit.
_TYPES = {
    DataType.UINT8: (0, 0),
    DataType.UINT16: (1, 0),
    DataType.UINT32: (2, 0),
    DataType.INT32: (3, 0),
    DataType.UINT64: (4, 0),
    DataType.INT64: (5, 0),
    DataType.FLOAT16: (6, 0),
    DataType.FLOAT32: (7, 0),
    DataType.FLOAT32_FTZ: (8, 0),
    DataType.FLOAT64: (9, 0),
    DataType.BFLOAT16: (10, 0),
    DataType.U4_ALIGN_8B: (11, 0),
    DataType.TFLOAT32: (7, 1),
    DataType.TFLOAT32_FTZ: (8, 1),
}
_TYPES_BACK = {code: data_type for data_type, code in _TYPES.items()}

# Swizzle and its atomicity, by CUtensorMapSwizzle.
_SWIZZLES = {0: (0, 0), 1: (1, 0), 2: (2, 0), 3: (3, 0), 4: (3, 1), 5: (3, 2), 6: (3, 3)}
_SWIZZLES_BACK = {code: swizzle for swizzle, code in _SWIZZLES.items()}


def pack(tensor_map: TensorMap) -> bytes:
    """The 128 bytes of a tensor map.

    Raises
    ------
    ValueError
        The place of its element type in the form is not known.
    """
    data_type = DataType(tensor_map.data_type)
    if data_type not in _TYPES:
        raise ValueError(f"the form of a tensor map of {data_type.name} is not known")
    code, tf32 = _TYPES[data_type]
    swizzle, atomicity = _SWIZZLES[tensor_map.swizzle]
    words = [0] * 16
    words[0] = tensor_map.address & 0xFFFF_FFFF
    words[1] = tensor_map.address >> 32
    words[2] = (tensor_map.rank - 1) << 4 | code << 7 | tensor_map.interleave << 11
    words[2] |= swizzle << 13 | tensor_map.oob_fill << 15 | tf32 << 16
    words[2] |= tensor_map.l2_promotion << 17 | atomicity << 19
    for axis, stride in enumerate(tensor_map.strides):
        words[3 + axis] = stride >> 4 & 0xFFFF_FFFF
        words[7] |= stride >> 36 << 4 * axis
    for axis, size in enumerate(tensor_map.dimensions):
        words[8 + axis] = size - 1
        words[13] |= (tensor_map.element_strides[axis] - 1) << 3 * axis
    words[13] |= (tensor_map.box[0] - 1) << 24
    for axis, extent in enumerate(tensor_map.box[1:]):
        words[14] |= (extent - 1) << 8 * axis
    return _WORDS.pack(*words).ljust(MAP_BYTES, b"\0")


def unpack(form: bytes) -> TensorMap:
    """The tensor map in 128 bytes.

    Raises
    ------
    ValueError
        The bytes are not a tensor map, or not one of a kind that is known.
    """
    if len(form) != MAP_BYTES:
        raise ValueError(f"a tensor map has {MAP_BYTES} bytes, got {len(form)}")
    words = _WORDS.unpack_from(form)
    rank = (words[2] >> 4 & 7) + 1
    element = (words[2] >> 7 & 15, words[2] >> 16 & 1)
    swizzle = (words[2] >> 13 & 3, words[2] >> 19 & 3)
    unused = (words[2] >> 22, words[13] >> 15 & 0x1FF, words[15])
    known = element in _TYPES_BACK and swizzle in _SWIZZLES_BACK
    if words[2] & 15 not in _KINDS or rank > 5 or not known or any(unused):
        raise ValueError("not a tensor map: " + " ".join(f"{word:08x}" for word in words))
    strides = (words[3 + axis] | (words[7] >> 4 * axis & 15) << 32 for axis in range(rank - 1))
    return TensorMap(
        data_type=_TYPES_BACK[element],
        address=words[0] | words[1] << 32,
        dimensions=tuple(words[8 + axis] + 1 for axis in range(rank)),
        strides=tuple(stride << 4 for stride in strides),
        box=(
            (words[13] >> 24) + 1,
            *((words[14] >> 8 * axis & 0xFF) + 1 for axis in range(rank - 1)),
        ),
        element_strides=tuple((words[13] >> 3 * axis & 7) + 1 for axis in range(rank)),
        interleave=words[2] >> 11 & 3,
        swizzle=_SWIZZLES_BACK[swizzle],
        l2_promotion=words[2] >> 17 & 3,
        oob_fill=words[2] >> 15 & 1,
    )


class Field(NamedTuple):
    """A field that `tensormap.replace` changes: word, lowest bit, bits; what is taken off a value.

    `indexed` fields have one for each dimension.
    """

    word: int
    low: int
    bits: int
    less: int = 0
    indexed: bool = False


FIELDS = {
    "global_address": Field(0, 0, 64),
    "rank": Field(2, 4, 3),  # given less one
    "elemtype": Field(2, 7, 4),
    "interleave_layout": Field(2, 11, 2),
    "swizzle_mode": Field(2, 13, 2),
    "fill_mode": Field(2, 15, 1),
    "swizzle_atomicity": Field(2, 19, 2),
    "global_stride": Field(3, 0, 32, 0, True),
    "global_dim": Field(8, 0, 32, 1, True),
    "element_stride": Field(13, 0, 3, 1, True),
    "box_dim": Field(14, 0, 8, 1, True),
}
# Numbers of `.elemtype` that are not those of the form: element type, and tf32.
_ELEMENT_TYPES = {11: (7, 1), 12: (8, 1), 13: (11, 0)}


def replace_field(form: np.ndarray, name: str, axis: int, value: int) -> list[tuple[int, int]]:
    """The words of a form, with their numbers, that another value of a field changes.

    Raises
    ------
    ValueError
        The value does not fit.
    """
    words = form.view(np.uint32).tolist()

    def put(word: int, low: int, bits: int, content: int) -> tuple[int, int]:
        if content >> bits or content < 0:
            raise ValueError(f"tensormap.replace of {name}: {value} does not fit")
        words[word] = words[word] & ~(((1 << bits) - 1) << low) | content << low
        return word, words[word]

    if name == "global_address":
        return [put(0, 0, 32, value & 0xFFFF_FFFF), put(1, 0, 32, value >> 32)]
    if name == "global_stride":  # in bytes, of dimension axis + 1
        parts = value >> 4 & 0xFFFF_FFFF, value >> 36
        return [put(3 + axis, 0, 32, parts[0]), put(7, 4 * axis, 4, parts[1])]
    if name == "elemtype":
        code, tf32 = _ELEMENT_TYPES.get(value, (value, 0))
        return [put(2, 7, 4, code), put(2, 16, 1, tf32)]
    field = FIELDS[name]
    word, low = field.word, field.low
    if name == "global_dim":
        word += axis
    elif name == "element_stride":
        low += 3 * axis
    elif name == "box_dim":
        word, low = (13, 24) if axis == 0 else (14, 8 * (axis - 1))
    return [put(word, low, field.bits, value - field.less)]
