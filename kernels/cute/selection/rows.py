"""The rows of a call, the tiles of the long ones, and what a CTA's threads tell each other.

Rows of more than `DIRECT` scores are cut into tiles of `MARK_TILE`. Row by row they are one list,
and every program of the marking kernel takes an equal contiguous share of it. What a program has of
a row is a *segment*. Along the list either the program or the row goes up by one, so
``program + row`` numbers the segments without gaps between a row's own.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from sdsa_kernels.cute.ptx import (
    load_global_int,
    load_shared_int,
    load_shared_ints,
    store_shared_int,
    store_shared_ints,
    sum_of_warp,
)
from sdsa_kernels.cute.schedule import sum_up_to_lane

from .order import THREADS, TILE, WARP, WARPS

DIRECT = TILE  # scores of a row that one CTA selects from as they are
MARK_TILE = 4096
_TILE_SHIFT = MARK_TILE.bit_length() - 1

# Shared memory: a word of every warp, twice, for whoever asks; the same once more for tiles, and
# what one thread tells all of them.
WORDS_BYTES = 2 * 4 * WARPS
_TILES_AT = WORDS_BYTES
_TOLD_AT = _TILES_AT + 4 * WARPS
SHARED_BYTES = _TOLD_AT + 16
CTAS_PER_SM = 2  # at a time, of 64 registers a thread
SHARED_PERCENT = 100  # of an SM's L1 cache that is made shared memory


class Rows(NamedTuple):
    """The rows of a call."""

    lengths: Int64  # address of int32 [groups]
    rows: Int32
    rows_per_group: Int32
    max_context: Int32

    def length_of(self, row: Int32) -> Int32:
        """Scores of a row, 0 for one past the last."""
        inside = row < self.rows
        group = cutlass.select_(inside, row, Int32(0)) // self.rows_per_group
        length = load_global_int(self.lengths + Int64(group) * 4)
        length = cutlass.max(cutlass.min(length, self.max_context), Int32(0))
        return cutlass.select_(inside, length, Int32(0))


def tiles_of_length(length: Int32) -> Int32:
    """Tiles of a row of so many scores."""
    tiles = (length + (MARK_TILE - 1)) >> _TILE_SHIFT
    return cutlass.select_(length > DIRECT, tiles, Int32(0))


def _words_of_warps(word: Int32, shared: Int32) -> Int32:
    """Every warp's word, in the lane of its number, and 0 in the others."""
    thread, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    # All lanes of a warp store the same word: no branch.
    store_shared_int(shared + (thread >> 5) * 4, word)
    cute.arch.sync_threads()
    words = load_shared_int(shared + (lane & (WARPS - 1)) * 4)
    return cutlass.select_(lane < WARPS, words, Int32(0))


def sums_of_warps(value: Int32, shared: Int32) -> tuple[Int32, Int32]:
    """Of a word of every warp: the sum over the warps before this one, and over all."""
    thread, _, _ = cute.arch.thread_idx()
    words = _words_of_warps(value, shared)
    before = cutlass.select_(cute.arch.lane_idx() < (thread >> 5), words, Int32(0))
    return sum_of_warp(before), sum_of_warp(words)


class Window(NamedTuple):
    """`THREADS` consecutive rows, one a thread."""

    first: Int32
    length: Int32  # of this thread's row
    start: Int32  # tiles before this thread's row
    end: Int32  # tiles up to the last of these rows


def load_window(rows: Rows, first: Int32, tiles_before: Int32, shared: Int32) -> Window:
    """The rows from `first` on, after others with so many tiles; all threads together."""
    thread, _, _ = cute.arch.thread_idx()
    length = rows.length_of(first + thread)
    tiles = tiles_of_length(length)
    through = sum_up_to_lane(tiles)
    last = cute.arch.shuffle_sync(through, WARP - 1)
    before, total = sums_of_warps(last, shared + _TILES_AT)
    start = tiles_before + before + through - tiles
    return Window(first, length, start, tiles_before + total)


class Row(NamedTuple):
    """A row of the list of tiles."""

    row: Int32
    length: Int32
    start: Int32  # tiles before the row


def _tell(row: Int32, length: Int32, start: Int32, shared: Int32) -> None:
    store_shared_ints(shared + _TOLD_AT, (row, length, start, Int32(0)))


def _told(shared: Int32) -> Row:
    row, length, start, _ = load_shared_ints(shared + _TOLD_AT, 4)
    return Row(row, length, start)


@cute.jit
def count_tiles(rows: Rows, window: Window, shared: Int32) -> Int32:
    """Tiles of all rows, given the first window."""
    tiles = window.end
    for first in cutlass.range(THREADS, rows.rows, THREADS, unroll=1):
        cute.arch.sync_threads()
        tiles = load_window(rows, Int32(first), tiles, shared).end
    return tiles


@cute.jit
def find_tile(rows: Rows, window: Window, tile: Int32, shared: Int32) -> tuple[Row, Window]:
    """The row that holds a tile of the list, and the window of it; not before a window."""
    thread, _, _ = cute.arch.thread_idx()
    while window.end <= tile:
        cute.arch.sync_threads()
        window = load_window(rows, window.first + THREADS, window.end, shared)
    if window.start <= tile and tile < window.start + tiles_of_length(window.length):
        _tell(window.first + thread, window.length, window.start, shared)
    cute.arch.sync_threads()
    return _told(shared), window


@cute.jit
def find_row(rows: Rows, row: Int32, shared: Int32) -> tuple[Row, Int32]:
    """A row, and the tiles of all rows."""
    thread, _, _ = cute.arch.thread_idx()
    tiles = Int32(0)
    for first in cutlass.range(0, rows.rows, THREADS, unroll=1):
        window = load_window(rows, Int32(first), tiles, shared)
        if first + thread == row:
            _tell(row, window.length, window.start, shared)
        tiles = window.end
        cute.arch.sync_threads()
    return _told(shared), tiles
