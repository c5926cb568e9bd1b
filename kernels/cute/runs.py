"""A share of the flattened list of pages, walked run by run: a run is its part in one group.

The warps of a CTA with different roles each walk the CTA's share for themselves and need not tell
each other where they are. The lengths and requests of 32 groups at a time are kept in registers,
one group a lane, so that a step to the next group rarely reads memory.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from .schedule import WARP, Lengths, Place, keys_and_request, pages_of_keys


class Runs(NamedTuple):
    """The current run and what is left of the share, as every lane of a warp sees it."""

    group: Int32
    block: Int32  # which of the group's pages the run starts with
    pages: Int32  # of the run; 0 once the share is walked
    keys: Int32  # the group's length
    request: Int32
    left: Int32  # pages of the share from the run's start on
    first_group: Int32  # of the 32 groups whose lengths and requests the lanes hold
    lane_keys: Int32
    lane_request: Int32


def start_runs(place: Place, left: Int32) -> Runs:
    """The first run of a share of `left` pages."""
    return Runs(
        group=place.group,
        block=place.block,
        pages=cutlass.min(left, pages_of_keys(place.keys) - place.block),
        keys=place.keys,
        request=place.request,
        left=left,
        first_group=place.group - (WARP - 1),  # the last lane's: no lane holds a later one yet
        lane_keys=Int32(0),
        lane_request=Int32(0),
    )


def _groups_with_keys(lane_keys: Int32) -> Uint32:
    """A bit for every lane whose group has keys."""
    return Uint32(cute.arch.vote_ballot_sync(lane_keys > 0))


@cute.jit
def next_run(source: Lengths, runs: Runs) -> Runs:
    """The run after this one, in the next group that has keys; all lanes of a warp together."""
    group, block, pages, keys, request, left, first_group, lane_keys, lane_request = runs
    left -= pages
    block = Int32(0)
    pages = Int32(0)
    if left > 0:
        held = (Uint32(2) << Uint32(group - first_group)) - 1  # lanes up to the group's own
        later = _groups_with_keys(lane_keys) & ~held
        while later == 0 and first_group < source.groups:
            first_group += WARP
            lane_keys, lane_request = keys_and_request(source, first_group + cute.arch.lane_idx())
            later = _groups_with_keys(lane_keys)
        lane = Int32(cute.arch.popc(~later & (later - 1)))
        group = first_group + lane
        keys = cute.arch.shuffle_sync(lane_keys, lane)
        request = cute.arch.shuffle_sync(lane_request, lane)
        pages = cutlass.min(left, pages_of_keys(keys))
    return Runs(group, block, pages, keys, request, left, first_group, lane_keys, lane_request)
