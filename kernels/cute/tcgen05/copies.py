"""The copying warp of the tcgen05 kernels: tiles and query rows into shared memory.

A tile is two pages of one group, the second missing at the end of a run of odd length: its page
number is then -1, which lies outside of the tensor map, so that the copy fills with zeros.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from sdsa_kernels.cute.ptx import (
    BARRIER_BYTES,
    barrier_arrive_after_copies,
    barrier_expect,
    copy_bulk_to_shared,
    load_global_int,
)
from sdsa_kernels.cute.runs import Runs, next_run
from sdsa_kernels.cute.schedule import WARP, Lengths
from sdsa_quant.layout import PAGE

from .ptx import copy_or_clear, copy_tensor_box
from .rings import first_slot, next_slot, shared_map, wait_empty
from .tiles import (
    HALF_SCALE_BYTES,
    QUERY_BUFFERS,
    SCALE_TILE_BYTES,
    TILE_PAGES,
    TileFormat,
)

MISSING = -1  # page number that stands for a missing page


class Pages(NamedTuple):
    """Where the pages are."""

    tensor_map: Int64  # address of the keys' tensor map
    scales: Int64
    scale_stride: Int64  # bytes between pages; not used with tiled scales
    table: Int64
    table_stride: Int64  # bytes between rows of the block table
    policy: Int64  # what the L2 cache does with keys


class Queries(NamedTuple):
    """Where the query rows are."""

    tensor_map: Int64
    scales: Int64
    scale_stride: Int64  # bytes between rows
    rows: Int32  # of a group
    policy: Int64  # what the L2 cache does with them


@cute.jit
def copy_query(
    tile: cutlass.Constexpr, queries: Queries, buffer: Int32, barrier: Int32, group: Int32
) -> None:
    """Start the copies of a group's query rows, and of those that follow up to the last column.

    What the columns past the group's rows hold is never stored.
    """
    first_row = group * queries.rows
    if cutlass.const_expr(tile.scale_bytes > 0):
        row, half = cute.arch.lane_idx() >> 1, cute.arch.lane_idx() & 1
        if row < queries.rows:
            source = queries.scales + Int64(first_row + row) * queries.scale_stride
            target = buffer + tile.query_bytes + half * HALF_SCALE_BYTES + row * 16
            copy_or_clear(target, 0, source + Int64(half) * 4, 0, 4, Int32(4))
        barrier_arrive_after_copies(barrier)
    with cute.arch.elect_one():
        barrier_expect(barrier, Int32(tile.query_bytes))
        for part in range(tile.parts):
            copy_tensor_box(
                buffer + part * tile.query_part_bytes,
                queries.tensor_map,
                (Int32(part * tile.row_bytes), first_row),
                barrier,
                queries.policy,
            )


def copy_keys(
    tile: TileFormat, pages: Pages, stage: Int32, barrier: Int32, first: Int32, second: Int32
) -> None:
    """Start the copies of two pages' keys; by one thread."""
    for part in range(tile.parts):
        for position, page in enumerate((first, second)):
            copy_tensor_box(
                stage + part * tile.part_bytes + position * (PAGE * tile.row_bytes),
                pages.tensor_map,
                (Int32(part * tile.row_bytes), Int32(0), page),
                barrier,
                pages.policy,
            )


