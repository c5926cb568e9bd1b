"""Shares of the flattened list of pages, found on the device from the context lengths.

The groups' pages, one group after the other, are the flattened list; every *team* of warps takes a
contiguous share of it, all shares equal to within one page. A team is four warps where keys are
BF16, one where they are NVFP4, two in short lists; each scores its part of every page. So the cost
follows the sum of the lengths, whatever `max_context` is and however the lengths differ.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from sdsa_quant.layout import PAGE

from .ptx import eviction_policy, load_global_int, load_shared_int, multiply_high, store_shared_int

WARP = 32
PAGE_SHIFT = PAGE.bit_length() - 1

# Some SMs get more memory bandwidth than others, and equal shares leave them idle at the end. So a
# list that has at least 12 pages for every team keeps its last 16th for late CTAs, which start
# where others ended. H200: with 15.5 pages a team this is 3 % faster, with 7.75 it is 2 % slower.
LATE_SHIFT = 4
LATE_LEAST_PAGES = 12

# Scores of a call, in 64s, up to which its pages are marked to leave the L2 cache before others.
# On an H200 that is 1 to 7 % faster with up to 16 MB of scores, and slower from 32 MB on.
KEPT_SCORE_PAGES = 24 * 1024 * 1024 // (4 * PAGE)


class Lengths(NamedTuple):
    """The groups, as the launch got them."""

    lengths: Int64  # address of int32 [groups]
    requests: Int64  # address of int32 [groups]
    groups: Int32
    max_context: Int32


class Place(NamedTuple):
    """A page of the flattened list, and the group that it belongs to."""

    group: Int32
    block: Int32  # which of the group's pages
    keys: Int32  # the group's length
    request: Int32


def pages_of_keys(keys: Int32) -> Int32:
    """Pages that hold `keys` keys."""
    return (keys + (PAGE - 1)) >> PAGE_SHIFT


def _load_keys(source: Lengths, group: Int32) -> Int32:
    """Length of a group, 0 for one past the last."""
    inside = group < source.groups
    offset = Int64(cutlass.select_(inside, group, Int32(0))) * 4
    keys = load_global_int(source.lengths + offset)
    keys = cutlass.max(cutlass.min(keys, source.max_context), Int32(0))
    return cutlass.select_(inside, keys, Int32(0))


def keys_and_request(source: Lengths, group: Int32) -> tuple[Int32, Int32]:
    """Length of a group and its request; 0 and anything for one past the last."""
    offset = Int64(cutlass.select_(group < source.groups, group, Int32(0))) * 4
    # In this order: the compiler starts a load that comes after the length when that has arrived.
    request = load_global_int(source.requests + offset)
    return _load_keys(source, group), request


def sum_up_to_lane(value: Int32) -> Int32:
    """Inclusive prefix sum over the warp."""
    lane = cute.arch.lane_idx()
    for distance in (1, 2, 4, 8, 16):
        below = cute.arch.shuffle_sync_up(value, distance)
        value = value + cutlass.select_(lane >= distance, below, Int32(0))
    return value


def count_lanes(predicate: cutlass.Boolean) -> Int32:
    return Int32(cute.arch.popc(cute.arch.vote_ballot_sync(predicate)))


class _Window(NamedTuple):
    """32 consecutive groups, one per lane."""

    keys: Int32
    request: Int32
    pages: Int32
    upto: Int32  # pages of this lane's group and those of the lanes below


def _load_window(source: Lengths, first_group: Int32) -> _Window:
    keys, request = keys_and_request(source, first_group + cute.arch.lane_idx())
    pages = pages_of_keys(keys)
    return _Window(keys, request, pages, sum_up_to_lane(pages))


def _place_in_window(window: _Window, first_group: Int32, skip: Int32, lane: Int32) -> Place:
    """The page `skip` pages after the window's first, which is in the group of `lane`."""
    return Place(
        group=first_group + lane,
        block=skip - cute.arch.shuffle_sync(window.upto - window.pages, lane),
        keys=cute.arch.shuffle_sync(window.keys, lane),
        request=cute.arch.shuffle_sync(window.request, lane),
    )


@cute.jit
def find_place(source: Lengths, group: Int32, skip: Int32) -> Place:
    """The page that lies `skip` pages after the first of `group`; all lanes of a warp together.

    Groups without keys are passed over, 32 groups at a time.
    """
    window = _load_window(source, group)
    passed = count_lanes(window.upto <= skip)
    while passed == WARP and group < source.groups:
        skip -= cute.arch.shuffle_sync(window.upto, WARP - 1)
        group += WARP
        window = _load_window(source, group)
        passed = count_lanes(window.upto <= skip)
    return _place_in_window(window, group, skip, passed)


@cute.jit
def next_place(source: Lengths, group: Int32) -> Place:
    """The first page of the groups after `group`, where there is one."""
    keys, request = keys_and_request(source, group + 1)
    place = Place(group + 1, Int32(0), keys, request)
    if keys == 0:
        place = find_place(source, group + 2, Int32(0))
    return place


def page_policy(total_pages: Int32, rows: Int32) -> Int64:
    """What the L2 cache is told to do with pages: to let them go first if the scores fit beside."""
    scores = cutlass.min(total_pages, Int32(KEPT_SCORE_PAGES)) * rows
    first, normal = eviction_policy("evict_first"), eviction_policy("evict_normal")
    return cutlass.select_(scores < KEPT_SCORE_PAGES, first, normal)


