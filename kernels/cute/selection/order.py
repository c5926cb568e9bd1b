"""Scores as order keys, and the key of a rank among those that a CTA has in shared memory.

An *order key* is the int32 of a score's bits, with the lower 31 turned over for negative numbers:
the larger, the earlier a score is. -0 gets the key of +0. NaN gets the least key but one, and the
least is for what is not a score at all.

A search narrows a bracket: at least `rank` keys reach its lower end, fewer its upper end. A step
cuts it into 2,048 equal bins, counts the keys in each (shared memory adds ones to one bin for many
lanes at once), and sums the bins from the top until the rank is reached. Three steps tell all 32
bits, whatever the keys are, and two are mostly enough.

Loops are kept as loops. With the keys in registers the code is some thousand instructions long, of
which each is executed once, and fetching them took longer than executing them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from sdsa_kernels.cute.ptx import (
    add_one_to_shared,
    as_float,
    as_int,
    canonical_zero,
    leading_zeros,
    least_of_warp,
    load_shared_int,
    load_shared_ints,
    most_of_warp,
    not_a_number,
    store_shared_int,
    store_shared_ints,
    sum_of_warp,
)
from sdsa_kernels.cute.schedule import sum_up_to_lane

WARP = 32
WARPS = 16
THREADS = WARP * WARPS
TILE = 8192  # order keys that a CTA has at a time
# Order keys that a thread loads before it looks at one: a store between two loads would part them.
BATCH = 4

LEAST = -(2**31)  # no score
_NOT_A_NUMBER = LEAST + 1
_MAGNITUDE = 2**31 - 1

_BIN_BITS = 11
_BINS = 1 << _BIN_BITS
_OF_THREAD = _BINS // THREADS  # bins that a thread sums, next to each other
_VECTOR = 4  # of which it loads so many at a time
_BINS_BYTES = 4 * _BINS
_WORDS_AT = _BINS_BYTES
_TOLD_AT = _WORDS_AT + 8 * WARPS
SEARCH_BYTES = _TOLD_AT + 16  # of shared memory that a search takes


def order_key(bits: Int32) -> Int32:
    """The order key of a score's bits."""
    score = canonical_zero(as_float(Uint32(bits)))
    key = turned(as_int(score))
    return cutlass.select_(not_a_number(score), Int32(_NOT_A_NUMBER), key)


def turned(bits: Int32) -> Int32:
    """A float's bits as an order key, or the reverse."""
    return bits ^ ((bits >> 31) & _MAGNITUDE)


class Search(NamedTuple):
    """A bracket of order keys."""

    low: Int32
    last: Int32  # the largest key in it
    reached: Int32  # how many keys are at least `low`
    above: Int32  # how many keys are larger than `last`


class Extremes(NamedTuple):
    """The largest and the smallest order key so far."""

    most: Int32
    least: Int32


def no_extremes() -> Extremes:
    return Extremes(Int32(LEAST), Int32(_MAGNITUDE))


def _load_batch(keys: Int32, first: Int32, count: Int32) -> list[tuple[Int32, Int32, Boolean]]:
    """Addresses and values of a thread's next order keys, and whether they are there."""
    batch = []
    for i in range(BATCH):
        index = first + i * THREADS
        inside = index < count
        address = keys + cutlass.select_(inside, index, first) * 4
        batch.append((address, load_shared_int(address), inside))
    return batch


@cute.jit
def with_extremes(
    extremes: Extremes, keys: Int32, count: Int32, are_bits: Boolean | bool
) -> Extremes:
    """The extremes with this thread's part of the order keys in shared memory.

    Where these are bits of scores, their order keys take their place.
    """
    thread, _, _ = cute.arch.thread_idx()
    most, least = extremes
    for first in cutlass.range(thread, count, BATCH * THREADS, unroll=1):
        for address, value, inside in _load_batch(keys, Int32(first), count):
            key = value
            if are_bits:
                key = order_key(value)
                store_shared_int(address, key, inside)
            # A key that is not there is the first one again.
            most = cutlass.max(most, key)
            least = cutlass.min(least, key)
    return Extremes(most, least)


def start_of_search(extremes: Extremes, count: Int32, address: Int32) -> Search:
    """The bracket of the order keys of all threads, `count` in all."""
    thread, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    words = address + _WORDS_AT
    # All lanes of a warp store the same words: no branch.
    of_warp = (most_of_warp(extremes.most), least_of_warp(extremes.least))
    store_shared_ints(words + (thread >> 5) * 8, of_warp)
    cute.arch.sync_threads()
    most, least = load_shared_ints(words + (lane & (WARPS - 1)) * 8, 2)
    return Search(least_of_warp(least), most_of_warp(most), count, Int32(0))


