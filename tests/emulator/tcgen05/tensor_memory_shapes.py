"""Which cell of tensor memory each register of a warp is, for `tcgen05.ld` and `tcgen05.st`.

Source: PTX ISA, "Data Movement Shape", "Packing and Unpacking" and the table of register counts by
`.num` and `.shape`.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

WARP = 32
# By shape: registers of .x1, columns of .x1, largest .num.
SHAPES = {
    "32x32b": (1, 1, 128),
    "16x64b": (1, 2, 128),
    "16x128b": (2, 4, 64),
    "16x256b": (4, 8, 32),
    "16x32bx2": (1, 1, 128),
}


@dataclass(frozen=True)
class RegisterCells:
    """The cells of a load or store, relative to its address.

    Attributes
    ----------
    lanes, columns : np.ndarray
        int64 `[32 threads, registers, cells]`; 2 cells to a register when packed, else 1.
    lane_count : int
        Lanes that are accessed: 32 or 16.
    """

    lanes: np.ndarray
    columns: np.ndarray
    lane_count: int


@lru_cache(maxsize=256)
def register_cells(shape: str, repeats: int, half_split: int, packed: bool) -> RegisterCells:
    """Cells of every register of a warp.

    Parameters
    ----------
    shape : str
        A key of `SHAPES`.
    repeats : int
        The number of `.xN`.
    half_split : int
        `immHalfSplitoff` in columns; only of `16x32bx2`.
    packed : bool
        Whether a register holds the low halves of two adjacent columns.
    """
    registers, width, _ = SHAPES[shape]
    thread = np.arange(WARP, dtype=np.int64)[:, None]
    index = np.arange(registers * repeats, dtype=np.int64)[None, :]
    repeat, index = index // registers, index % registers
    lanes, columns = _cells_of_one(shape, thread, index)
    lanes, columns = np.broadcast_arrays(lanes, columns + repeat * width)
    columns = np.stack([2 * columns, 2 * columns + 1], axis=-1) if packed else columns[..., None]
    if shape == "16x32bx2":
        columns = columns + (thread // 16 * half_split)[..., None]
    return RegisterCells(
        np.broadcast_to(lanes[..., None], columns.shape),
        columns,
        WARP if shape == "32x32b" else 16,
    )


def _cells_of_one(
    shape: str, thread: np.ndarray, index: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Lane and column of register `index` of `.x1`."""
    if shape == "32x32b":
        return thread, 0 * index
    if shape == "16x64b":
        return thread // 4 + 8 * (thread % 2), thread // 2 % 2 + 0 * index
    if shape == "16x128b":
        return thread // 4 + 8 * index, thread % 4
    if shape == "16x256b":
        return thread // 4 + 8 * (index // 2), 2 * (thread % 4) + index % 2
    return thread % 16, 0 * index  # 16x32bx2