class Worker(NamedTuple):
    """A team of the grid. A first wave of CTAs fills the GPU, one or two late ones may follow."""

    team: Int32  # in its CTA
    cta: Int32
    teams: int  # of a CTA
    first_ctas: Int32  # CTAs of a wave
    inverse: Uint32  # 2^32 / teams of a wave
    late_least_pages: int  # for every team, from which on there are late CTAs
    two_late_pages: int  # for every team, from which on there are two late waves; 0: never


class Share(NamedTuple):
    """Consecutive pages of the list."""

    start: Int32
    count: Int32
    total: Int32  # pages of the whole list


def _share_of(total: Int32, worker: Worker) -> Share:
    """A team's share; neighbouring ones go to different CTAs, which spreads short lists."""
    late = worker.cta >= worker.first_ctas
    wave_ranks = worker.first_ctas * worker.teams
    late_pages = cutlass.select_(
        total >= wave_ranks * worker.late_least_pages, total >> LATE_SHIFT, Int32(0)
    )
    doubled = Int32(0)  # log2 of the waves
    if worker.two_late_pages > 0:
        doubled = Int32(late & (total >= wave_ranks * worker.two_late_pages))
    ctas, ranks = worker.first_ctas << doubled, wave_ranks << doubled
    cta = worker.cta - cutlass.select_(late, worker.first_ctas, Int32(0))
    rank = worker.team * ctas + cta
    pages = cutlass.select_(late, late_pages, total - late_pages)
    each = Int32(multiply_high(Uint32(pages), worker.inverse >> Uint32(doubled)))
    more = pages - each * ranks
    one_too_few = more >= ranks  # the inverse is rounded down
    each += Int32(one_too_few)
    more -= cutlass.select_(one_too_few, ranks, Int32(0))
    start = rank * each + cutlass.min(rank, more)
    start += cutlass.select_(late, total - late_pages, Int32(0))
    return Share(start, cutlass.select_(cta < ctas, each + Int32(rank < more), Int32(0)), total)


@cute.jit
def find_share(
    source: Lengths, worker: Worker, scratch: Int32, threads: cutlass.Constexpr[int]
) -> tuple[Place, Share]:
    """A team's share, and the place where it starts; all threads of a CTA together.

    One group needs no sum. Up to 32, every warp sums the lengths alone. More are split over the
    threads, `chunk` groups each, and the sums meet in `scratch`, which has `scratch_bytes`. A share
    without pages gets a place that must not be used.
    """
    share = Share(Int32(0), Int32(0), Int32(0))
    place = Place(Int32(0), Int32(0), Int32(0), Int32(0))
    if source.groups == 1:
        keys, request = keys_and_request(source, Int32(0))
        share = _share_of(pages_of_keys(keys), worker)
        place = Place(Int32(0), share.start, keys, request)
    elif source.groups <= WARP:
        window = _load_window(source, Int32(0))
        total = cute.arch.shuffle_sync(window.upto, WARP - 1)
        share = _share_of(total, worker)
        passed = count_lanes(window.upto <= share.start)
        place = _place_in_window(window, Int32(0), share.start, passed)
    else:
        place, share = _find_share_together(source, worker, scratch, threads)
    return place, share


def scratch_bytes(threads: int) -> int:
    """Shared memory that `find_share` needs: three ints for every thread, one for every warp."""
    return 4 * (3 * threads + threads // WARP)


@cute.jit
def _find_share_together(
    source: Lengths, worker: Worker, scratch: Int32, threads: cutlass.Constexpr[int]
) -> tuple[Place, Share]:
    """`find_share` for more groups than a warp has lanes."""
    warps = threads // WARP
    thread, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    thread_keys = scratch + threads * 4
    thread_requests = thread_keys + threads * 4
    warp_totals = thread_requests + threads * 4
    chunk = Int32(Uint32(source.groups + (threads - 1)) // Uint32(threads))
    mine = Int32(0)
    if chunk == 1:
        keys, request = keys_and_request(source, thread)
        store_shared_int(thread_keys + thread * 4, keys)
        store_shared_int(thread_requests + thread * 4, request)
        mine = pages_of_keys(keys)
    else:
        for i in cutlass.range(chunk, unroll=4):
            mine += pages_of_keys(_load_keys(source, thread * chunk + i))
    upto = sum_up_to_lane(mine)
    store_shared_int(scratch + thread * 4, upto)
    if lane == WARP - 1:
        store_shared_int(warp_totals + (thread >> 5) * 4, upto)
    cute.arch.sync_threads()
    in_table = lane < warps
    warp_pages = load_shared_int(warp_totals + cutlass.select_(in_table, lane, Int32(0)) * 4)
    warp_pages = cutlass.select_(in_table, warp_pages, Int32(0))
    warps_upto = sum_up_to_lane(warp_pages)
    total = cute.arch.shuffle_sync(warps_upto, WARP - 1)
    share = _share_of(total, worker)
    warp = cutlass.min(count_lanes(warps_upto <= share.start), Int32(warps - 1))
    before = cute.arch.shuffle_sync(warps_upto - warp_pages, warp)
    upto = before + load_shared_int(scratch + (warp * WARP + lane) * 4)
    passed = cutlass.min(count_lanes(upto <= share.start), Int32(WARP - 1))
    below = cute.arch.shuffle_sync(upto, cutlass.max(passed - 1, Int32(0)))
    skip = share.start - cutlass.select_(passed > 0, below, before)
    found = warp * WARP + passed
    place = Place(found, skip, Int32(0), Int32(0))
    if chunk == 1:
        keys = load_shared_int(thread_keys + found * 4)
        request = load_shared_int(thread_requests + found * 4)
        place = Place(found, skip, keys, request)
    elif share.count > 0:
        place = find_place(source, found * chunk, skip)
    return place, share
