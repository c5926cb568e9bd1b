"""The scoring kernel for SM10x's tensor cores: a CTA streams its share of the pages, tile by tile.

Six warps with three roles, which meet at barriers in shared memory only:

- warp 5 copies: for each tile the codes by tensor map and the scales by 4-byte copies, into the
  next free stage of a ring; for each run the group's query rows, into one of two buffers;
- warp 4 starts the MMAs: one thread copies a tile's scales to tensor memory, multiplies, and lets
  the tensor core itself say when the stage is free and the scores are there;
- warps 0 to 3 read a quarter of the scores each, one key a thread, and write them.

A tile is two pages of one group, the second missing at the end of a run of odd length: its page
number is then -1, which lies outside of the tensor map, so that the copy fills with zeros.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import GridConstant, Int32, Int64, Uint8
from cutlass.experimental.cuda import tensor_map as tma

from sdsa_quant.layout import MAX_ROWS, PAGE

from .cute_ptx import (
    barrier_arrive_after_copies,
    barrier_expect,
    barrier_init,
    barrier_wait,
    copy_bulk_to_shared,
    load_global_int,
    load_shared_int,
    prefetch_to_l2,
    store_global_floats,
    store_shared_int,
)
from .cute_runs import Runs, next_run, start_runs
from .cute_schedule import WARP, Lengths, Worker, find_share, schedule_bytes
from .cute_tcgen05_ptx import (
    allocate_tensor_memory,
    barrier_arrive,
    commit_to_barrier,
    copy_or_clear,
    copy_scales_to_tensor_memory,
    copy_tensor_box,
    fence_after_thread_sync,
    fence_async_proxy,
    fence_before_thread_sync,
    free_tensor_memory,
    load_tensor_columns,
    mma_bf16,
    mma_nvfp4,
    prefetch_tensor_map,
)
from .cute_tcgen05_tiles import (
    ACCUMULATORS,
    BARRIER_BYTES,
    FORMATS,
    HALF_SCALE_BYTES,
    QUERY_BUFFERS,
    SCALE_COLUMNS,
    SCALE_TILE_BYTES,
    TILE_PAGES,
    SharedMap,
    TileFormat,
    operand_descriptor,
    scale_descriptor,
)

STORE_WARPS = 4  # warp i reads lanes 32 i .. 32 i + 31 of tensor memory
MMA_WARP = 4
COPY_WARP = 5
THREADS = WARP * 6
CACHE_LINE = 128
MISSING = -1  # page number of a page that there is not

# Units (pages) for every CTA of the first wave from which a second one pays; as many an SM as
# the warp-level kernel needs there (cute_schedule).
LATE_WAVE_PAGES = 64


class Pages(NamedTuple):
    """Where the pages are."""

    tensor_map: Int64  # address of the keys' tensor map
    scales: Int64
    scale_stride: Int64  # bytes between pages; not used with a plane
    table: Int64
    table_stride: Int64  # bytes between rows of the block table


class Queries(NamedTuple):
    """Where the query rows are."""

    tensor_map: Int64
    scales: Int64
    scale_stride: Int64  # bytes between rows
    rows: Int32  # of a group


class ScoreRows(NamedTuple):
    """Where the scores go."""

    address: Int64
    stride: Int64  # bytes between rows
    rows: Int32  # of a group


class Slot(NamedTuple):
    """A place in a ring, and the parity of the barrier phase that fills it next."""

    index: Int32
    parity: Int32


def first_slot() -> Slot:
    return Slot(Int32(0), Int32(0))


def next_slot(slot: Slot, slots: int) -> Slot:
    last = slot.index == slots - 1
    return Slot(
        cutlass.select_(last, Int32(0), slot.index + 1),
        cutlass.select_(last, slot.parity ^ 1, slot.parity),
    )


def _wait_full(barriers: Int32, slot: Slot) -> None:
    barrier_wait(barriers + slot.index * BARRIER_BYTES, slot.parity)


def _wait_empty(barriers: Int32, slot: Slot) -> None:
    """Of a slot that was never filled this is true at once: its barrier has no phase before."""
    barrier_wait(barriers + slot.index * BARRIER_BYTES, slot.parity ^ 1)


def shared_map(tile: TileFormat) -> SharedMap:
    return SharedMap(tile, schedule_bytes(THREADS))


# ---- Copies --------------------------------------------------------------------------------------


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


def copy_plane_scales(pages: Pages, target: Int32, first: Int32, second: Int32) -> None:
    """Start the copies of two pages' scales out of a plane in 128x4 order.

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

    That is where a plane holds them as they are: those of an even page and its successor.
    """
    whole = cutlass.Boolean(False)
    if cutlass.const_expr(tile.plane):
        whole = ((first & 1) == 0) & (second == first + 1)
        if not whole:
            copy_plane_scales(pages, target, first, second)
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
            copy_bulk_to_shared(scales, source, Int32(SCALE_TILE_BYTES), barrier)


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
    while runs.units > 0:
        table = pages.table + Int64(runs.request) * pages.table_stride + Int64(runs.unit) * 4
        # The page numbers of the 32 pages at hand and of the 32 after them, one a lane.
        lane_pages = Int32(MISSING)
        ahead = _load_pages(table, Int32(0), runs.units)
        _wait_empty(shared + where.query_empty, query_slot)
        copy_query(
            tile,
            queries,
            shared + where.queries + query_slot.index * tile.query_buffer_bytes,
            shared + where.query_full + query_slot.index * BARRIER_BYTES,
            runs.group,
        )
        query_slot = next_slot(query_slot, QUERY_BUFFERS)
        for page in range(0, runs.units, TILE_PAGES):
            lane = page & (WARP - 1)
            if lane == 0:
                lane_pages = ahead
                ahead = _load_pages(table, page + WARP, runs.units)
            first = cute.arch.shuffle_sync(lane_pages, lane)
            second = cute.arch.shuffle_sync(lane_pages, lane + 1)
            _wait_empty(shared + where.empty, slot)
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
        _wait_empty(shared + where.empty, slot)
        slot = next_slot(slot, tile.stages)
    for _ in cutlass.range_constexpr(QUERY_BUFFERS):
        _wait_empty(shared + where.query_empty, query_slot)
        query_slot = next_slot(query_slot, QUERY_BUFFERS)


# ---- MMAs ----------------------------------------------------------------------------------------


def start_tile(
    tile: TileFormat,
    keys: Int32,
    query: Int32,
    tensor: Int32,
    accumulator: Int32,
    query_slot: Int32,
) -> None:
    """Start the MMAs of a tile, its scales first; by one thread.

    The tensor core runs these copies and MMAs in the order of their start (PTX ISA, "tcgen05 Memory
    Consistency Model": copy and MMA are implicitly pipelined).
    """
    target = tensor + accumulator * tile.columns
    key_operand = operand_descriptor(tile, keys)
    query_operand = operand_descriptor(tile, query)
    if tile.scale_bytes:
        scales = tensor + tile.scale_column + accumulator * (2 * SCALE_COLUMNS)
        query_scales = tensor + tile.query_scale_column + query_slot * (2 * SCALE_COLUMNS)
        copy_both_halves(scales, keys + tile.key_bytes)
    for part in range(tile.parts):
        for step in range(tile.mmas_of_part):
            a = key_operand + (part * tile.part_bytes // 16 + 2 * step)
            b = query_operand + (part * tile.query_part_bytes // 16 + 2 * step)
            accumulate = (part, step) != (0, 0)
            if tile.scale_bytes:
                half = step * SCALE_COLUMNS
                mma_nvfp4(
                    target,
                    a,
                    b,
                    tile.instruction,
                    scales + half,
                    query_scales + half,
                    accumulate,
                )
            else:
                mma_bf16(target, a, b, tile.instruction, accumulate)


def copy_both_halves(target: Int32, scales: Int32) -> None:
    """Start the copies of 128x4 scales to tensor memory; by one thread."""
    descriptor = scale_descriptor(scales)
    for half in range(2):
        copy_scales_to_tensor_memory(
            target + half * SCALE_COLUMNS, descriptor + half * (HALF_SCALE_BYTES // 16)
        )


@cute.jit
def multiply_share(
    tile: cutlass.Constexpr, source: Lengths, shared: Int32, tensor: Int32, runs: Runs
) -> None:
    """The multiplying warp: one thread starts the MMAs of every tile.

    The scales were written by this CTA's threads (`cp.async`, the generic proxy) and are read by
    the tensor core (the async proxy): the wait makes them visible here, the fence there.
    """
    where = shared_map(tile)
    slot = first_slot()
    query_slot = first_slot()
    accumulator = first_slot()
    while runs.units > 0:
        query = shared + where.queries + query_slot.index * tile.query_buffer_bytes
        _wait_full(shared + where.query_full, query_slot)
        if cutlass.const_expr(tile.scale_bytes > 0):
            fence_async_proxy()
            with cute.arch.elect_one():
                column = tile.query_scale_column + query_slot.index * (2 * SCALE_COLUMNS)
                copy_both_halves(tensor + column, query + tile.query_bytes)
        for _ in range(0, runs.units, TILE_PAGES):
            _wait_empty(shared + where.stored, accumulator)
            _wait_full(shared + where.full, slot)
            fence_after_thread_sync()
            if cutlass.const_expr(tile.scale_bytes > 0):
                fence_async_proxy()
            with cute.arch.elect_one():
                start_tile(
                    tile,
                    shared + slot.index * tile.stage_bytes,
                    query,
                    tensor,
                    accumulator.index,
                    query_slot.index,
                )
                commit_to_barrier(shared + where.empty + slot.index * BARRIER_BYTES)
                commit_to_barrier(shared + where.scored + accumulator.index * BARRIER_BYTES)
            slot = next_slot(slot, tile.stages)
            accumulator = next_slot(accumulator, ACCUMULATORS)
        with cute.arch.elect_one():
            commit_to_barrier(shared + where.query_empty + query_slot.index * BARRIER_BYTES)
        query_slot = next_slot(query_slot, QUERY_BUFFERS)
        runs = next_run(source, runs)


# ---- Scores --------------------------------------------------------------------------------------


@cute.jit
def store_scores(
    rows: Int32, address: Int64, stride: Int64, scores: cutlass.Constexpr, inside: cutlass.Boolean
) -> None:
    """Write a key's score of each row."""
    for row in cutlass.range_constexpr(MAX_ROWS):
        if row < rows:
            store_global_floats(address + stride * row, (scores[row],), inside)


@cute.jit
def store_share(
    tile: cutlass.Constexpr,
    source: Lengths,
    score_rows: ScoreRows,
    shared: Int32,
    tensor: Int32,
    warp: Int32,
    runs: Runs,
) -> None:
    """A storing warp: a thread writes the scores of one key of every tile."""
    where = shared_map(tile)
    accumulator = first_slot()
    lane = cute.arch.lane_idx()
    quarter = tensor + (warp << 21)  # tensor memory's lane 32 warp
    while runs.units > 0:
        row = Int64(runs.group) * Int64(score_rows.rows)
        target = score_rows.address + row * score_rows.stride
        end = cutlass.min(runs.keys, (runs.unit + runs.units) * PAGE)
        for page in range(0, runs.units, TILE_PAGES):
            _wait_full(shared + where.scored, accumulator)
            fence_after_thread_sync()
            scores = load_tensor_columns(quarter + accumulator.index * tile.columns, MAX_ROWS)
            fence_before_thread_sync()
            cute.arch.sync_warp()
            if lane == 0:
                barrier_arrive(shared + where.stored + accumulator.index * BARRIER_BYTES)
            key = (runs.unit + page) * PAGE + warp * WARP + lane
            store_scores(
                score_rows.rows, target + Int64(key) * 4, score_rows.stride, scores, key < end
            )
            accumulator = next_slot(accumulator, ACCUMULATORS)
        runs = next_run(source, runs)


# ---- The kernel ----------------------------------------------------------------------------------


@cute.jit
def init_barriers(tile: cutlass.Constexpr, shared: Int32, thread: Int32) -> None:
    """Set up every barrier, one a thread, and clear the scales of rows that are never copied."""
    where = shared_map(tile)
    # Beside the copy engine, every lane arrives where it copies scales itself.
    copies = 1 + WARP if tile.scale_bytes else 1
    arrivals = (
        (where.full, tile.stages, copies),
        (where.empty, tile.stages, 1),
        (where.query_full, QUERY_BUFFERS, copies),
        (where.query_empty, QUERY_BUFFERS, 1),
        (where.scored, ACCUMULATORS, 1),
        (where.stored, ACCUMULATORS, STORE_WARPS),
    )
    for offset, barriers, count in arrivals:
        if thread < barriers:
            barrier_init(shared + offset + thread * BARRIER_BYTES, Int32(count))
    if cutlass.const_expr(tile.scale_bytes > 0):
        for buffer in cutlass.range_constexpr(QUERY_BUFFERS):
            scales = where.queries + buffer * tile.query_buffer_bytes + tile.query_bytes
            for word in range(thread, SCALE_TILE_BYTES // 4, THREADS):
                store_shared_int(shared + scales + word * 4, Int32(0))
    cute.arch.mbarrier_init_fence()


@cute.kernel
def tcgen05_kernel(
    variant: cutlass.Constexpr[str],  # first, since symbols are cut off
    key_map: GridConstant[tma.TensorMap],
    query_map: GridConstant[tma.TensorMap],
    query_scales: Int64,
    query_scale_stride: Int64,
    key_scales: Int64,
    key_scale_stride: Int64,
    table: Int64,
    table_stride: Int64,
    lengths: Int64,
    requests: Int64,
    scores: Int64,
    score_stride: Int64,
    groups: Int32,
    rows: Int32,
    max_context: Int32,
    first_ctas: Int32,
    prefetched_bytes: Int32,
) -> None:
    tile = FORMATS[variant]
    where = shared_map(tile)
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(thread >> 5)
    shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=1024).toint())
    pages = Pages(
        Int64(key_map.get_ptr().toint()), key_scales, key_scale_stride, table, table_stride
    )
    queries = Queries(Int64(query_map.get_ptr().toint()), query_scales, query_scale_stride, rows)

    # While the lengths are on their way; the table is needed as soon as they are there.
    line = (cta * THREADS + thread) * CACHE_LINE
    if line < prefetched_bytes:
        prefetch_to_l2(table + Int64(line))
    if warp == COPY_WARP:
        with cute.arch.elect_one():
            prefetch_tensor_map(pages.tensor_map)
            prefetch_tensor_map(queries.tensor_map)
    init_barriers(tile, shared, thread)

    source = Lengths(lengths, requests, groups, max_context, PAGE.bit_length() - 1)
    worker = Worker(Int32(0), cta, 1, first_ctas, ctas - first_ctas, LATE_WAVE_PAGES)
    place, left = find_share(source, worker, shared + where.scratch, THREADS)
    if left > 0:
        if warp == MMA_WARP:
            allocate_tensor_memory(shared + where.tensor_slot, tile.tensor_columns)
        fence_before_thread_sync()
        cute.arch.sync_threads()
        fence_after_thread_sync()
        tensor = load_shared_int(shared + where.tensor_slot)
        runs = start_runs(source, place, left)
        if warp == COPY_WARP:
            copy_share(tile, source, pages, queries, shared, runs)
        elif warp == MMA_WARP:
            multiply_share(tile, source, shared, tensor, runs)
        else:
            score_rows = ScoreRows(scores, score_stride, rows)
            store_share(tile, source, score_rows, shared, tensor, warp, runs)
        fence_before_thread_sync()
        cute.arch.sync_threads()
        if warp == MMA_WARP:
            fence_after_thread_sync()
            free_tensor_memory(tensor, tile.tensor_columns)


