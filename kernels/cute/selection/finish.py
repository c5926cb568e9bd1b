"""The second selecting kernel: a CTA for each row writes the row's top-k.

    candidates of a long row's segments, or all scores of a short row
        -> shared memory                      find the k-th largest, 11 bits a step
        -> those that reach it                a position each, by ballots and one barrier
        -> top_keys, in ascending key index

Of a long row's scores there are three kinds: above the sampled threshold, equal to it, and others.
Where at least `k` are above, those are the candidates. Where fewer are, but not with those that
are equal, the bits of both are the answer: all that are above, and the first of those that are
equal. Else the sample has misled, and all scores of the row are looked at, a part at a time for
every step: slower, and as exact. So are more than 8,192 candidates, or than a segment has room for.
"""

import functools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from sdsa_kernels.cute.ptx import (
    copy_int_to_shared,
    copy_to_shared,
    end_of_copies,
    launch_dependents,
    leading_zeros,
    load_global_int,
    load_global_ints,
    load_shared_int,
    store_global_ints,
    store_shared_int,
    sum_of_warp,
    wait_for_copies,
    wait_for_prerequisites,
)
from sdsa_kernels.cute.schedule import sum_up_to_lane
from sdsa_quant.layout import PAGE

from .arguments import SelectAddresses, SelectSizes
from .compact import Run, Taken, count_taken, place
from .order import (
    SEARCH_BYTES,
    THREADS,
    TILE,
    WARP,
    Search,
    clear_bins,
    count_into_bins,
    find_rank,
    is_open,
    narrowed,
    no_extremes,
    start_of_search,
    with_extremes,
)
from .rows import (
    CTAS_PER_SM,
    DIRECT,
    SHARED_BYTES,
    SHARED_PERCENT,
    WORDS_BYTES,
    Row,
    Rows,
    find_row,
    sums_of_warps,
    tiles_of_length,
)

PAGE_SHIFT = PAGE.bit_length() - 1
_MINUS_INFINITY = -(1 << 23)  # the bits 0xFF800000
_QUAD = 4
# Shared memory: scores or their order keys, key indices, what searches and sums take.
_INDICES_AT = 4 * TILE
_SEARCH_AT = 2 * _INDICES_AT
_WORDS_AT = _SEARCH_AT + SEARCH_BYTES
_ENDS_AT = _WORDS_AT + SHARED_BYTES
_OF_THREAD = 2  # segments of a row that a thread looks at
MOST_SEGMENTS = _OF_THREAD * THREADS
FINISH_SHARED_BYTES = _ENDS_AT + 4 * MOST_SEGMENTS
_LONE_SHARED_BYTES = 120_000  # with so much, no other CTA runs beside it on its multiprocessor


def shared_bytes_of(architecture: str) -> int:
    """Shared memory with which a CTA has a multiprocessor of its own."""
    # An SM120 has 100 KB: no second CTA fits beside the first.
    return FINISH_SHARED_BYTES if architecture == "sm_120a" else _LONE_SHARED_BYTES


class Output(NamedTuple):
    """Where a row's keys and scores go."""

    keys: Int64
    values: Int64  # 0 where scores are not wanted
    table: Int64  # 0 where key indices are wanted and not slots
    scores: Int64
    top_k: Int32


@cute.jit
def _write(output: Output, position: Int32, index: Int32, kept: Boolean | None = None) -> None:
    """A key and, where they are wanted, its score and its slot instead of its index."""
    result = index
    if output.table != 0:
        page = load_global_int(output.table + Int64(index >> PAGE_SHIFT) * 4)
        result = page * PAGE + (index & (PAGE - 1))
    store_global_ints(output.keys + Int64(position) * 4, (result,), kept)
    if output.values != 0:
        score = load_global_int(output.scores + Int64(index) * 4)
        store_global_ints(output.values + Int64(position) * 4, (score,), kept)


@cute.jit
def _pad(output: Output, start: Int32) -> None:
    """-1 and -inf where a row has fewer keys than are wanted."""
    thread, _, _ = cute.arch.thread_idx()
    for position in cutlass.range(start + thread, output.top_k, THREADS, unroll=1):
        store_global_ints(output.keys + Int64(position) * 4, (Int32(-1),))
        if output.values != 0:
            value = Int32(_MINUS_INFINITY)
            store_global_ints(output.values + Int64(position) * 4, (value,))


