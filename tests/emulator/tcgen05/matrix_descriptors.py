"""Shared-memory matrix descriptors of tcgen05: which bytes are element (row, k).

Source: PTX ISA, "Shared memory descriptor", "Major-ness supported by Strides"
and "Canonical Layouts". In a canonical layout a matrix is made of 16-byte cells; with `T` elements
to a cell, element `(mn, k)` of a K-major matrix without swizzling lies at

    (mn % 8) * 16 + (mn // 8) * SBO + (k // T) * LBO + (k % T) * element size

and with a swizzle of `span` bytes at

    swizzle((mn % 8) * span + (mn // 8) * SBO + k * element size)

relative to the start address. MN-major matrices swap the roles (see `_mn_major_offsets`).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from emulator.copies.swizzle import B32, B64, B128, B128_ATOM_32B, NONE, Swizzle
from emulator.errors import EmulationError, UnsupportedInstruction

CELL = 16  # bytes
ATOM_ROWS = 8  # rows of a swizzle atom, but 4 with 32-byte atoms
SWIZZLES = {0: NONE, 1: B128_ATOM_32B, 2: B128, 4: B64, 6: B32}


class DescriptorError(EmulationError):
    """A field of a descriptor holds what the ISA does not allow."""


def field(word: int, low: int, high: int) -> int:
    """Bits `low` to `high`, both included."""
    return (word >> low) & ((1 << (high - low + 1)) - 1)


@dataclass(frozen=True)
class SharedDescriptor:
    """A matrix in shared memory.

    Attributes
    ----------
    start : int
        Byte address (18 bits) in the shared memory of the CTA.
    leading_offset, stride_offset : int
        LBO and SBO in bytes.
    base_offset : int
        128-byte line in which the swizzling pattern begins, modulo 8.
    swizzle : Swizzle
        Swizzling mode.
    """

    start: int
    leading_offset: int
    stride_offset: int
    base_offset: int
    swizzle: Swizzle


def decode_shared_descriptor(word: int) -> SharedDescriptor:
    """Decode a 64-bit shared-memory descriptor.

    Raises
    ------
    DescriptorError
        A reserved field is not what the ISA fixes it to.
    UnsupportedInstruction
        Leading-dimension byte-address mode (sm_103a only).
    """
    if field(word, 46, 48) != 0b001:
        raise DescriptorError(f"matrix descriptor {word:#018x}: bits 46-48 must be 0b001")
    for low, high in ((14, 15), (30, 31), (53, 60)):
        if field(word, low, high):
            raise DescriptorError(f"matrix descriptor {word:#018x}: bits {low}-{high} must be 0")
    if field(word, 52, 52):
        raise UnsupportedInstruction(f"matrix descriptor {word:#018x}: absolute leading address")
    mode = field(word, 61, 63)
    if mode not in SWIZZLES:
        raise DescriptorError(f"matrix descriptor {word:#018x}: swizzling mode {mode} is invalid")
    return SharedDescriptor(
        field(word, 0, 13) << 4,
        field(word, 16, 29) << 4,
        field(word, 32, 45) << 4,
        field(word, 49, 51),
        SWIZZLES[mode],
    )


def _k_major_offsets(descriptor: SharedDescriptor, rows: int, cells: int) -> np.ndarray:
    """Offsets `[rows, cells]` of the 16-byte cells of a K-major matrix, before swizzling."""
    row = np.arange(rows, dtype=np.int64)[:, None]
    cell = np.arange(cells, dtype=np.int64)[None, :]
    swizzle = descriptor.swizzle
    if swizzle is B128_ATOM_32B:
        raise UnsupportedInstruction("K-major matrix with 128-byte swizzle of 32-byte atoms")
    atoms = row // ATOM_ROWS * descriptor.stride_offset
    if swizzle is NONE:
        return row % ATOM_ROWS * CELL + atoms + cell * descriptor.leading_offset
    return row % ATOM_ROWS * swizzle.span + atoms + cell * CELL


def _mn_major_offsets(
    descriptor: SharedDescriptor, extent: int, depth: int, element_bytes: int
) -> np.ndarray:
    """Offsets `[extent, depth]` of the elements of an MN-major matrix, before swizzling.

    Without swizzling a column of 8 consecutive k is a stack of 8 cells; the next cell of elements
    along MN is SBO away and the next 8 columns LBO. With a swizzle of `span` bytes, `span` bytes
    along MN are contiguous, the next such run is LBO away and the next 8 columns (4 with 32-byte
    atoms) SBO.
    """
    position = np.arange(extent, dtype=np.int64)[:, None] * element_bytes
    k = np.arange(depth, dtype=np.int64)[None, :]
    swizzle = descriptor.swizzle
    if swizzle is NONE:
        run, run_stride, atom_stride = CELL, descriptor.stride_offset, descriptor.leading_offset
    else:
        run, run_stride, atom_stride = (
            swizzle.span,
            descriptor.leading_offset,
            descriptor.stride_offset,
        )
    columns = 4 if swizzle is B128_ATOM_32B else ATOM_ROWS
    along_mn = position % run + position // run * run_stride
    return along_mn + k % columns * run + k // columns * atom_stride


def _place(descriptor: SharedDescriptor, offsets: np.ndarray) -> np.ndarray:
    """Shared-memory addresses of `offsets`: start added, then swizzled; read-only."""
    addresses = descriptor.swizzle.apply(descriptor.start + offsets, descriptor.base_offset)
    addresses.setflags(write=False)
    return addresses


@lru_cache(maxsize=4096)
def k_major_cells(descriptor: SharedDescriptor, rows: int, cells: int) -> np.ndarray:
    """Addresses of the 16-byte cells of a K-major matrix.

    Parameters
    ----------
    descriptor : SharedDescriptor
        The matrix.
    rows : int
        Its extent along M or N.
    cells : int
        Its extent along K in 16-byte cells.

    Returns
    -------
    np.ndarray
        int64 `[rows, cells]`, read-only.
    """
    return _place(descriptor, _k_major_offsets(descriptor, rows, cells))


@lru_cache(maxsize=4096)
def mn_major_elements(
    descriptor: SharedDescriptor, extent: int, depth: int, element_bytes: int
) -> np.ndarray:
    """Addresses of the elements of an MN-major matrix.

    Parameters
    ----------
    descriptor : SharedDescriptor
        The matrix.
    extent, depth : int
        Elements along M or N, and along K.
    element_bytes : int
        1, 2 or 4.

    Returns
    -------
    np.ndarray
        int64 `[extent, depth]`, read-only.

    Raises
    ------
    UnsupportedInstruction
        Swizzling and element size that the ISA does not combine ("Valid Combinations of Type-Size,
        Major-ness and Swizzling"): 32-bit elements need 32-byte atoms, others must not have them.
    """
    if (element_bytes == 4) != (descriptor.swizzle is B128_ATOM_32B):
        raise UnsupportedInstruction(
            f"MN-major matrix of {element_bytes}-byte elements with swizzle "
            f"{descriptor.swizzle.name}"
        )
    return _place(descriptor, _mn_major_offsets(descriptor, extent, depth, element_bytes))
