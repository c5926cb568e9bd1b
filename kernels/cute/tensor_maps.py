"""Tensor maps: what the copy engine must know of a matrix in memory to copy boxes of it.

They are parameters of the tcgen05 kernels, encoded by the CUDA driver for an address, sizes and
strides.
"""

from __future__ import annotations

import ctypes
import functools

from sdsa_quant.errors import UnsupportedError

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64  # of the driver's output; the Python bindings' own object has only 16

# CUtensorMapDataType, CUtensorMapInterleave and so on, of cuda.h.
_BYTES = 0
_NO_INTERLEAVE = 0
_SWIZZLES = {64: 2, 128: 3}
_L2_LINES = 2  # a row of 64 bytes brings the 128 around it into the L2 cache: the next row's
_ZEROS_OUTSIDE = 0
_SUCCESS = 0

_Sizes = ctypes.c_uint64 * 5
_Boxes = ctypes.c_uint32 * 5


@functools.cache
def _encode() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    function.restype = ctypes.c_int
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
    ]
    return function


def encode_tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """A tensor map of bytes whose boxes are swizzled by their width.

    Parameters
    ----------
    address : int
        Of the first byte, a multiple of 16.
    sizes : tuple of int
        Bytes of a row, then how often it repeats in each outer dimension.
    strides : tuple of int
        Bytes between repetitions, one for each outer dimension: multiples of 16 below 2^40.
    box : tuple of int
        Sizes of a box, at most 256 each; the first is 64 or 128.

    Returns
    -------
    bytes
        The 128 bytes of the map. What a box has outside of the sizes is copied as zeros.

    Raises
    ------
    UnsupportedError
        The driver refuses these sizes or strides.
    """
    room = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
    target = -(-ctypes.addressof(room) // TENSOR_MAP_ALIGNMENT) * TENSOR_MAP_ALIGNMENT
    code = _encode()(
        target,
        _BYTES,
        len(sizes),
        address,
        _Sizes(*sizes),
        _Sizes(*strides),
        _Boxes(*box),
        _Boxes(*[1] * len(sizes)),
        _NO_INTERLEAVE,
        _SWIZZLES[box[0]],
        _L2_LINES,
        _ZEROS_OUTSIDE,
    )
    if code != _SUCCESS:
        raise UnsupportedError(
            f"the CUDA driver failed to encode a tensor map of {sizes} bytes with strides "
            f"{strides} at {address:#x}: error {code}"
        )
    return ctypes.string_at(target, TENSOR_MAP_BYTES)
