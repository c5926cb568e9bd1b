"""The scoring kernel: every warp streams its share of the pages through its own ring of stages.

Two CTAs of 8 warps fill an SM. A warp asks the copy engine for the next pages while it scores the
current one; a page's codes and scales are one copy where they are adjacent in memory (a record).
Four warps share a BF16 page, two an NVFP4 page of a short list. Warps never wait for each other
after the lengths are summed.

The kernel may be launched while the one before it in the stream still runs (`cute.launch`): it
waits for that one, in every thread, before it touches what another kernel could.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from sdsa_kernels.cute.arguments import Addresses, Sizes
from sdsa_kernels.cute.ptx import (
    BARRIER_BYTES,
    CACHE_LINE,
    all_arrived,
    barrier_arrive_after_copies,
    barrier_expect,
    barrier_init,
    barrier_wait,
    copy_8_bytes_to_shared,
    copy_bulk_to_shared,
    eviction_policy,
    launch_dependents,
    load_global_int,
    opaque_zero,
    prefetch_to_l2,
    wait_for_prerequisites,
)
from sdsa_kernels.cute.schedule import (
    LATE_LEAST_PAGES,
    WARP,
    Lengths,
    Place,
    Worker,
    find_share,
    next_place,
    page_policy,
    pages_of_keys,
    scratch_bytes,
)
from sdsa_kernels.cute.variants import split_variant
from sdsa_quant.layout import PAGE

from .block_columns import BlockColumns
from .dot_products import Bf16DotProducts, DotProducts
from .operands import Operands, QueryRows, ScoreRows, store_scores

WARPS = 8
THREADS = WARP * WARPS
SCORE_VECTOR_BYTES = 16


class Pages(NamedTuple):
    """Where the pages are."""

    keys: Int64
    key_stride: Int64  # bytes between pages
    scales: Int64
    scale_stride: Int64
    table: Int64
    table_stride: Int64  # bytes between rows of the block table
    adjacent: Boolean  # a page's scales follow its codes directly
    policy: Int64  # what the L2 cache does with keys


class Ring(NamedTuple):
    """A warp's stages and their barriers, as shared memory addresses."""

    stages: Int32
    barriers: Int32


def make_operands(variant: str) -> Operands:
    """The operand class of a variant."""
    name, short = split_variant(variant)
    if name == "bf16":
        return Bf16DotProducts()
    if name.startswith("blocks"):
        return BlockColumns(int(name[-1]), short)
    return DotProducts(name == "mixed", name.endswith("cvt"), short)


def stage_bytes(operands: Operands) -> int:
    return operands.key_bytes + operands.scale_bytes


def shared_bytes(operands: Operands) -> int:
    """Dynamic shared memory of a CTA: every warp's ring, and what the schedule needs."""
    ring = operands.stages * (stage_bytes(operands) + BARRIER_BYTES)
    return WARPS * ring + scratch_bytes(THREADS)


class Feed(NamedTuple):
    """The next page to request, ahead of the one being scored by the length of the ring."""

    group: Int32
    page_index: Int32  # in the group
    pages: Int32  # of the group
    table: Int64  # the group's row of the block table
    page: Int32  # its entry
    left: Int32  # pages to request, this one included


def _page_of(table: Int64, page_index: Int32) -> Int32:
    return load_global_int(table + Int64(page_index) * 4)


def start_feed(pages: Pages, place: Place, count: Int32) -> Feed:
    """The feed of a share of `count` pages."""
    table = pages.table + Int64(place.request) * pages.table_stride
    return Feed(
        group=place.group,
        page_index=place.block,
        pages=pages_of_keys(place.keys),
        table=table,
        page=_page_of(table, place.block),
        left=count,
    )


@cute.jit
def request_page(
    operands: cutlass.Constexpr, pages: Pages, ring: Ring, slot: Int32, page: Int32
) -> None:
    """Start the copies of one page, or a warp's part of it, into a slot of the ring."""
    lane = cute.arch.lane_idx()
    stage = ring.stages + slot * stage_bytes(operands)
    barrier = ring.barriers + slot * BARRIER_BYTES
    keys = pages.keys + Int64(page) * pages.key_stride
    scales = pages.scales + Int64(page) * pages.scale_stride
    size = Int32(operands.key_bytes)
    if cutlass.const_expr(operands.scale_bytes > 0):
        if pages.adjacent:
            size = Int32(stage_bytes(operands))
        else:
            target = stage + operands.key_bytes + lane * 8
            for first in cutlass.range_constexpr(0, operands.scale_bytes, 8 * WARP):
                copy_8_bytes_to_shared(target + first, scales + Int64(lane * 8 + first))
            barrier_arrive_after_copies(barrier)
    if lane == 0:
        barrier_expect(barrier, size)
        if cutlass.const_expr(operands.scale_bytes > 0 and operands.team > 1):
            copy_bulk_to_shared(stage, keys, Int32(operands.key_bytes), barrier, pages.policy)
            if pages.adjacent:
                target = stage + operands.key_bytes
                size = Int32(operands.scale_bytes)
                copy_bulk_to_shared(target, scales, size, barrier, pages.policy)
        else:
            copy_bulk_to_shared(stage, keys, size, barrier, pages.policy)


