"""Which tensor maps the driver refuses: the rules of the CUDA driver API reference.

They are those of cuTensorMapEncodeTiled. An H200's driver (580.159, CUDA 13.0) refuses every map of
``probes/encodings.refused_maps`` but one: it takes an interleave of 32 bytes without
the 32-byte swizzle, which the reference forbids.
"""

from __future__ import annotations

from .tensor_map import MAX_BOX, MAX_ELEMENT_STRIDE, MAX_RANK, DataType, TensorMap

_NO_INTERLEAVE, _INTERLEAVE_32 = 0, 2
_NO_SWIZZLE, _SWIZZLE_32, _SWIZZLE_64, _SWIZZLE_128 = 0, 1, 2, 3
_SWIZZLE_128_ATOM_32, _SWIZZLE_128_ATOM_64 = 4, 6
_SPANS = {_SWIZZLE_32: 32, _SWIZZLE_64: 64}  # 128 for every other swizzle
_FILL_NAN = 1
_PADDED = {DataType.U4_ALIGN_16B, DataType.U6_ALIGN_16B}
_BITS = {
    DataType.UINT8: 8,
    DataType.UINT16: 16,
    DataType.FLOAT16: 16,
    DataType.BFLOAT16: 16,
    DataType.UINT64: 64,
    DataType.INT64: 64,
    DataType.FLOAT64: 64,
    DataType.U4_ALIGN_8B: 4,
    DataType.U4_ALIGN_16B: 4,
    DataType.U6_ALIGN_16B: 6,
}  # 32 for every other type
_FLOATS = {
    DataType.FLOAT16,
    DataType.FLOAT32,
    DataType.FLOAT64,
    DataType.BFLOAT16,
    DataType.FLOAT32_FTZ,
    DataType.TFLOAT32,
    DataType.TFLOAT32_FTZ,
}
_PADDED_SWIZZLES = {
    DataType.U4_ALIGN_16B: {_NO_SWIZZLE, _SWIZZLE_128, _SWIZZLE_128_ATOM_32},
    DataType.U6_ALIGN_16B: {_NO_SWIZZLE, _SWIZZLE_128, _SWIZZLE_128_ATOM_32, _SWIZZLE_128_ATOM_64},
}


def reason_refused(tensor_map: TensorMap, capability: tuple[int, int]) -> str | None:
    """Why the driver of a device refuses a tensor map, None where it takes it."""
    most = _SWIZZLE_128 if capability < (10, 0) else _SWIZZLE_128_ATOM_64
    if not 0 <= tensor_map.swizzle <= most:
        return f"swizzles go from 0 to {most} on this device, got {tensor_map.swizzle}"
    checks = (_refused_address, _refused_sizes, _refused_box, _refused_combination)
    return next(filter(None, (check(tensor_map) for check in checks)), None)


def _refused_address(given: TensorMap) -> str | None:
    wide = given.interleave == _INTERLEAVE_32 or given.data_type in _PADDED
    alignment = 32 if wide else 16
    if given.address % alignment:
        return f"the address must be aligned to {alignment} bytes, got {given.address:#x}"
    for stride in given.strides:
        if stride % alignment or not 0 <= stride < 2**40:
            return f"strides must be multiples of {alignment} below 2^40 bytes, got {stride}"
    return None


def _refused_sizes(given: TensorMap) -> str | None:
    if not 1 <= given.rank <= MAX_RANK:
        return f"the rank must be 1 to {MAX_RANK}, got {given.rank}"
    if given.interleave != _NO_INTERLEAVE and given.rank < 3:
        return f"an interleaved map must have rank 3 to 5, got {given.rank}"
    for size in given.dimensions:
        if not 1 <= size <= 2**32:
            return f"sizes must be 1 to 2^32, got {size}"
    multiple = (
        128 if given.data_type in _PADDED else 2 if given.data_type == DataType.U4_ALIGN_8B else 1
    )
    if given.dimensions[0] % multiple:
        return f"the innermost size must be a multiple of {multiple}, got {given.dimensions[0]}"
    return None


def _refused_box(given: TensorMap) -> str | None:
    for extent in given.box:
        if not 1 <= extent <= MAX_BOX:
            return f"a box must be 1 to {MAX_BOX} elements wide, got {extent}"
    for step in given.element_strides:
        if not 1 <= step <= MAX_ELEMENT_STRIDE:
            return f"element strides must be 1 to {MAX_ELEMENT_STRIDE}, got {step}"
    if given.data_type in _PADDED and given.box[0] != 128:
        return f"the innermost box must be 128 elements, got {given.box[0]}"
    if given.interleave != _NO_INTERLEAVE:
        return None
    inner = given.box[0] * _BITS.get(given.data_type, 32) / 8
    if given.data_type not in _PADDED and inner % 16:
        return f"the innermost box must be a multiple of 16 bytes, got {inner:g}"
    span = _SPANS.get(given.swizzle, 128)
    if given.swizzle != _NO_SWIZZLE and inner > span:
        return f"the innermost box must be at most {span} bytes in this swizzle, got {inner:g}"
    return None


def _refused_combination(given: TensorMap) -> str | None:
    if given.interleave == _INTERLEAVE_32 and given.swizzle != _SWIZZLE_32:
        return f"a 32-byte interleave needs the 32-byte swizzle, got {given.swizzle}"
    if given.data_type == DataType.U6_ALIGN_16B and given.interleave != _NO_INTERLEAVE:
        return f"6-bit elements take no interleave, got {given.interleave}"
    allowed = _PADDED_SWIZZLES.get(given.data_type)
    if allowed is not None and given.swizzle not in allowed:
        return f"{DataType(given.data_type).name} takes no swizzle {given.swizzle}"
    if given.oob_fill == _FILL_NAN and given.data_type not in _FLOATS:
        return f"only floats can be filled with NaN, got {DataType(given.data_type).name}"
    return None
