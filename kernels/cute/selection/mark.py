"""The first selecting kernel: a threshold for each long row, and the scores above it.

    row of scores  |  tile 0  |  tile 1  |  tile 2  |    4,096 scores a tile
    programs       |    p     |    p + 1            |    equal shares of all tiles of all rows
    above          |0010...   |1000...              |    a bit a score, a word for 32
    ties           |0000...   |0100...              |    the same of what equals the threshold
    segments       |c         |c                    |    candidates, in ascending key index

**Threshold.** Every program samples a row that it has tiles of: 2,048 scores, four next to each
other at a pseudo-random index of each of 512 equal intervals; 8,192 scores of long rows. The
threshold is the ``r``-th largest of these, ``r`` being what `k` comes to in the sample and five
standard deviations more. Programs that share a row find the same one.

**Candidates.** A warp has 256 consecutive scores of a tile, 8 a lane, on their way to registers
while the threshold is looked for. A ballot makes a word of 32 comparisons, and lane `i` keeps the
`i`-th. Sums over the lanes, and over the warps after one barrier, say where each score above the
threshold belongs: no atomic decides a position. The words are kept for rows in which the threshold
itself is the k-th largest, so that all that equals it is a candidate.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from sdsa_kernels.cute.ptx import (
    as_float,
    copy_int_to_shared,
    copy_to_shared,
    end_of_copies,
    launch_dependents,
    load_global_int,
    square_root,
    store_global_ints,
    wait_for_copies,
    wait_for_prerequisites,
)
from sdsa_kernels.cute.schedule import sum_up_to_lane

from .arguments import SelectAddresses, SelectSizes
from .order import SEARCH_BYTES, THREADS, WARP, WARPS, find_rank, order_key, turned
from .rows import (
    CTAS_PER_SM,
    MARK_TILE,
    SHARED_BYTES,
    SHARED_PERCENT,
    WORDS_BYTES,
    Rows,
    count_tiles,
    find_tile,
    load_window,
    sums_of_warps,
    tiles_of_length,
)

HELD = MARK_TILE // THREADS  # scores of a tile that a lane has
OF_WARP = MARK_TILE // WARPS  # scores of a tile that a warp has
_TIE = 1 << 16  # a count of ties is in the upper half of a word, of others in the lower
_QUAD = 4  # scores next to each other that are sampled
_QUADS, _LONG_QUADS = 1, 4  # of a thread
_LONG = 1 << 17  # scores of a row from which on the sample is larger
_DEVIATIONS = 5.0  # scores next to each other are alike: fewer would often be too few
_SAMPLE_BYTES = 4 * _LONG_QUADS * _QUAD * THREADS
MARK_SHARED_BYTES = _SAMPLE_BYTES + SEARCH_BYTES + SHARED_BYTES

Held = tuple[Int32, ...]


@cute.jit
def _copy_quad(target: Int32, source: Int64) -> None:
    """Start to copy four consecutive scores to shared memory."""
    if source & 15 == 0:
        copy_to_shared(target, source, Int32(4 * _QUAD))
    else:
        for i in cutlass.range_constexpr(_QUAD):
            copy_int_to_shared(target + i * 4, source + i * 4)


def _sampled_index(slot: Int32, interval: Int32) -> Int32:
    """The first of four scores that are sampled of an interval, a multiple of 4."""
    # A hash's upper 15 bits choose within the interval, so that no period of the keys matters.
    hashed = ((slot * 40503) & 0xFFFF) >> 1
    jitter = (hashed * cutlass.min(interval - _QUAD, Int32(0x7FFF))) >> 15
    return (slot * interval + jitter) & -_QUAD


def _quads_of(length: Int32) -> Int32:
    """Quads of a row that a thread samples."""
    return Int32(cutlass.select_(length >= _LONG, Int32(_LONG_QUADS), Int32(_QUADS)))


@cute.jit
def _copy_sample(target: Int32, scores: Int64, length: Int32) -> None:
    """Start to copy a sample of a row to shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    slots = _quads_of(length) * THREADS
    interval = length // slots
    for slot in cutlass.range(thread, slots, THREADS, unroll=2):
        source = scores + Int64(_sampled_index(slot, interval)) * 4
        _copy_quad(target + slot * (4 * _QUAD), source)


@cute.jit
def _sample_threshold(sample: Int32, length: Int32, top_k: Int32, address: Int32) -> Float32:
    """A score that in all likelihood at least `top_k` scores of a row reach, and few more."""
    sampled = _quads_of(length) * (THREADS * _QUAD)
    wanted = Float32(Int32(top_k)) * Float32(Int32(sampled)) / Float32(Int32(length))
    rank = Int32(wanted + square_root(wanted) * _DEVIATIONS + 2.0)
    rank = cutlass.min(rank, sampled)
    search = find_rank(sample, sampled, rank, (rank >> 5) + 1, address, are_bits=True)
    return as_float(Uint32(turned(search.low)))


def _load_scores(scores: Int64, first: Int32, length: Int32) -> Held:
    """The bits of a lane's scores, `WARP` apart, from `first` on, as far as there are some."""
    bits: Held = ()
    for i in range(HELD):
        index = cutlass.min(first + i * WARP, length - 1)
        bits = (*bits, load_global_int(scores + Int64(index) * 4))
    return bits