class Segments(NamedTuple):
    """The segments of a long row."""

    candidates: Int64  # of the first
    bytes: Int64  # of each
    number: Int32
    ends: Int32  # shared memory: candidates up to the end of each
    above: Int32  # scores above the threshold
    ties: Int32  # scores that equal it
    fit: Boolean  # whether every segment had room for its candidates


@cute.jit
def _find_segments(
    addresses: SelectAddresses, sizes: SelectSizes, row: Row, tiles: Int32, shared: Int32
) -> Segments:
    """The segments of a long row, given the tiles of all rows."""
    thread, _, _ = cute.arch.thread_idx()
    words = shared + _WORDS_AT
    ends = shared + _ENDS_AT
    share = tiles // sizes.programs
    extra = tiles - share * sizes.programs
    last_tile = row.start + tiles_of_length(row.length) - 1
    # The first `extra` programs have `share + 1` tiles each.
    wide = extra * (share + 1)
    least = cutlass.max(share, Int32(1))
    first_program = cutlass.select_(
        row.start < wide, row.start // (share + 1), extra + (row.start - wide) // least
    )
    last_program = cutlass.select_(
        last_tile < wide, last_tile // (share + 1), extra + (last_tile - wide) // least
    )
    number = last_program - first_program + 1
    first = first_program + row.row
    above = []
    found = Int32(0)
    ties = Int32(0)
    for i in cutlass.range_constexpr(_OF_THREAD):
        segment = thread * _OF_THREAD + i
        inside = segment < number
        at = first + cutlass.select_(inside, segment, Int32(0))
        counted = load_global_ints(addresses.counts + Int64(at) * 8, 2)
        above.append(cutlass.select_(inside, counted[0], Int32(0)))
        found += above[i]
        ties += cutlass.select_(inside, counted[1], Int32(0))
    most = above[0]
    for each in above[1:]:
        most = cutlass.max(most, each)
    through = sum_up_to_lane(found)
    of_warps, total = sums_of_warps(cute.arch.shuffle_sync(through, WARP - 1), words)
    end = of_warps + through - found
    for i in cutlass.range_constexpr(_OF_THREAD):
        end += above[i]
        store_shared_int(ends + (thread * _OF_THREAD + i) * 4, end)
    _, all_ties = sums_of_warps(sum_of_warp(ties), words + WORDS_BYTES // 2)
    cute.arch.sync_threads()
    overflows = Int32(most > sizes.capacity)
    _, all_overflows = sums_of_warps(sum_of_warp(overflows), words)
    segment_bytes = Int64(sizes.capacity) * 8
    return Segments(
        addresses.candidates + Int64(first) * segment_bytes,
        segment_bytes,
        number,
        ends,
        total,
        all_ties,
        all_overflows == 0,
    )


@cute.jit
def _load_candidates(segments: Segments, shared: Int32) -> None:
    """Bring the order keys and key indices of a row's candidates to shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    count = segments.above
    share = (count + (THREADS - 1)) // THREADS * WARP
    first = (thread >> 5) * share
    end = cutlass.min(first + share, count)
    if first < end:
        # The segment of the first: how many end at or before it.
        number = cutlass.min(first + lane, end - 1)
        segment = Int32(0)
        step = Int32(1) << (31 - leading_zeros(segments.number))
        while step > 0:
            probe = segment + step
            inside = probe < segments.number
            at = load_shared_int(segments.ends + cutlass.select_(inside, probe - 1, Int32(0)) * 4)
            segment = cutlass.select_(inside & (at <= number), probe, segment)
            step >>= 1
        until = load_shared_int(segments.ends + segment * 4)
        for i in cutlass.range(first + lane, end, WARP, unroll=1):
            while until <= i:
                segment += 1
                until = load_shared_int(segments.ends + segment * 4)
            begin = load_shared_int(segments.ends + cutlass.max(segment - 1, Int32(0)) * 4)
            begin = cutlass.select_(segment > 0, begin, Int32(0))
            source = segments.candidates + Int64(segment) * segments.bytes + Int64(i - begin) * 8
            target = shared + i * 4
            copy_int_to_shared(target + _INDICES_AT, source)
            copy_int_to_shared(target, source + 4)
    end_of_copies()
    wait_for_copies(0)
    cute.arch.sync_threads()


class Marks(NamedTuple):
    """The bits of a long row, and how many there are."""

    above: Int64
    ties: Int64
    first: Int32  # this thread's first word, the others follow
    end: Int32
    above_before: Int32  # bits of the threads before this one
    ties_before: Int32


def _count_bits(word: Int32) -> Int32:
    return Int32(cute.arch.popc(word))


def _sum_before(value: Int32, shared: Int32) -> Int32:
    """Of a number of every thread: the sum over the threads before this one."""
    through = sum_up_to_lane(value)
    before, _ = sums_of_warps(cute.arch.shuffle_sync(through, WARP - 1), shared)
    return before + through - value


@cute.jit
def _count_marks(
    addresses: SelectAddresses, words: Int32, row: Int32, length: Int32, shared: Int32
) -> Marks:
    """Count the bits of a long row."""
    thread, _, _ = cute.arch.thread_idx()
    start = Int64(row) * Int64(words) * 4
    every = (length + (WARP - 1)) >> 5
    share = (every + (THREADS - 1)) // THREADS
    first = cutlass.min(thread * share, every)
    end = cutlass.min(first + share, every)
    above = Int32(0)
    ties = Int32(0)
    for i in cutlass.range(first, end, unroll=4):
        above += _count_bits(load_global_int(addresses.above + start + Int64(i) * 4))
        ties += _count_bits(load_global_int(addresses.ties + start + Int64(i) * 4))
    above_before = _sum_before(above, shared)
    ties_before = _sum_before(ties, shared + WORDS_BYTES // 2)
    return Marks(
        addresses.above + start,
        addresses.ties + start,
        first,
        end,
        above_before,
        ties_before,
    )


@cute.jit
def _write_marks(output: Output, marks: Marks, wanted: Int32) -> None:
    """Write what is above the threshold, and the first `wanted` of what equals it."""
    above = marks.above_before
    ties = marks.ties_before
    for i in cutlass.range(marks.first, marks.end, unroll=1):
        is_above = load_global_int(marks.above + Int64(i) * 4)
        is_tied = load_global_int(marks.ties + Int64(i) * 4)
        word = is_above | is_tied
        while word != 0:
            bit = word & -word
            word &= word - 1
            tied = (is_tied & bit) != 0
            if not tied or ties < wanted:
                _write(
                    output,
                    above + cutlass.min(ties, wanted),
                    i * WARP + _count_bits(bit - 1),
                )
            ties += Int32(tied)
            above += 1 - Int32(tied)


@cute.jit
def _load_part(scores: Int64, start: Int32, count: Int32, shared: Int32) -> None:
    """Bring consecutive scores of a row to shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    source = scores + Int64(start) * 4
    if source & 15 == 0:
        for i in cutlass.range(thread * _QUAD, count, _QUAD * THREADS, unroll=4):
            size = cutlass.min(count - i, Int32(_QUAD)) * 4
            copy_to_shared(shared + i * 4, source + Int64(i) * 4, size)
    else:
        for i in cutlass.range(thread, count, THREADS, unroll=4):
            copy_int_to_shared(shared + i * 4, source + Int64(i) * 4)
    end_of_copies()
    wait_for_copies(0)
    cute.arch.sync_threads()


@cute.jit
def _write_part(
    output: Output,
    indices: Int32,
    start: Int32,
    count: Int32,
    search: Search,
    taken: Taken,
    shared: Int32,
) -> Taken:
    """Write what reaches the k-th largest of order keys in shared memory.

    Their key indices are at the address `indices` or, where that is 0, consecutive from `start` on.
    Gives how many were taken by then.
    """
    thread, _, _ = cute.arch.thread_idx()
    # Exactly `k` reach the lower end, or the first of those that equal it are taken.
    exact = search.reached == output.top_k
    threshold = cutlass.select_(exact, search.low - 1, search.low)
    most_ties = cutlass.select_(exact, Int32(0), output.top_k - search.above)
    share = (count + (THREADS - 1)) // THREADS * WARP
    first = (thread >> 5) * share
    run = Run(shared + first * 4, cutlass.max(cutlass.min(share, count - first), Int32(0)))
    counts = count_taken(run, threshold)
    before, every = sums_of_warps(counts, shared + _WORDS_AT)
    store = functools.partial(_store, output, indices, start, first)
    place(run, threshold, taken.after(before), counts, most_ties, store)
    return taken.after(every)


@cute.jit
def _store(
    output: cutlass.Constexpr[Output],
    indices: Int32,
    start: Int32,
    first: Int32,
    number: Int32,
    position: Int32,
    kept: Boolean,
) -> None:
    index = start + first + number
    if indices != 0:
        index = load_shared_int(indices + cutlass.select_(kept, first + number, Int32(0)) * 4)
    _write(output, position, cutlass.select_(kept, index, Int32(0)), kept)


@cute.jit
def _select_of_all(output: Output, length: Int32, shared: Int32) -> None:
    """Write the top-k of all scores of a row, which are more than shared memory holds."""
    address = shared + _SEARCH_AT
    extremes = no_extremes()
    for start in cutlass.range(0, length, TILE, unroll=1):
        count = cutlass.min(length - start, Int32(TILE))
        _load_part(output.scores, start, count, shared)
        extremes = with_extremes(extremes, shared, count, True)
        cute.arch.sync_threads()
    search = start_of_search(extremes, length, address)
    while is_open(search, output.top_k, Int32(0)):
        clear_bins(address)
        for start in cutlass.range(0, length, TILE, unroll=1):
            count = cutlass.min(length - start, Int32(TILE))
            _load_part(output.scores, start, count, shared)
            with_extremes(no_extremes(), shared, count, True)
            count_into_bins(search, shared, count, address)
            cute.arch.sync_threads()
        search = narrowed(search, output.top_k, address)
        cute.arch.sync_threads()
    taken = Taken(Int32(0), Int32(0))
    for start in cutlass.range(0, length, TILE, unroll=1):
        count = cutlass.min(length - start, Int32(TILE))
        _load_part(output.scores, start, count, shared)
        with_extremes(no_extremes(), shared, count, True)
        cute.arch.sync_threads()
        taken = _write_part(output, Int32(0), start, count, search, taken, shared)
        cute.arch.sync_threads()


@cute.kernel
def finish_kernel(addresses: SelectAddresses, sizes: SelectSizes) -> None:
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
    launch_dependents()
    wait_for_prerequisites()
    rows = Rows(addresses.context_lengths, sizes.rows, sizes.rows_per_group, sizes.max_context)
    found, tiles = find_row(rows, row, shared + _WORDS_AT)
    length = found.length
    scores = addresses.scores + Int64(row) * sizes.score_stride
    table = Int64(0)
    if addresses.block_table != 0 and length > 0:
        request = load_global_int(addresses.requests + Int64(row // sizes.rows_per_group) * 4)
        table = addresses.block_table + Int64(request) * sizes.table_stride
    values = Int64(0)
    if addresses.top_scores != 0:
        values = addresses.top_scores + Int64(row) * sizes.top_scores_stride
    keys = addresses.top_keys + Int64(row) * sizes.top_keys_stride
    output = Output(keys, values, table, scores, sizes.top_k)
    if length <= sizes.top_k:
        for index in cutlass.range(thread, length, THREADS, unroll=4):
            _write(output, Int32(index), Int32(index))
        _pad(output, length)
    else:
        count = length
        indices = Int32(0)
        answered = Int32(0)
        if length <= DIRECT:
            _load_part(scores, Int32(0), length, shared)
        else:
            segments = _find_segments(addresses, sizes, found, tiles, shared)
            count = segments.above
            indices = shared + _INDICES_AT
            if segments.fit and count >= sizes.top_k and count <= TILE:
                _load_candidates(segments, shared)
            else:
                answered = Int32(1)
                if count < sizes.top_k and sizes.top_k <= count + segments.ties:
                    cute.arch.sync_threads()
                    words = shared + _WORDS_AT
                    marks = _count_marks(addresses, sizes.words, row, length, words)
                    _write_marks(output, marks, sizes.top_k - count)
                else:
                    _select_of_all(output, length, shared)
        if answered == 0:
            search = find_rank(
                shared, count, sizes.top_k, Int32(0), shared + _SEARCH_AT, are_bits=indices == 0
            )
            cute.arch.sync_threads()
            none = Taken(Int32(0), Int32(0))
            _write_part(output, indices, Int32(0), count, search, none, shared)


@cute.jit
def launch_finish(addresses: SelectAddresses, sizes: SelectSizes) -> None:
    finish_kernel(addresses, sizes).launch(
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        smem=FINISH_SHARED_BYTES,
        min_blocks_per_mp=CTAS_PER_SM,
        preferred_smem_carveout=SHARED_PERCENT,
    )
