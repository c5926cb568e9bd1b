"""The scoring kernel: every warp streams its share of the units through its own ring of stages.

Two CTAs of 8 warps fill an SM. A warp asks the copy engine for the next units while it scores the
current one; a unit's codes and scales are one copy where they are adjacent in memory (a record).
Warps never wait for each other after the lengths are summed.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from .cute_operands import (
    Bf16DotProducts,
    BlockColumns,
    DotProducts,
    Operands,
    QueryRows,
    ScoreRows,
    store_scores,
)
from .cute_ptx import (
    all_arrived,
    barrier_arrive_after_copies,
    barrier_expect,
    barrier_init,
    barrier_wait,
    copy_8_bytes_to_shared,
    copy_bulk_to_shared,
    load_global_int,
    opaque_zero,
    prefetch_to_l2,
)
from .cute_schedule import (
    LATE_WAVE_MINIMUM_UNITS,
    WARP,
    Lengths,
    Place,
    Worker,
    find_place,
    find_share,
    schedule_bytes,
    units_of_keys,
)

# Measured on an H200 (docs/cute.md): with two CTAs on an SM, a third stage costs 3 %.
WARPS = 8
STAGES = 2
THREADS = WARP * WARPS
BARRIER_BYTES = 8
CACHE_LINE = 128


class Pages(NamedTuple):
    """Where the pages are."""

    keys: Int64
    key_stride: Int64  # bytes between pages
    scales: Int64
    scale_stride: Int64
    table: Int64
    table_stride: Int64  # bytes between rows of the block table
    adjacent: Boolean  # a page's scales follow its codes directly


class Ring(NamedTuple):
    """A warp's stages and their barriers, as shared memory addresses."""

    stages: Int32
    barriers: Int32


def make_operands(variant: str) -> Operands:
    """The operand class of a variant."""
    if variant == "bf16":
        return Bf16DotProducts()
    if variant.startswith("blocks"):
        return BlockColumns(int(variant[-1]))
    return DotProducts(mixed=variant.startswith("mixed"), converts=variant.endswith("cvt"))


def stage_bytes(operands: Operands) -> int:
    return operands.unit_bytes + operands.scale_bytes


def shared_bytes(operands: Operands) -> int:
    return WARPS * STAGES * (stage_bytes(operands) + BARRIER_BYTES) + schedule_bytes(THREADS)


class Feed(NamedTuple):
    """The next unit to request, ahead of the one being scored by the length of the ring."""

    group: Int32
    unit: Int32
    units: Int32  # of the group
    table: Int64  # the group's row of the block table
    page: Int32  # of the unit
    left: Int32  # units to request, this one included


def _page_of(operands: Operands, table: Int64, unit: Int32) -> Int32:
    block = unit >> (6 - operands.unit_shift)
    return load_global_int(table + Int64(block) * 4)


def start_feed(
    operands: Operands, source: Lengths, pages: Pages, place: Place, count: Int32
) -> Feed:
    """The feed of a share of `count` units."""
    table = pages.table + Int64(place.request) * pages.table_stride
    return Feed(
        group=place.group,
        unit=place.unit,
        units=units_of_keys(source, place.keys),
        table=table,
        page=_page_of(operands, table, place.unit),
        left=count,
    )


@cute.jit
def request_unit(
    operands: cutlass.Constexpr, pages: Pages, ring: Ring, slot: Int32, page: Int32, unit: Int32
) -> None:
    """Start the copies of one unit into a slot of the ring."""
    lane = cute.arch.lane_idx()
    stage = ring.stages + slot * stage_bytes(operands)
    barrier = ring.barriers + slot * BARRIER_BYTES
    size = Int32(operands.unit_bytes)
    if cutlass.const_expr(operands.scale_bytes > 0):
        if pages.adjacent:
            size = Int32(stage_bytes(operands))
        else:
            source = pages.scales + Int64(page) * pages.scale_stride + Int64(lane) * 8
            target = stage + operands.unit_bytes + lane * 8
            copy_8_bytes_to_shared(target, source)
            copy_8_bytes_to_shared(target + 256, source + 256)
            barrier_arrive_after_copies(barrier)
    if lane == 0:
        source = pages.keys + Int64(page) * pages.key_stride
        if cutlass.const_expr(operands.unit_shift < 6):
            per_page = 1 << (6 - operands.unit_shift)
            source += Int64(unit & (per_page - 1)) * operands.unit_bytes
        barrier_expect(barrier, size)
        copy_bulk_to_shared(stage, source, size, barrier)


@cute.jit
def request_next(
    operands: cutlass.Constexpr,
    source: Lengths,
    pages: Pages,
    ring: Ring,
    slot: Int32,
    feed: Feed,
) -> Feed:
    """Request the feed's unit into a slot and move the feed on, past the end of a group too."""
    request_unit(operands, pages, ring, slot, feed.page, feed.unit)
    group, unit, units, table, page, left = feed
    left -= 1
    unit += 1
    if left > 0:
        if unit == units:
            place = find_place(source, group + 1, Int32(0))
            group = place.group
            unit = place.unit
            units = units_of_keys(source, place.keys)
            table = pages.table + Int64(place.request) * pages.table_stride
        page = _page_of(operands, table, unit)
    return Feed(group, unit, units, table, page, left)


