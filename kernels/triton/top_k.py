"""The kernels of `select_top_k`: a sampled threshold, candidates, and their exact top-k.

Scores are compared by their *order key*, an int32: the bits of the float32, with the lower 31
turned over for negative numbers. -0 gets the key of +0 and NaN the least int32, below that of -inf.

**Shares.** Rows of more than `DIRECT` scores are cut into tiles of `TILE`. Row by row they are one
list, and every program of `collect_kernel` takes an equal contiguous share of it. What a program
has of a row is a *segment*. Along the list either the program or the row goes up by one, so
``program + row`` numbers the segments without gaps between a row's own.

**Candidates** (`collect_kernel`). A program samples each row of its share, at most `SAMPLE` scores,
one at a pseudo-random index of every interval of equal length. The threshold is the sample's
``r``-th largest, ``r`` being what `k` comes to in the sample and 3.5 standard deviations more. The
scores above it, and the first `k` equal to it, go to the segment's own part of the workspace in
ascending key index. Nothing is decided by an atomic, so a run is like any other.

**Selection** (`finish_kernel`), a program a row. The k-th largest of the candidates is found by
digits of two bits, whose counts one packed sum gives, and what reaches it is written in ascending
key index by a prefix sum. Where the sample has misled (too few candidates, or more in a segment
than it has room for) and where a row has at most `DIRECT` scores, the candidates are all scores of
the row: slower, and as exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCAN = tl.constexpr(1024)  # rows looked at at a time
SEGMENTS = tl.constexpr(512)  # of a row, at most: as many as programs
_LEAST = tl.constexpr(-(2**31))
_LOWER = tl.constexpr(2**31 - 1)
_TIE = tl.constexpr(2**16)  # counts ties in the upper half of a word, others in the lower

NOT_SPECIALIZED = [
    "scores_ptr",
    "lengths_ptr",
    "keys_ptr",
    "values_ptr",
    "table_ptr",
    "requests_ptr",
    "counts_ptr",
    "ends_ptr",
    "found_keys_ptr",
    "found_scores_ptr",
    "rows",
    "rows_per_group",
    "max_context",
    "k",
    "capacity",
    "programs",
    "scores_stride",
    "keys_stride",
    "values_stride",
    "table_stride",
]


@triton.jit
def _order_keys(scores):
    bits = scores.to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & _LOWER)
    keys = tl.where(bits == _LEAST, 0, keys)
    return tl.where((bits & _LOWER) > 0x7F800000, _LEAST, keys)


@triton.jit
def _row_length(lengths_ptr, row, rows, rows_per_group, max_context):
    length = tl.load(lengths_ptr + row // rows_per_group, mask=row < rows, other=0)
    return tl.minimum(tl.maximum(length, 0), max_context)


@triton.jit
def _tiles_of(length, TILE: tl.constexpr, DIRECT: tl.constexpr):
    return tl.where(length > DIRECT, (length - 1) // TILE + 1, 0)


@triton.jit
def _tiles(
    lengths_ptr,
    row,
    rows,
    rows_per_group,
    max_context,
    TILE: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Tiles of each of `row`."""
    length = _row_length(lengths_ptr, row, rows, rows_per_group, max_context)
    return _tiles_of(length, TILE, DIRECT)


@triton.jit
def _count_digits(bits, live, shift):
    """How many live ones have 3, 2 and 1 in the two bits at `shift`: one sum of packed counts."""
    digit = (bits >> shift) & 3
    packed = (digit == 3).to(tl.int64)
    packed += (digit == 2).to(tl.int64) << 20
    packed += (digit == 1).to(tl.int64) << 40
    packed = tl.sum(tl.where(live, packed, 0), 0)
    field = (1 << 20) - 1
    return (
        (packed & field).to(tl.int32),
        ((packed >> 20) & field).to(tl.int32),
        (packed >> 40).to(tl.int32),
    )


@triton.jit
def _narrow(threes, twos, ones, left, need):
    """The digit that holds the `need`-th from the top: itself, its count, and those above it."""
    upper = threes + twos
    most = upper + ones
    digit = tl.where(need <= threes, 3, tl.where(need <= upper, 2, tl.where(need <= most, 1, 0)))
    count = tl.where(digit == 3, threes, tl.where(digit == 2, twos, ones))
    above = tl.where(digit == 3, 0, tl.where(digit == 2, threes, tl.where(digit == 1, upper, most)))
    return digit, tl.where(digit == 0, left - most, count), above


