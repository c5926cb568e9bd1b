"""Shares of the flattened list of work units, found on the device from the context lengths.

A *unit* is the piece that a warp scores at a time: a page of NVFP4 keys, a quarter page of BF16
keys. The groups' units, one group after the other, are the flattened list; every warp of the grid
takes a contiguous share of it, all shares equal to within one unit. So the cost follows the sum of
the lengths, whatever `max_context` is and however the lengths differ.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .cute_ptx import load_global_int, load_shared_int, store_shared_int

WARP = 32

# The second wave gets a 16th of a list that has at least 12 units for every warp. H200, NVFP4: with
# 15.5 units a warp this is 3 % faster for 1 row and 8 % for 8 rows, with 7.75 it is 3 % slower.
LATE_WAVE_SHIFT = 4
LATE_WAVE_MINIMUM_UNITS = 12


def schedule_bytes(threads: int) -> int:
    """Shared memory that `find_share` needs, in bytes."""
    return 4 * (threads + threads // WARP)


class Lengths(NamedTuple):
    """The groups, as the launch got them."""

    lengths: Int64  # address of int32 [groups]
    requests: Int64  # address of int32 [groups]
    groups: Int32
    max_context: Int32
    unit_shift: int  # log2 of the keys in a unit


class Place(NamedTuple):
    """A unit of the flattened list, and the group that it belongs to."""

    group: Int32
    unit: Int32  # in the group
    keys: Int32  # the group's length
    request: Int32


def units_of_keys(source: Lengths, keys: Int32) -> Int32:
    """Units that hold `keys` keys."""
    return (keys + ((1 << source.unit_shift) - 1)) >> source.unit_shift


def keys_and_request(source: Lengths, group: Int32) -> tuple[Int32, Int32]:
    """Length of a group, 0 for one past the last, and its request."""
    inside = group < source.groups
    offset = Int64(cutlass.select_(inside, group, Int32(0))) * 4
    keys = load_global_int(source.lengths + offset)
    request = load_global_int(source.requests + offset)
    keys = cutlass.max(cutlass.min(keys, source.max_context), Int32(0))
    return cutlass.select_(inside, keys, Int32(0)), request


def _sum_up_to_lane(value: Int32) -> Int32:
    """Inclusive prefix sum over the warp."""
    lane = cute.arch.lane_idx()
    for distance in (1, 2, 4, 8, 16):
        below = cute.arch.shuffle_sync_up(value, distance)
        value = value + cutlass.select_(lane >= distance, below, Int32(0))
    return value


def _count_lanes(predicate: cutlass.Boolean) -> Int32:
    return Int32(cute.arch.popc(cute.arch.vote_ballot_sync(predicate)))


class _Window(NamedTuple):
    """32 consecutive groups, one per lane."""

    keys: Int32
    request: Int32
    units: Int32
    upto: Int32  # units of this lane's group and those of the lanes below


def _load_window(source: Lengths, first_group: Int32) -> _Window:
    keys, request = keys_and_request(source, first_group + cute.arch.lane_idx())
    units = units_of_keys(source, keys)
    return _Window(keys, request, units, _sum_up_to_lane(units))


def _place_in_window(window: _Window, first_group: Int32, skip: Int32, lane: Int32) -> Place:
    """The unit `skip` units after the window's first, which is in the group of `lane`."""
    return Place(
        group=first_group + lane,
        unit=skip - cute.arch.shuffle_sync(window.upto - window.units, lane),
        keys=cute.arch.shuffle_sync(window.keys, lane),
        request=cute.arch.shuffle_sync(window.request, lane),
    )


@cute.jit
def find_place(source: Lengths, group: Int32, skip: Int32) -> Place:
    """The unit that lies `skip` units after the first of `group`; all lanes of a warp together.

    Groups without keys are passed over, 32 groups at a time.
    """
    window = _load_window(source, group)
    passed = _count_lanes(window.upto <= skip)
    while passed == WARP and group < source.groups:
        skip -= cute.arch.shuffle_sync(window.upto, WARP - 1)
        group += WARP
        window = _load_window(source, group)
        passed = _count_lanes(window.upto <= skip)
    return _place_in_window(window, group, skip, passed)