@cute.jit
def score_share(
    operands: cutlass.Constexpr,
    source: Lengths,
    query_rows: QueryRows,
    score_rows: ScoreRows,
    pages: Pages,
    ring: Ring,
    place: Place,
    left: Int32,
) -> None:
    """Score the `left` units from a place on; a warp's whole share, at least one unit."""
    fetch_query, prepare_query = operands.fetch_query, operands.prepare_query
    read_keys, score = operands.read_keys, operands.score
    loaded_words = operands.loaded_words
    zero = opaque_zero()
    group, unit, group_keys, _ = place
    fetched = fetch_query(query_rows.of_group(group))
    feed = start_feed(operands, source, pages, place, left)
    for i in cutlass.range_constexpr(STAGES):
        if feed.left > 0:
            feed = request_next(operands, source, pages, ring, Int32(i), feed)
    slot = Int32(0)
    parity = Int32(0)
    while left > 0:
        prepared = prepare_query(fetched)
        target = score_rows.of_group(group, group_keys)
        count = cutlass.min(left, units_of_keys(source, group_keys) - unit)
        for current in range(unit, unit + count):
            barrier_wait(ring.barriers + slot * BARRIER_BYTES, parity)
            stage = ring.stages + slot * stage_bytes(operands)
            for part in cutlass.range_constexpr(operands.parts):
                key_registers = read_keys(stage, part)
                if cutlass.const_expr(part == operands.parts - 1):
                    # Once the whole unit is in registers, its slot is free.
                    arrived = all_arrived(loaded_words(key_registers), zero)
                    cute.arch.sync_warp()
                    if arrived and feed.left > 0:
                        feed = request_next(operands, source, pages, ring, slot, feed)
                store_scores(
                    score(prepared, key_registers, part),
                    target,
                    current << operands.unit_shift,
                    1 << operands.unit_shift,
                )
            slot += 1
            if slot == STAGES:
                slot = Int32(0)
                parity ^= 1
        left -= count
        if left > 0:
            group, unit, group_keys, _ = find_place(source, group + 1, Int32(0))
            fetched = fetch_query(query_rows.of_group(group))


@cute.kernel
def score_kernel(
    query: Int64,
    query_stride: Int64,
    query_scales: Int64,
    query_scale_stride: Int64,
    keys: Int64,
    key_stride: Int64,
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
    aligned: Int32,
    first_ctas: Int32,
    prefetched_bytes: Int32,
    variant: cutlass.Constexpr[str],
) -> None:
    operands = make_operands(variant)
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(thread >> 5)

    # While the lengths are on their way; the table is needed as soon as they are there.
    line = (cta * THREADS + thread) * CACHE_LINE
    if line < prefetched_bytes:
        prefetch_to_l2(table + Int64(line))

    shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
    barriers = shared + WARPS * STAGES * stage_bytes(operands)
    scratch = barriers + WARPS * STAGES * BARRIER_BYTES
    ring = Ring(
        stages=shared + warp * (STAGES * stage_bytes(operands)),
        barriers=barriers + warp * (STAGES * BARRIER_BYTES),
    )
    adjacent = (key_scales == keys + operands.unit_bytes) & (key_stride == key_scale_stride)
    if cutlass.const_expr(operands.scale_bytes == 0):
        adjacent = Boolean(True)
    if lane < STAGES:
        # Beside the copy engine, every lane arrives where it copies scales itself.
        arrivals = cutlass.select_(adjacent, Int32(1), Int32(1 + WARP))
        barrier_init(ring.barriers + lane * BARRIER_BYTES, arrivals)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()

    source = Lengths(lengths, requests, groups, max_context, operands.unit_shift)
    query_rows = QueryRows(query, query_stride, query_scales, query_scale_stride, rows)
    score_rows = ScoreRows(scores, score_stride, rows, max_context, aligned != 0)
    pages = Pages(keys, key_stride, key_scales, key_scale_stride, table, table_stride, adjacent)
    late_ctas = ctas - first_ctas
    worker = Worker(warp, cta, WARPS, first_ctas, late_ctas, LATE_WAVE_MINIMUM_UNITS)
    place, left = find_share(source, worker, scratch, THREADS)
    if left > 0:
        score_share(operands, source, query_rows, score_rows, pages, ring, place, left)


@cute.jit
def launch_kernel(
    query: Int64,
    query_stride: Int64,
    query_scales: Int64,
    query_scale_stride: Int64,
    keys: Int64,
    key_stride: Int64,
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
    aligned: Int32,
    first_ctas: Int32,
    prefetched_bytes: Int32,
    variant: cutlass.Constexpr[str],
    ctas_per_sm: cutlass.Constexpr[int],
) -> None:
    score_kernel(
        query,
        query_stride,
        query_scales,
        query_scale_stride,
        keys,
        key_stride,
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
        aligned,
        first_ctas,
        prefetched_bytes,
        variant,
    ).launch(
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        smem=shared_bytes(make_operands(variant)),
        min_blocks_per_mp=ctas_per_sm,
        preferred_smem_carveout=100,
    )