@cute.jit
def request_next(
    operands: cutlass.Constexpr,
    source: Lengths,
    pages: Pages,
    ring: Ring,
    slot: Int32,
    feed: Feed,
) -> Feed:
    """Request the feed's page into a slot and move the feed on, past the end of a group too."""
    request_page(operands, pages, ring, slot, feed.page)
    group, page_index, group_pages, table, page, left = feed
    left -= 1
    page_index += 1
    if left > 0:
        if page_index == group_pages:
            place = next_place(source, group)
            group = place.group
            page_index = place.block
            group_pages = pages_of_keys(place.keys)
            table = pages.table + Int64(place.request) * pages.table_stride
        page = _page_of(table, page_index)
    return Feed(group, page_index, group_pages, table, page, left)


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
    first_key: Int32,
) -> None:
    """Score the `left` pages from a place on; a warp's whole share, at least one page.

    In every page a warp scores as many keys as its team leaves it, from `first_key` on.
    """
    fetch_query, prepare_query = operands.fetch_query, operands.prepare_query
    read_keys, score = operands.read_keys, operands.score
    loaded_words = operands.loaded_words
    zero = opaque_zero()
    group, block, group_keys, _ = place
    fetched = fetch_query(query_rows.of_group(group))
    feed = start_feed(pages, place, left)
    for i in cutlass.range_constexpr(operands.stages):
        if feed.left > 0:
            feed = request_next(operands, source, pages, ring, Int32(i), feed)
    slot = Int32(0)
    parity = Int32(0)
    while left > 0:
        prepared = prepare_query(fetched)
        target = score_rows.of_group(group, group_keys).from_key(first_key)
        count = cutlass.min(left, pages_of_keys(group_keys) - block)
        for current in range(block, block + count):
            barrier_wait(ring.barriers + slot * BARRIER_BYTES, parity)
            stage = ring.stages + slot * stage_bytes(operands)
            for part in cutlass.range_constexpr(operands.parts):
                key_registers = read_keys(stage, part)
                if cutlass.const_expr(part == operands.parts - 1):
                    # Once all keys are in registers, its slot is free.
                    arrived = all_arrived(loaded_words(key_registers), zero)
                    cute.arch.sync_warp()
                    if arrived and feed.left > 0:
                        feed = request_next(operands, source, pages, ring, slot, feed)
                store_scores(
                    score(prepared, key_registers, part),
                    target,
                    current * PAGE,
                    PAGE // operands.team,
                )
            slot += 1
            if slot == operands.stages:
                slot = Int32(0)
                parity ^= 1
        left -= count
        if left > 0:
            group, block, group_keys, _ = next_place(source, group)
            fetched = fetch_query(query_rows.of_group(group))


@cute.kernel
def score_kernel(
    addresses: Addresses,
    sizes: Sizes,
    variant: cutlass.Constexpr[str],
) -> None:
    operands = make_operands(variant)
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(thread >> 5)

    # Before anything is read: fetching into the L2 cache is right whoever still writes there.
    launch_dependents()
    line = (cta * THREADS + thread) * CACHE_LINE
    if line < sizes.prefetched_bytes:
        prefetch_to_l2(addresses.block_table + Int64(line))

    # Stages first: copies to addresses that are not multiples of 128 bytes are slower.
    shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
    barriers = shared + WARPS * operands.stages * stage_bytes(operands)
    scratch = barriers + WARPS * operands.stages * BARRIER_BYTES
    ring = Ring(
        stages=shared + warp * (operands.stages * stage_bytes(operands)),
        barriers=barriers + warp * (operands.stages * BARRIER_BYTES),
    )
    page_bytes = operands.team * operands.key_bytes
    adjacent = (addresses.key_scales == addresses.key_cache + page_bytes) & (
        sizes.key_stride == sizes.key_scale_stride
    )
    if cutlass.const_expr(operands.scale_bytes == 0):
        adjacent = Boolean(True)
    if lane < operands.stages:
        # Beside the copy engine, every lane arrives where it copies scales itself.
        arrivals = cutlass.select_(adjacent, Int32(1), Int32(1 + WARP))
        barrier_init(ring.barriers + lane * BARRIER_BYTES, arrivals)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()

    wait_for_prerequisites()
    source = Lengths(addresses.context_lengths, addresses.requests, sizes.groups, sizes.max_context)
    teams = WARPS // operands.team
    team, member = warp // operands.team, warp % operands.team
    worker = Worker(
        team,
        cta,
        teams,
        sizes.first_ctas,
        sizes.inverse_teams,
        LATE_LEAST_PAGES,
        operands.two_late_pages,
    )
    place, share = find_share(source, worker, scratch, THREADS)
    query_rows = QueryRows(
        addresses.query,
        sizes.query_stride,
        addresses.query_scales,
        sizes.query_scale_stride,
        sizes.rows,
    )
    aligned = ((addresses.scores | sizes.score_stride) & (SCORE_VECTOR_BYTES - 1)) == 0
    score_rows = ScoreRows(
        addresses.scores, sizes.score_stride, sizes.rows, sizes.max_context, aligned
    )
    pages = Pages(
        keys=addresses.key_cache + Int64(member * operands.key_bytes),
        key_stride=sizes.key_stride,
        scales=addresses.key_scales + Int64(member * operands.scale_bytes),
        scale_stride=sizes.key_scale_stride,
        table=addresses.block_table,
        table_stride=sizes.table_stride,
        adjacent=adjacent,
        policy=(
            eviction_policy("evict_first")
            if operands.short
            else page_policy(share.total, sizes.rows)
        ),
    )
    if share.count > 0:
        first_key = member * (PAGE // operands.team)
        score_share(
            operands, source, query_rows, score_rows, pages, ring, place, share.count, first_key
        )


@cute.jit
def launch_kernel(
    addresses: Addresses,
    sizes: Sizes,
    variant: cutlass.Constexpr[str],
    ctas_per_sm: cutlass.Constexpr[int],
) -> None:
    score_kernel(addresses, sizes, variant).launch(
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        smem=shared_bytes(make_operands(variant)),
        min_blocks_per_mp=ctas_per_sm,
        preferred_smem_carveout=100,
    )
