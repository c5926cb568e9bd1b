"""The order of scores, digits of their order keys, and thresholds from samples, for `top_k`."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-(2**31))
LOWER = tl.constexpr(2**31 - 1)

# Arguments of the selecting kernels whose values and alignments make no variants: all.
NOT_SPECIALIZED = [
    "scores_ptr",
    "lengths_ptr",
    "keys_ptr",
    "values_ptr",
    "table_ptr",
    "requests_ptr",
    "counts_ptr",
    "ends_ptr",
    "thresholds_ptr",
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
def order_keys(scores):
    bits = scores.to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & LOWER)
    keys = tl.where(bits == LEAST, 0, keys)
    return tl.where((bits & LOWER) > 0x7F800000, LEAST, keys)


@triton.jit
def row_length(lengths_ptr, row, rows, rows_per_group, max_context):
    length = tl.load(lengths_ptr + row // rows_per_group, mask=row < rows, other=0)
    return tl.minimum(tl.maximum(length, 0), max_context)


@triton.jit
def tiles_of(length, TILE: tl.constexpr, DIRECT: tl.constexpr):
    return tl.where(length > DIRECT, (length - 1) // TILE + 1, 0)


@triton.jit
def count_digits(bits, live, shift):
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
def narrow(threes, twos, ones, left, need):
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
    keys = order_keys(tl.load(scores + index.to(tl.int64) * interval + jitter))
    digits = keys ^ LEAST
    wanted = k.to(tl.float32) * SAMPLE / length.to(tl.float32)
    need = tl.minimum((wanted + 3.5 * tl.sqrt(wanted) + 2.0).to(tl.int32), SAMPLE)
    slack = (need >> 5) + 1  # how many too many are worth another digit
    prefix = 0
    fixed = 0  # bits that are decided
    shift = 30
    count = SAMPLE
    while shift >= 0:
        live = ((digits ^ prefix) & fixed) == 0
        threes, twos, ones = count_digits(digits, live, shift)
        chosen, count, above = narrow(threes, twos, ones, count, need)
        need -= above
        prefix = prefix | (chosen << shift)
        fixed = fixed | (3 << shift)
        shift -= 2
        if count - need <= slack:
            shift = -1
    return prefix ^ LEAST


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def threshold_kernel(
    scores_ptr,  # float32 [rows, max_context]
    lengths_ptr,  # int32 [groups]
    thresholds_ptr,  # int32 [rows]: order keys, of rows of more than DIRECT scores
    rows,
    rows_per_group,
    max_context,
    k,
    scores_stride: tl.int64,
    DIRECT: tl.constexpr,
    SAMPLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    length = row_length(lengths_ptr, row, rows, rows_per_group, max_context)
    if length > DIRECT:
        scores = scores_ptr + row.to(tl.int64) * scores_stride
        tl.store(thresholds_ptr + row, _sample_threshold(scores, length, k, SAMPLE))
