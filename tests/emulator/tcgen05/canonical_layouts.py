"""Canonical layouts of matrices in shared memory, computed in CuTe's notation as the ISA has them.

For tests: independent of `matrix_descriptors`, element by element and without NumPy indexing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Mode = tuple[tuple[int, ...], tuple[int, ...]]  # extents and strides, fastest first


def encode_descriptor(
    start: int, leading: int, stride: int, mode: int, base_offset: int = 0
) -> int:
    """A descriptor word put together from the bit positions of the ISA's table."""
    word = (start >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32
    return word | 1 << 46 | base_offset << 49 | mode << 61


def layout_index(mode: Mode, i: int) -> int:
    """Value of a CuTe layout mode at `i`."""
    total = 0
    for extent, stride in zip(*mode, strict=True):
        total += i % extent * stride
        i //= extent
    return total


def cute_swizzle(bits: int, base: int, shift: int, offset: int) -> int:
    """CuTe's `Swizzle<bits, base, shift>` of an offset."""
    mask = ((1 << bits) - 1) << base
    return offset ^ ((offset >> shift) & mask)


@dataclass(frozen=True)
class Canonical:
    """One line of the table "Canonical Layouts".

    Attributes
    ----------
    mode : int
        Swizzling mode of the descriptor.
    k_major : bool
        Else MN-major.
    """

    mode: int
    k_major: bool

    @property
    def bits(self) -> int:
        """`B` of the table's `Swizzle<B, 4, 3>`."""
        return {0: 0, 6: 1, 4: 2, 2: 3}[self.mode]

    def modes(self, t: int, leading: int, stride: int, mn: int, k: int) -> tuple[Mode, Mode]:
        """Layout modes of MN and K; `t` elements to 16 bytes, strides in elements."""
        cells = 1 << self.bits
        if self.k_major:
            row = t if self.mode == 0 else cells * t
            step = leading if self.mode == 0 else t
            return ((8, mn // 8), (row, stride)), ((t, k // t), (1, step))
        if self.mode == 0:
            return ((t, mn // t), (1, stride)), ((8, k // 8), (t, leading))
        runs = -(-mn // (t * cells))
        return ((t, cells, runs), (1, t, leading)), ((8, k // 8), (cells * t, stride))

    def place(
        self, elements: np.ndarray, size: int, leading: int, stride: int, length: int
    ) -> np.ndarray:
        """The image `[length]` (bytes, from a multiple of 1024 on) of a matrix.

        Parameters
        ----------
        elements : np.ndarray
            uint8 `[MN, K, element bytes]`.
        size : int
            Element bytes.
        leading, stride : int
            LBO and SBO in bytes.
        length : int
            Bytes of the image.
        """
        image = np.zeros(length, np.uint8)
        mn, k = elements.shape[:2]
        rows, columns = self.modes(16 // size, leading // size, stride // size, mn, k)
        for i, j in np.ndindex(mn, k):
            offset = (layout_index(rows, i) + layout_index(columns, j)) * size
            offset = cute_swizzle(self.bits, 4, 3, offset)
            image[offset : offset + size] = elements[i, j]
        return image
