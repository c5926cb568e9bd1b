"""The kernels of `select_top_k`: a sampled threshold, candidates, and their exact top-k.

Scores are compared by their *order key*, an int32: the bits of the float32, with the lower 31
turned over for negative numbers. -0 gets the key of +0 and NaN the least int32, below that of -inf.

**Shares.** Rows of more than `DIRECT` scores are cut into tiles of `TILE`. Row by row they are one
list, and every program of `collect_kernel` takes an equal contiguous share of it. What a program
has of a row is a *segment*. Along the list either the program or the row goes up by one, so
``program + row`` numbers the segments without gaps between a row's own.

**Thresholds** (`threshold_kernel` in `thresholds`), a program a row of more than `DIRECT`: `SAMPLE`
of its scores, one at a pseudo-random index of every interval of equal length. The threshold is the
``r``-th largest of them, ``r`` being what `k` comes to in the sample and 3.5 standard deviations
more.

**Candidates** (`collect_kernel`). The scores above the threshold, and the first `k` equal to it, go
to the segment's own part of the workspace in ascending key index. Nothing is decided by an atomic,
so a run is like any other.

**Selection** (`finish_kernel`), a program a row. The k-th largest of the candidates is found by
digits of two bits, whose counts one packed sum gives, and what reaches it is written in ascending
key index by a prefix sum. Where the sample has misled (too few candidates, or more in a segment
than it has room for) and where a row has at most `DIRECT` scores, the candidates are all scores of
the row: slower, and as exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .thresholds import (
    LEAST,
    LOWER,
    NOT_SPECIALIZED,
    count_digits,
    narrow,
    order_keys,
    row_length,
    tiles_of,
)

SCAN = tl.constexpr(1024)  # rows looked at at a time
SEGMENTS = tl.constexpr(512)  # of a row, at most: as many as programs
_TIE = tl.constexpr(2**16)  # counts ties in the upper half of a word, others in the lower


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
    length = row_length(lengths_ptr, row, rows, rows_per_group, max_context)
    return tiles_of(length, TILE, DIRECT)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def collect_kernel(
    scores_ptr,  # float32 [rows, max_context]
    lengths_ptr,  # int32 [groups]
    thresholds_ptr,  # int32 [rows]
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
        length = row_length(lengths_ptr, row, rows, rows_per_group, max_context)
        steps = tl.minimum(tiles_of(length, TILE, DIRECT) - tile, todo)
        if steps > 0:
            scores = scores_ptr + row.to(tl.int64) * scores_stride
            threshold = tl.load(thresholds_ptr + row)
            segment = (program + row).to(tl.int64)
            found_keys = found_keys_ptr + segment * capacity
            found_scores = found_scores_ptr + segment * capacity
            count = 0
            ties = 0
            for step in range(steps):
                key = (tile + step) * TILE + index
                values = tl.load(scores + key, mask=key < length, other=0.0)
                keys = order_keys(values)
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
            end = tl.load(ends + probe - 1, mask=probe < segments, other=LOWER)
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
    masked = (match_bits & fixed) ^ LEAST
    above = (masked > (prefix ^ LEAST)) & valid
    tied = (masked == (prefix ^ LEAST)) & valid
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
    thresholds_ptr,  # int32 [rows]
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
    length = row_length(lengths_ptr, row, rows, rows_per_group, max_context)
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
        last = before + tiles_of(length, TILE, DIRECT) - 1
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
    order = order_keys(values)
    bits = order ^ LEAST  # compared as unsigned numbers, digit by digit
    wanted = tl.minimum(k, total)
    need = wanted
    prefix = 0
    fixed = 0
    shift = -1
    count = total
    if total > k:
        threshold = order * 0
        reached = 0
        passed = 0
        if (total > BLOCK) & (direct == 0):
            # Many candidates are equal to the threshold: is the k-th largest one of those?
            threshold += tl.load(thresholds_ptr + row)
            for first in range(0, total, BLOCK):
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
                other = order_keys(other)
                reached += tl.sum(((other >= threshold) & (more < total)).to(tl.int32), 0)
                passed += tl.sum(((other > threshold) & (more < total)).to(tl.int32), 0)
        if (passed < k) & (reached >= k):
            fixed = -1
            prefix = tl.max(threshold, 0) ^ LEAST
            need = k - passed
        else:
            # Begin with the highest bit in which the candidates differ.
            most = tl.max(tl.where(valid, order, LEAST), 0)
            least_order = tl.min(tl.where(valid, order, LOWER), 0)
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
                other = order_keys(other)
                most = tl.maximum(most, tl.max(tl.where(more < total, other, LEAST), 0))
                least_order = tl.minimum(
                    least_order, tl.min(tl.where(more < total, other, LOWER), 0)
                )
            difference = most ^ least_order
            exponent = (difference.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            shift = tl.where(difference < 0, 30, tl.minimum(tl.maximum(exponent - 1, 0), 30))
            if shift < 30:
                fixed = -1 << (shift + 2)
                prefix = (most ^ LEAST) & fixed
            if difference == 0:
                fixed = -1
                prefix = most ^ LEAST
                shift = -1
    while shift >= 0:
        live = valid & (((bits ^ prefix) & fixed) == 0)
        threes, twos, ones = count_digits(bits, live, shift)
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
            other_bits = order_keys(other) ^ LEAST
            live = (more < total) & (((other_bits ^ prefix) & fixed) == 0)
            more_threes, more_twos, more_ones = count_digits(other_bits, live, shift)
            threes += more_threes
            twos += more_twos
            ones += more_ones
        chosen, count, above = narrow(threes, twos, ones, count, need)
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
            order_keys(values) ^ LEAST,
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