def is_open(search: Search, rank: Int32, slack: Int32) -> Boolean:
    """Whether more than `slack` too many reach the lower end, and the bracket can be narrowed."""
    return (search.reached - rank > slack) & (search.last != search.low)


def clear_bins(address: Int32) -> None:
    """Make the bins of a search zero; a barrier must follow."""
    thread, _, _ = cute.arch.thread_idx()
    for i in range(0, _OF_THREAD, _VECTOR):
        target = address + (thread * _OF_THREAD + i) * 4
        store_shared_ints(target, (Int32(0),) * _VECTOR)


def _shift_of(search: Search) -> Int32:
    """Bits of a key's distance from the lower end that do not matter for its bin."""
    bits = 32 - leading_zeros(search.last - search.low)
    return cutlass.max(bits - _BIN_BITS, Int32(0))


@cute.jit
def count_into_bins(search: Search, keys: Int32, count: Int32, address: Int32) -> None:
    """Count this thread's part of the order keys in shared memory into the bins of a bracket."""
    thread, _, _ = cute.arch.thread_idx()
    shift = Uint32(_shift_of(search))
    for first in cutlass.range(thread, count, BATCH * THREADS, unroll=1):
        for _, key, there in _load_batch(keys, Int32(first), count):
            index = Int32(Uint32(key - search.low) >> shift)
            inside = there & (key >= search.low) & (key <= search.last)
            add_one_to_shared(address + index * 4, inside)


@cute.jit
def narrowed(search: Search, rank: Int32, address: Int32) -> Search:
    """The bin of a bracket that the rank is in; a barrier must be before."""
    thread, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    words = address + _WORDS_AT
    told = address + _TOLD_AT
    # The first thread has the last bins.
    first = _BINS - (thread + 1) * _OF_THREAD
    bins: tuple[Int32, ...] = ()
    for i in cutlass.range_constexpr(0, _OF_THREAD, _VECTOR):
        bins = (*bins, *load_shared_ints(address + (first + i) * 4, _VECTOR))
    mine = Int32(0)
    for each in bins:
        mine += each
    through = sum_up_to_lane(mine)
    store_shared_int(words + (thread >> 5) * 4, cute.arch.shuffle_sync(through, WARP - 1))
    cute.arch.sync_threads()
    of_warps = load_shared_int(words + (lane & (WARPS - 1)) * 4)
    before = sum_of_warp(cutlass.select_(lane < (thread >> 5), of_warps, Int32(0)))
    above = search.above + before + through - mine
    if above < rank and rank <= above + mine:
        index = Int32(0)
        reached = Int32(0)
        larger = Int32(0)
        for i in cutlass.range_constexpr(_OF_THREAD - 1, -1, -1):
            through = above + bins[i]
            inside = (above < rank) & (rank <= through)
            index = cutlass.select_(inside, first + i, index)
            reached = cutlass.select_(inside, through, reached)
            larger = cutlass.select_(inside, above, larger)
            above = through
        store_shared_ints(told, (index, reached, larger, Int32(0)))
    cute.arch.sync_threads()
    index, reached, above, _ = load_shared_ints(told, 4)
    shift = _shift_of(search)
    low = search.low + (index << shift)
    size = (Int32(1) << shift) - 1
    # The last bin may be cut off, and at the top a sum would overflow.
    last = cutlass.select_(
        Uint32(search.last) - Uint32(low) < Uint32(size), search.last, low + size
    )
    return Search(low, last, reached, above)


@cute.jit
def find_rank(
    keys: Int32, count: Int32, rank: Int32, slack: Int32, address: Int32, are_bits: Boolean | bool
) -> Search:
    """Search the order key of a rank (1 is the largest) among those in shared memory.

    Parameters
    ----------
    keys : Int32
        Their address, visible to all threads.
    count : Int32
        How many they are.
    rank : Int32
        At least 1, and at most `count`.
    slack : Int32
        Stop where no more than so many keys too many reach the lower end.
    address : Int32
        Of `SEARCH_BYTES` bytes of shared memory.
    are_bits : Boolean
        Whether they are bits of scores, which their order keys are to replace.
    """
    clear_bins(address)
    extremes = with_extremes(no_extremes(), keys, count, are_bits)
    search = start_of_search(extremes, count, address)
    while is_open(search, rank, slack):
        count_into_bins(search, keys, count, address)
        cute.arch.sync_threads()
        search = narrowed(search, rank, address)
        clear_bins(address)
        cute.arch.sync_threads()
    return search
