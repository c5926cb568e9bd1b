"""Which of a warp's order keys are taken, and where they go: in the order of their indices.

A warp has a run of consecutive order keys in shared memory, and looks at `WARP` of them at a time.
Those above a threshold are taken, and the first few of those that equal it. A ballot says how many
are before a lane's own.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from sdsa_kernels.cute.ptx import load_shared_int, sum_of_warp

from .order import BATCH, LEAST, WARP

_TIE = 1 << 16  # a count of ties is in the upper half of a word, of others in the lower

# What is done with a key: its number in the run, its position among those taken, whether it is one.
Store = Callable[[Int32, Int32, Boolean], None]


class Run(NamedTuple):
    """A warp's order keys."""

    address: Int32
    count: Int32


class Taken(NamedTuple):
    """How many keys were above the threshold and equal to it, so far."""

    above: Int32
    ties: Int32

    def after(self, counts: Int32) -> "Taken":
        """With those that `count_taken` or a sum of its words tells."""
        return Taken(self.above + (counts & (_TIE - 1)), self.ties + (counts >> 16))


@cute.jit
def count_taken(run: Run, threshold: Int32) -> Int32:
    """How many keys of a warp are above a threshold, and how many equal it, as a word."""
    counts = Int32(0)
    for i in cutlass.range(cute.arch.lane_idx(), run.count, WARP, unroll=BATCH):
        key = load_shared_int(run.address + i * 4)
        counts += Int32(key > threshold) + Int32(key == threshold) * _TIE
    return sum_of_warp(counts)


@cute.jit
def place(
    run: Run,
    threshold: Int32,
    before: Taken,
    counts: Int32,
    most_ties: Int32,
    store: cutlass.Constexpr[Store],
) -> None:
    """Store each taken key of a warp at its position.

    Parameters
    ----------
    run, threshold
        As in `count_taken`.
    before : Taken
        How many are before the warp's first.
    counts : Int32
        From `count_taken`.
    most_ties : Int32
        How many keys that equal the threshold are taken.
    store : callable
    """
    lane = cute.arch.lane_idx()
    below = cute.arch.lanemask_lt()
    if counts >= _TIE:
        above, ties = before
        for start in cutlass.range(0, run.count, WARP, unroll=1):
            number = start + lane
            key = load_shared_int(run.address + cutlass.min(number, run.count - 1) * 4)
            key = cutlass.select_(number < run.count, key, Int32(LEAST))
            is_tied = (key == threshold) & (number < run.count)
            above_mask = cute.arch.vote_ballot_sync(key > threshold)
            tied_mask = cute.arch.vote_ballot_sync(is_tied)
            ties_before = ties + Int32(cute.arch.popc(tied_mask & below))
            position = above + Int32(cute.arch.popc(above_mask & below))
            position += cutlass.min(ties_before, most_ties)
            store(number, position, (key > threshold) | (is_tied & (ties_before < most_ties)))
            above += Int32(cute.arch.popc(above_mask))
            ties += Int32(cute.arch.popc(tied_mask))
    elif counts != 0:
        position = before.above + cutlass.min(before.ties, most_ties)
        for start in cutlass.range(0, run.count, BATCH * WARP, unroll=1):
            numbers = [start + i * WARP + lane for i in range(BATCH)]
            keys = [
                load_shared_int(run.address + cutlass.min(number, run.count - 1) * 4)
                for number in numbers
            ]
            for number, key in zip(numbers, keys, strict=True):
                is_above = (key > threshold) & (number < run.count)
                mask = cute.arch.vote_ballot_sync(is_above)
                store(number, position + Int32(cute.arch.popc(mask & below)), is_above)
                position += Int32(cute.arch.popc(mask))