class Worker(NamedTuple):
    """Who takes a share: a warp or a CTA of the grid.

    The first wave of CTAs fills the GPU, a second one may follow.
    """

    index: Int32  # in its CTA
    cta: Int32
    per_cta: int
    first_ctas: Int32
    late_ctas: Int32
    late_wave_units: int  # units for every worker of the first wave from which a second one pays


def _split(units: Int32, rank: Int32, ranks: Int32) -> tuple[Int32, Int32]:
    """First unit and number of units of one of `ranks` near-equal shares."""
    each = Int32(Uint32(units) // Uint32(ranks))
    more = units - each * ranks
    return rank * each + cutlass.min(rank, more), each + Int32(rank < more)


def _share_of(total: Int32, worker: Worker) -> tuple[Int32, Int32]:
    """First unit and number of units of a worker's share.

    Some SMs get more memory bandwidth than others, and equal shares leave them idle at the end. So
    of a long list the last part is kept for the second wave, whose CTAs start where others ended.
    Neighbouring shares go to different CTAs, to spread short lists over the whole GPU.
    """
    late = worker.cta >= worker.first_ctas
    worth = (worker.late_ctas > 0) & (
        total >= worker.first_ctas * (worker.per_cta * worker.late_wave_units)
    )
    late_units = cutlass.select_(worth, total >> LATE_WAVE_SHIFT, Int32(0))
    ctas = cutlass.select_(late, worker.late_ctas, worker.first_ctas)
    cta = worker.cta - cutlass.select_(late, worker.first_ctas, Int32(0))
    start, count = _split(
        cutlass.select_(late, late_units, total - late_units),
        worker.index * ctas + cta,
        ctas * worker.per_cta,
    )
    return start + cutlass.select_(late, total - late_units, Int32(0)), count


@cute.jit
def find_share(
    source: Lengths, worker: Worker, scratch: Int32, threads: cutlass.Constexpr[int]
) -> tuple[Place, Int32]:
    """Where the share of a worker starts, and its number of units; all threads of a CTA together.

    Up to 32 groups, every warp sums the lengths alone. More are split over the threads, `chunk`
    groups each, and the sums meet in shared memory: `scratch` has
    `schedule_bytes`. A share without units gets a place that must not be used.
    """
    warps = threads // WARP
    count = Int32(0)
    place = Place(Int32(0), Int32(0), Int32(0), Int32(0))
    if source.groups <= WARP:
        window = _load_window(source, Int32(0))
        total = cute.arch.shuffle_sync(window.upto, WARP - 1)
        start, count = _share_of(total, worker)
        place = _place_in_window(window, Int32(0), start, _count_lanes(window.upto <= start))
    else:
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp_totals = scratch + threads * 4
        chunk = Int32(Uint32(source.groups + (threads - 1)) // Uint32(threads))
        mine = Int32(0)
        for i in cutlass.range(chunk, unroll=4):
            keys, _ = keys_and_request(source, thread * chunk + i)
            mine += units_of_keys(source, keys)
        upto = _sum_up_to_lane(mine)
        store_shared_int(scratch + thread * 4, upto)
        if lane == WARP - 1:
            store_shared_int(warp_totals + (thread >> 5) * 4, upto)
        cute.arch.sync_threads()
        in_table = lane < warps
        warp_units = load_shared_int(warp_totals + cutlass.select_(in_table, lane, Int32(0)) * 4)
        warp_units = cutlass.select_(in_table, warp_units, Int32(0))
        warps_upto = _sum_up_to_lane(warp_units)
        total = cute.arch.shuffle_sync(warps_upto, WARP - 1)
        start, count = _share_of(total, worker)
        warp = cutlass.min(_count_lanes(warps_upto <= start), Int32(warps - 1))
        before = cute.arch.shuffle_sync(warps_upto - warp_units, warp)
        upto = before + load_shared_int(scratch + (warp * WARP + lane) * 4)
        passed = _count_lanes(upto <= start)
        below = cute.arch.shuffle_sync(upto, cutlass.max(passed - 1, Int32(0)))
        skip = start - cutlass.select_(passed > 0, below, before)
        place = find_place(source, (warp * WARP + passed) * chunk, skip)
    return place, count