def copy_linear_scales(pages: Pages, target: Int32, first: Int32, second: Int32) -> None:
    """Start the copies of two linear pages' scales into 128x4 order.

    A lane takes every 32nd word of a page: the one of row ``lane / 2`` plus 16, 32, 48, and of half
    ``lane % 2``.
    """
    lane = cute.arch.lane_idx()
    target += (lane & 1) * HALF_SCALE_BYTES + (lane >> 1) * 16
    for position, page in enumerate((first, second)):
        source = pages.scales + Int64(page) * pages.scale_stride + Int64(lane) * 4
        given = cutlass.select_(page == MISSING, Int32(0), Int32(4))
        for step in range(4):
            offset = (step % 2) * (16 * 16) + (2 * position + step // 2) * 4
            copy_or_clear(target, offset, source, step * (WARP * 4), 4, given)


def copy_tiled_scales(pages: Pages, target: Int32, first: Int32, second: Int32) -> None:
    """Start the copies of two pages' scales that are stored in 128x4 order.

    A page's scales lie there in 64 pieces of 8 bytes, 16 bytes apart.
    """
    lane = cute.arch.lane_idx()
    for position, page in enumerate((first, second)):
        source = pages.scales + Int64(page >> 1) * SCALE_TILE_BYTES
        source += Int64(page & 1) * 8 + Int64(lane) * 16
        given = cutlass.select_(page == MISSING, Int32(0), Int32(8))
        for half in range(2):
            offset = half * HALF_SCALE_BYTES
            copy_or_clear(target + lane * 16, offset + 8 * position, source, offset, 8, given)


@cute.jit
def copy_scales(
    tile: cutlass.Constexpr, pages: Pages, target: Int32, first: Int32, second: Int32
) -> cutlass.Boolean:
    """Start this warp's copies of a tile's scales; true where one bulk copy takes them all instead.

    That is where they are stored as they are needed: those of an even page and its successor.
    """
    whole = cutlass.Boolean(False)
    if cutlass.const_expr(tile.tiled_scales):
        whole = ((first & 1) == 0) & (second == first + 1)
        if not whole:
            copy_tiled_scales(pages, target, first, second)
    else:
        copy_linear_scales(pages, target, first, second)
    return whole


@cute.jit
def copy_tile(
    tile: cutlass.Constexpr,
    pages: Pages,
    stage: Int32,
    barrier: Int32,
    first: Int32,
    second: Int32,
) -> None:
    """Start the copies of a tile's two pages into a stage."""
    scales = stage + tile.key_bytes
    size = Int32(tile.key_bytes)
    whole = cutlass.Boolean(False)
    if cutlass.const_expr(tile.scale_bytes > 0):
        whole = copy_scales(tile, pages, scales, first, second)
        barrier_arrive_after_copies(barrier)
        size += cutlass.select_(whole, Int32(SCALE_TILE_BYTES), Int32(0))
    with cute.arch.elect_one():
        barrier_expect(barrier, size)
        copy_keys(tile, pages, stage, barrier, first, second)
        if whole:
            source = pages.scales + Int64(first >> 1) * SCALE_TILE_BYTES
            copy_bulk_to_shared(scales, source, Int32(SCALE_TILE_BYTES), barrier, pages.policy)


@cute.jit
def _load_pages(table: Int64, first: Int32, count: Int32) -> Int32:
    """Page number `first` + lane of a run, `MISSING` past its `count` pages."""
    page = Int32(MISSING)
    index = first + cute.arch.lane_idx()
    if index < count:
        page = load_global_int(table + Int64(index) * 4)
    return page


@cute.jit
def copy_share(
    tile: cutlass.Constexpr,
    source: Lengths,
    pages: Pages,
    queries: Queries,
    shared: Int32,
    runs: Runs,
) -> None:
    """The copying warp: every tile and every run's query rows, as early as there is room."""
    where = shared_map(tile)
    slot = first_slot()
    query_slot = first_slot()
    while runs.pages > 0:
        table = pages.table + Int64(runs.request) * pages.table_stride + Int64(runs.block) * 4
        # The page numbers of the 32 pages at hand and of the 32 after them, one a lane.
        lane_pages = Int32(MISSING)
        ahead = _load_pages(table, Int32(0), runs.pages)
        wait_empty(shared + where.query_empty, query_slot)
        copy_query(
            tile,
            queries,
            shared + where.queries + query_slot.index * tile.query_buffer_bytes,
            shared + where.query_full + query_slot.index * BARRIER_BYTES,
            runs.group,
        )
        query_slot = next_slot(query_slot, QUERY_BUFFERS)
        for page in range(0, runs.pages, TILE_PAGES):
            lane = page & (WARP - 1)
            if lane == 0:
                lane_pages = ahead
                ahead = _load_pages(table, page + WARP, runs.pages)
            first = cute.arch.shuffle_sync(lane_pages, lane)
            second = cute.arch.shuffle_sync(lane_pages, lane + 1)
            wait_empty(shared + where.empty, slot)
            copy_tile(
                tile,
                pages,
                shared + slot.index * tile.stage_bytes,
                shared + where.full + slot.index * BARRIER_BYTES,
                first,
                second,
            )
            slot = next_slot(slot, tile.stages)
        runs = next_run(source, runs)
    # The tensor core arrives at these barriers: they must not go before it has.
    for _ in cutlass.range_constexpr(tile.stages):
        wait_empty(shared + where.empty, slot)
        slot = next_slot(slot, tile.stages)
    for _ in cutlass.range_constexpr(QUERY_BUFFERS):
        wait_empty(shared + where.query_empty, query_slot)
        query_slot = next_slot(query_slot, QUERY_BUFFERS)
