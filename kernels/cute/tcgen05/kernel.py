"""The scoring kernel for SM10x's tensor cores: a CTA streams its share of the pages, tile by tile.

Six warps with three roles, which meet at barriers in shared memory only:

- warp 5 copies (`copies`): for each tile the codes by tensor map and the scales by
  4-byte copies, into the next free stage of a ring; for each run the group's query rows, into one
  of two buffers;
- warp 4 starts the MMAs: one thread copies a tile's scales to tensor memory, multiplies, and lets
  the tensor core itself say when the stage is free and the scores are there;
- warps 0 to 3 read a quarter of the scores each, one key a thread, and write them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import GridConstant, Int32, Int64, Uint8
from cutlass.experimental.cuda import tensor_map as tma

from sdsa_kernels.cute.arguments import Addresses, Sizes
from sdsa_kernels.cute.ptx import (
    BARRIER_BYTES,
    CACHE_LINE,
    barrier_init,
    eviction_policy,
    launch_dependents,
    load_shared_int,
    prefetch_to_l2,
    store_global_floats,
    store_shared_int,
    wait_for_prerequisites,
)
from sdsa_kernels.cute.runs import Runs, next_run, start_runs
from sdsa_kernels.cute.schedule import WARP, Lengths, Worker, find_share, page_policy
from sdsa_quant.layout import MAX_ROWS, PAGE

from .copies import Pages, Queries, copy_share
from .ptx import (
    allocate_tensor_memory,
    barrier_arrive,
    commit_to_barrier,
    copy_scales_to_tensor_memory,
    fence_after_thread_sync,
    fence_async_proxy,
    fence_before_thread_sync,
    free_tensor_memory,
    load_tensor_columns,
    mma_bf16,
    mma_nvfp4,
    prefetch_tensor_map,
)
from .rings import (
    COPY_WARP,
    MMA_WARP,
    STORE_WARPS,
    THREADS,
    first_slot,
    next_slot,
    shared_map,
    wait_empty,
    wait_full,
)
from .tiles import (
    ACCUMULATORS,
    FORMATS,
    HALF_SCALE_BYTES,
    QUERY_BUFFERS,
    SCALE_COLUMNS,
    SCALE_TILE_BYTES,
    TILE_PAGES,
    TileFormat,
    operand_descriptor,
    scale_descriptor,
)

# Pages for every CTA of the first wave, from which on late CTAs follow: as many an SM as the
# warp-level kernel needs (schedule).
LATE_LEAST_TILE_PAGES = 64


class ScoreRows(NamedTuple):
    """Where the scores go."""

    address: Int64
    stride: Int64  # bytes between rows
    rows: Int32  # of a group


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
    while runs.pages > 0:
        query = shared + where.queries + query_slot.index * tile.query_buffer_bytes
        wait_full(shared + where.query_full, query_slot)
        if cutlass.const_expr(tile.scale_bytes > 0):
            fence_async_proxy()
            with cute.arch.elect_one():
                column = tile.query_scale_column + query_slot.index * (2 * SCALE_COLUMNS)
                copy_both_halves(tensor + column, query + tile.query_bytes)
        for _ in range(0, runs.pages, TILE_PAGES):
            wait_empty(shared + where.stored, accumulator)
            wait_full(shared + where.full, slot)
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
    while runs.pages > 0:
        row = Int64(runs.group) * Int64(score_rows.rows)
        target = score_rows.address + row * score_rows.stride
        end = cutlass.min(runs.keys, (runs.block + runs.pages) * PAGE)
        for page in range(0, runs.pages, TILE_PAGES):
            wait_full(shared + where.scored, accumulator)
            fence_after_thread_sync()
            scores = load_tensor_columns(quarter + accumulator.index * tile.columns, MAX_ROWS)
            fence_before_thread_sync()
            cute.arch.sync_warp()
            if lane == 0:
                barrier_arrive(shared + where.stored + accumulator.index * BARRIER_BYTES)
            key = (runs.block + page) * PAGE + warp * WARP + lane
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
    addresses: Addresses,
    query_map: GridConstant[tma.TensorMap],
    key_map: GridConstant[tma.TensorMap],
    sizes: Sizes,
) -> None:
    tile = FORMATS[variant]
    where = shared_map(tile)
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(thread >> 5)
    shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=1024).toint())
    query_address, key_address = (
        Int64(tensor_map.get_ptr().toint()) for tensor_map in (query_map, key_map)
    )

    # Before anything is read: fetching into the L2 cache is right whoever still writes there.
    launch_dependents()
    line = (cta * THREADS + thread) * CACHE_LINE
    if line < sizes.prefetched_bytes:
        prefetch_to_l2(addresses.block_table + Int64(line))
    if warp == COPY_WARP:
        with cute.arch.elect_one():
            prefetch_tensor_map(key_address)
            prefetch_tensor_map(query_address)
    init_barriers(tile, shared, thread)

    wait_for_prerequisites()
    source = Lengths(addresses.context_lengths, addresses.requests, sizes.groups, sizes.max_context)
    worker = Worker(
        Int32(0), cta, 1, sizes.first_ctas, sizes.inverse_teams, LATE_LEAST_TILE_PAGES, 0
    )
    place, share = find_share(source, worker, shared + where.scratch, THREADS)
    if share.count > 0:
        if warp == MMA_WARP:
            allocate_tensor_memory(shared + where.tensor_slot, tile.tensor_columns)
        fence_before_thread_sync()
        cute.arch.sync_threads()
        fence_after_thread_sync()
        tensor = load_shared_int(shared + where.tensor_slot)
        runs = start_runs(place, share.count)
        if warp == COPY_WARP:
            policy = page_policy(share.total, sizes.rows)
            pages = Pages(
                key_address,
                addresses.key_scales,
                sizes.key_scale_stride,
                addresses.block_table,
                sizes.table_stride,
                policy,
            )
            kept = eviction_policy("evict_normal")
            queries = Queries(
                query_address, addresses.query_scales, sizes.query_scale_stride, sizes.rows, kept
            )
            copy_share(tile, source, pages, queries, shared, runs)
        elif warp == MMA_WARP:
            multiply_share(tile, source, shared, tensor, runs)
        else:
            score_rows = ScoreRows(addresses.scores, sizes.score_stride, sizes.rows)
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
    addresses: Addresses,
    sizes: Sizes,
    variant: cutlass.Constexpr[str],
) -> None:
    tile = FORMATS[variant]
    tcgen05_kernel(
        variant, addresses, _any_tensor_map(tile, 2), _any_tensor_map(tile, 3), sizes
    ).launch(
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        smem=shared_map(tile).total,
        min_blocks_per_mp=tile.ctas_per_sm,
        preferred_smem_carveout=100,
    )