def _any_tensor_map(tile: TileFormat, rank: int) -> tma.TensorMap:
    """A tensor map for the compiler, which only needs its type; the host encodes the real ones."""
    size = tile.row_bytes
    return tma.create_tensor_map_tiled(
        Int64(0), Uint8, [size] * rank, [size // 16] * (rank - 1), [size] * rank
    )


@cute.jit
def launch_tcgen05_kernel(
    query_scales: Int64,
    query_scale_stride: Int64,
    key_scales: Int64,
    key_scale_stride: Int64,
    table: Int64,
    table_stride: Int64,
    lengths: Int64,
    requests: Int64,
    scores: Int64,
    score_stride: Int64,
    groups: Int32,
    rows: Int32,
    max_context: Int32,
    first_ctas: Int32,
    prefetched_bytes: Int32,
    variant: cutlass.Constexpr[str],
) -> None:
    tile = FORMATS[variant]
    tcgen05_kernel(
        variant,
        _any_tensor_map(tile, 3),
        _any_tensor_map(tile, 2),
        query_scales,
        query_scale_stride,
        key_scales,
        key_scale_stride,
        table,
        table_stride,
        lengths,
        requests,
        scores,
        score_stride,
        groups,
        rows,
        max_context,
        first_ctas,
        prefetched_bytes,
    ).launch(
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        smem=shared_map(tile).total,
        min_blocks_per_mp=tile.ctas_per_sm,
        preferred_smem_carveout=100,
    )