@triton.jit
def _sample_threshold(scores, length, k, SAMPLE: tl.constexpr):
    """An order key that in all likelihood at least `k` scores of a row reach, and few more."""
    index = tl.arange(0, SAMPLE)
    interval = length // SAMPLE
    # A hash's upper 15 bits choose within the interval, so that no period of the keys matters.
    jitter = ((((index * 40503) & 0xFFFF) >> 1) * (interval & 0x7FFF)) >> 15
    keys = _order_keys(tl.load(scores + index.to(tl.int64) * interval + jitter))
    digits = keys ^ _LEAST
    wanted = k.to(tl.float32) * SAMPLE / length.to(tl.float32)
    need = tl.minimum((wanted + 3.5 * tl.sqrt(wanted) + 2.0).to(tl.int32), SAMPLE)
    slack = (need >> 5) + 1  # how many too many are worth another digit
    prefix = 0
    fixed = 0  # bits that are decided
    shift = 30
    count = SAMPLE
    while shift >= 0:
        live = ((digits ^ prefix) & fixed) == 0
        threes, twos, ones = _count_digits(digits, live, shift)
        chosen, count, above = _narrow(threes, twos, ones, count, need)
        need -= above
        prefix = prefix | (chosen << shift)
        fixed = fixed | (3 << shift)
        shift -= 2
        if count - need <= slack:
            shift = -1
    return prefix ^ _LEAST


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def collect_kernel(
    scores_ptr,  # float32 [rows, max_context]
    lengths_ptr,  # int32 [groups]
    counts_ptr,  # int32 [programs + rows]: candidates of a segment
    found_keys_ptr,  # int32 [programs + rows, capacity]
    found_scores_ptr,  # float32 [programs + rows, capacity]
    rows,
    rows_per_group,
    max_context,
    k,
    capacity,
    scores_stride: tl.int64,
    TILE: tl.constexpr,
    DIRECT: tl.constexpr,
    SAMPLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    scan = tl.arange(0, SCAN)
    total = 0
    for first in range(0, rows, SCAN):
        total += tl.sum(
            _tiles(lengths_ptr, first + scan, rows, rows_per_group, max_context, TILE, DIRECT), 0
        )
    share = total // tl.num_programs(0)
    extra = total - share * tl.num_programs(0)
    start = program * share + tl.minimum(program, extra)
    todo = share + (program < extra).to(tl.int32)

    # The row of tile `start`, and how many tiles are before that row.
    row = program * 0
    passed = row
    base = row
    for first in range(0, rows, SCAN):
        tiles = _tiles(lengths_ptr, first + scan, rows, rows_per_group, max_context, TILE, DIRECT)
        ends = base + tl.cumsum(tiles, 0)
        before = (ends <= start) & (first + scan < rows)
        row += tl.sum(before.to(tl.int32), 0)
        passed += tl.sum(tl.where(before, tiles, 0), 0)
        base += tl.sum(tiles, 0)
    tile = start - passed
    index = tl.arange(0, TILE)
    while todo > 0:
        length = _row_length(lengths_ptr, row, rows, rows_per_group, max_context)
        steps = tl.minimum(_tiles_of(length, TILE, DIRECT) - tile, todo)
        if steps > 0:
            scores = scores_ptr + row.to(tl.int64) * scores_stride
            threshold = _sample_threshold(scores, length, k, SAMPLE)
            segment = (program + row).to(tl.int64)
            found_keys = found_keys_ptr + segment * capacity
            found_scores = found_scores_ptr + segment * capacity
            count = 0
            ties = 0
            for step in range(steps):
                key = (tile + step) * TILE + index
                values = tl.load(scores + key, mask=key < length, other=0.0)
                keys = _order_keys(values)
                above = (keys > threshold) & (key < length)
                tied = (keys == threshold) & (key < length)
                both = above.to(tl.int32) + tied.to(tl.int32) * _TIE
                through = tl.cumsum(both, 0)
                whole = tl.sum(both, 0)
                ties_before = (through >> 16) - tied.to(tl.int32)
                kept = above | (tied & (ties_before < k - ties))
                above_before = (through & (_TIE - 1)) - above.to(tl.int32)
                slot = count + above_before + tl.minimum(ties_before, k - ties)
                kept = kept & (slot < capacity)
                tl.store(found_keys + slot, key, mask=kept)
                tl.store(found_scores + slot, values, mask=kept)
                new_ties = tl.minimum(whole >> 16, k - ties)
                count += (whole & (_TIE - 1)) + new_ties
                ties += new_ties
            tl.store(counts_ptr + segment, count)
            todo -= steps
        row += 1
        tile = 0


@triton.jit
def _locate(
    number,
    direct,
    ends,
    segments,
    first_segment,
    capacity,
    scores,
    found_keys_ptr,
    found_scores_ptr,
    valid,
):
    """Key index and score of a row's candidates of these numbers."""
    if direct:
        key = number
        values = tl.load(scores + number, mask=valid, other=0.0)
    else:
        # The segment: how many end at or before the number.
        step = 1
        while step * 2 <= segments:
            step *= 2
        segment = number * 0
        while step > 0:
            probe = segment + step
            end = tl.load(ends + probe - 1, mask=probe < segments, other=_LOWER)
            segment = tl.where(end <= number, probe, segment)
            step = step // 2
        begin = tl.load(ends + segment - 1, mask=segment > 0, other=0)
        at = (first_segment + segment).to(tl.int64) * capacity + (number - begin)
        key = tl.load(found_keys_ptr + at, mask=valid, other=0)
        values = tl.load(found_scores_ptr + at, mask=valid, other=0.0)
    return key, values


@triton.jit
def _write(
    key,
    values,
    valid,
    match_bits,
    fixed,
    prefix,
    equal_left,
    written,
    keys,
    out_values,
    table,
    SLOTS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Write those that reach the k-th largest; how many, and how many of them are equal to it."""
    masked = (match_bits & fixed) ^ _LEAST
    above = (masked > (prefix ^ _LEAST)) & valid
    tied = (masked == (prefix ^ _LEAST)) & valid
    both = above.to(tl.int32) + tied.to(tl.int32) * _TIE
    through = tl.cumsum(both, 0)
    whole = tl.sum(both, 0)
    ties_before = (through >> 16) - tied.to(tl.int32)
    above_before = (through & (_TIE - 1)) - above.to(tl.int32)
    kept = above | (tied & (ties_before < equal_left))
    position = written + above_before + tl.minimum(ties_before, equal_left)
    result = key
    if SLOTS:
        page = tl.load(table + (key >> 6), mask=kept, other=0)
        result = page * 64 + (key & 63)
    tl.store(keys + position, result, mask=kept)
    if VALUES:
        tl.store(out_values + position, values, mask=kept)
    new_ties = tl.minimum(whole >> 16, equal_left)
    return (whole & (_TIE - 1)) + new_ties, new_ties


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def finish_kernel(
    scores_ptr,  # float32 [rows, max_context]
    lengths_ptr,  # int32 [groups]
    keys_ptr,  # int32 [rows, k]
    values_ptr,  # float32 [rows, k]
    table_ptr,  # int32 [requests, blocks]
    requests_ptr,  # int32 [groups]
    counts_ptr,  # int32 [programs + rows]
    ends_ptr,  # int32 [programs + rows]: candidates of a row up to the end of a segment
    found_keys_ptr,  # int32 [programs + rows, capacity]
    found_scores_ptr,  # float32 [programs + rows, capacity]
    rows,
    rows_per_group,
    max_context,
    k,
    capacity,
    programs,  # of collect_kernel
    scores_stride: tl.int64,
    keys_stride: tl.int64,
    values_stride: tl.int64,
    table_stride: tl.int64,
    SLOTS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    DIRECT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    group = row // rows_per_group
    length = _row_length(lengths_ptr, row, rows, rows_per_group, max_context)
    scores = scores_ptr + row.to(tl.int64) * scores_stride
    direct = length <= DIRECT
    total = length
    segments = 0
    first_segment = 0
    ends = ends_ptr
    if length > DIRECT:
        scan = tl.arange(0, SCAN)
        all_tiles = 0
        before = 0
        for first in range(0, rows, SCAN):
            tiles = _tiles(
                lengths_ptr, first + scan, rows, rows_per_group, max_context, TILE, DIRECT
            )
            all_tiles += tl.sum(tiles, 0)
            before += tl.sum(tl.where(first + scan < row, tiles, 0), 0)
        share = all_tiles // programs
        extra = all_tiles - share * programs
        # The first `extra` programs have `share + 1` tiles each.
        wide = extra * (share + 1)
        last = before + _tiles_of(length, TILE, DIRECT) - 1
        least = tl.maximum(share, 1)
        first_program = tl.where(
            before < wide, before // (share + 1), extra + (before - wide) // least
        )
        last_program = tl.where(last < wide, last // (share + 1), extra + (last - wide) // least)
        segments = last_program - first_program + 1
        first_segment = first_program + row
        ends = ends_ptr + first_segment
        segment = tl.arange(0, SEGMENTS)
        counts = tl.load(counts_ptr + first_segment + segment, mask=segment < segments, other=0)
        through = tl.cumsum(counts, 0)
        tl.store(ends + segment, through, mask=segment < segments)
        tl.debug_barrier()
        found = tl.sum(counts, 0)
        overflow = tl.max(counts, 0) > capacity
        direct = overflow | (found < tl.minimum(k, length))
        total = tl.where(direct, length, found)

    number = tl.arange(0, BLOCK)
    valid = number < total
    key, values = _locate(
        number,
        direct,
        ends,
        segments,
        first_segment,
        capacity,
        scores,
        found_keys_ptr,
        found_scores_ptr,
        valid,
    )
    order = _order_keys(values)
    bits = order ^ _LEAST  # compared as unsigned numbers, digit by digit
    wanted = tl.minimum(k, total)
    need = wanted
    prefix = 0
    fixed = 0
    shift = -1
    count = total
    if total > k:
        # Begin with the highest bit in which the candidates differ.
        most = tl.max(tl.where(valid, order, _LEAST), 0)
        least_order = tl.min(tl.where(valid, order, _LOWER), 0)
        for first in range(BLOCK, total, BLOCK):
            more = first + number
            _, other = _locate(
                more,
                direct,
                ends,
                segments,
                first_segment,
                capacity,
                scores,
                found_keys_ptr,
                found_scores_ptr,
                more < total,
            )
            other = _order_keys(other)
            most = tl.maximum(most, tl.max(tl.where(more < total, other, _LEAST), 0))
            least_order = tl.minimum(least_order, tl.min(tl.where(more < total, other, _LOWER), 0))
        difference = most ^ least_order
        exponent = (difference.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        shift = tl.where(difference < 0, 30, tl.minimum(tl.maximum(exponent - 1, 0), 30))
        if shift < 30:
            fixed = -1 << (shift + 2)
            prefix = (most ^ _LEAST) & fixed
        if difference == 0:
            fixed = -1
            prefix = most ^ _LEAST
            shift = -1
    while shift >= 0:
        live = valid & (((bits ^ prefix) & fixed) == 0)
        threes, twos, ones = _count_digits(bits, live, shift)
        for first in range(BLOCK, total, BLOCK):
            more = first + number
            _, other = _locate(
                more,
                direct,
                ends,
                segments,
                first_segment,
                capacity,
                scores,
                found_keys_ptr,
                found_scores_ptr,
                more < total,
            )
            other_bits = _order_keys(other) ^ _LEAST
            live = (more < total) & (((other_bits ^ prefix) & fixed) == 0)
            more_threes, more_twos, more_ones = _count_digits(other_bits, live, shift)
            threes += more_threes
            twos += more_twos
            ones += more_ones
        chosen, count, above = _narrow(threes, twos, ones, count, need)
        need -= above
        prefix = prefix | (chosen << shift)
        fixed = fixed | (3 << shift)
        done = (count == need) | (shift == 0)
        shift = tl.where(done, -1, tl.maximum(shift - 2, 0))

    # Above the prefix all are taken, of those equal to it the first `need`.
    keys = keys_ptr + row.to(tl.int64) * keys_stride
    out_values = values_ptr + row.to(tl.int64) * values_stride
    table = table_ptr
    if SLOTS:
        request = tl.load(requests_ptr + group, mask=length > 0, other=0)
        table = table_ptr + request.to(tl.int64) * table_stride
    written, ties = _write(
        key,
        values,
        valid,
        bits,
        fixed,
        prefix,
        need,
        0,
        keys,
        out_values,
        table,
        SLOTS,
        VALUES,
    )
    for first in range(BLOCK, total, BLOCK):
        more = first + number
        key, values = _locate(
            more,
            direct,
            ends,
            segments,
            first_segment,
            capacity,
            scores,
            found_keys_ptr,
            found_scores_ptr,
            more < total,
        )
        new, new_ties = _write(
            key,
            values,
            more < total,
            _order_keys(values) ^ _LEAST,
            fixed,
            prefix,
            need - ties,
            written,
            keys,
            out_values,
            table,
            SLOTS,
            VALUES,
        )
        written += new
        ties += new_ties
    for first in range(wanted, k, BLOCK):
        past = first + number
        tl.store(keys + past, -1, mask=past < k)
        if VALUES:
            tl.store(out_values + past, float("-inf"), mask=past < k)