def _mark(bits: Held, threshold: Float32) -> tuple[Int32, Int32]:
    """A lane's words: for its number's 32 scores of the warp, which are above and which equal."""
    lane = cute.arch.lane_idx()
    above, ties = Int32(0), Int32(0)
    for i, each in enumerate(bits):
        score = as_float(Uint32(each))
        mine = lane == i
        word = Int32(cute.arch.vote_ballot_sync(score > threshold))
        above = cutlass.select_(mine, word, above)
        word = Int32(cute.arch.vote_ballot_sync(score == threshold))
        ties = cutlass.select_(mine, word, ties)
    return above, ties


@cute.jit
def _store_candidates(
    target: Int64, capacity: Int32, bits: Held, first: Int32, above: Int32, before: Int32
) -> None:
    """Store a warp's scores above the threshold.

    Parameters
    ----------
    target, capacity
        Of the segment.
    bits : tuple of Int32
        The warp's scores.
    first : Int32
        Key index of this lane's first.
    above, before : Int32
        This lane's word of those above, and how many of the segment are before its first.
    """
    lane = cute.arch.lane_idx()
    below = cute.arch.lanemask_lt()
    for i in cutlass.range_constexpr(HELD):
        word = cute.arch.shuffle_sync(above, i)
        if word != 0:
            position = cute.arch.shuffle_sync(before, i) + Int32(cute.arch.popc(word & below))
            kept = (((word >> lane) & 1) != 0) & (position < capacity)
            pair = (first + i * WARP, order_key(bits[i]))
            store_global_ints(target + Int64(position) * 8, pair, kept)


@cute.kernel
def mark_kernel(addresses: SelectAddresses, sizes: SelectSizes) -> None:
    thread, _, _ = cute.arch.thread_idx()
    program, _, _ = cute.arch.block_idx()
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(thread >> 5)
    sample = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
    search_at = sample + _SAMPLE_BYTES
    words = search_at + SEARCH_BYTES
    launch_dependents()
    wait_for_prerequisites()
    rows = Rows(addresses.context_lengths, sizes.rows, sizes.rows_per_group, sizes.max_context)
    window = load_window(rows, Int32(0), Int32(0), words)
    total = count_tiles(rows, window, words)
    share = total // sizes.programs
    extra = total - share * sizes.programs
    position = program * share + cutlass.min(program, extra)
    end = position + share + cutlass.select_(program < extra, Int32(1), Int32(0))
    half = Int32(0)
    while position < end:
        found, window = find_tile(rows, window, position, words)
        row, length, passed = found
        tile = position - passed
        steps = cutlass.min(tiles_of_length(length) - tile, end - position)
        scores = addresses.scores + Int64(row) * sizes.score_stride
        _copy_sample(sample, scores, length)
        end_of_copies()
        first = tile * MARK_TILE + warp * OF_WARP
        # On its way while the threshold is looked for, as each tile is while the one before it is
        # done with.
        bits = _load_scores(scores, first + lane, length)
        wait_for_copies(0)
        cute.arch.sync_threads()
        threshold = _sample_threshold(sample, length, sizes.top_k, search_at)
        segment = program + row
        target = addresses.candidates + Int64(segment) * Int64(sizes.capacity) * 8
        plane = Int64(row) * Int64(sizes.words) * 4
        all_above = Int32(0)
        all_ties = Int32(0)
        for step in cutlass.range(0, steps, unroll=1):
            here = bits
            if step + 1 < steps:
                bits = _load_scores(scores, first + MARK_TILE + lane, length)
            above, ties = _mark(here, threshold)
            # Of this lane's 32 scores, those before the end of the row.
            inside = cutlass.max(cutlass.min(length - first - lane * WARP, Int32(WARP)), Int32(0))
            every = Int32(cutlass.select_(inside == WARP, Int32(-1), (Int32(1) << inside) - 1))
            above &= every
            ties &= every
            word = plane + Int64((first >> 5) + lane) * 4
            is_there = (lane < HELD) & (inside > 0)
            store_global_ints(addresses.above + word, (above,), is_there)
            store_global_ints(addresses.ties + word, (ties,), is_there)
            counts = Int32(cute.arch.popc(above)) + Int32(cute.arch.popc(ties)) * _TIE
            through = sum_up_to_lane(counts)
            last = cute.arch.shuffle_sync(through, WARP - 1)
            # Both halves of the words in turn, so that no warp overwrites what others still read.
            of_warps, of_tile = sums_of_warps(last, words + half * (WORDS_BYTES // 2))
            half ^= 1
            before = all_above + ((of_warps + through - counts) & (_TIE - 1))
            if last & (_TIE - 1) != 0:
                _store_candidates(target, sizes.capacity, here, first + lane, above, before)
            all_above += of_tile & (_TIE - 1)
            all_ties += of_tile >> 16
            first += MARK_TILE
        if thread == 0:
            counted = (all_above, all_ties)
            store_global_ints(addresses.counts + Int64(segment) * 8, counted)
        position += steps


@cute.jit
def launch_mark(addresses: SelectAddresses, sizes: SelectSizes) -> None:
    mark_kernel(addresses, sizes).launch(
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        smem=MARK_SHARED_BYTES,
        min_blocks_per_mp=CTAS_PER_SM,
        preferred_smem_carveout=SHARED_PERCENT,
    )
