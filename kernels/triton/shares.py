"""Which pages a program scores: an equal, contiguous share of the pages that the lengths define.

Write the pages of group 0, then those of group 1, and so on as one list. Of its ``total`` pages,
program ``p`` of ``P`` takes ``total // P``, one more if ``p < total % P``, next to each other.
Every program finds its share from the lengths on the device, in the launch that scores:

1. load the lengths, count pages, add them all up: the share begins at page ``start``;
2. a prefix sum gives where each group's pages end; the first group that ends past ``start`` is
   where the share begins, at block ``start`` less the pages of the groups before.

Up to `SCAN` groups that is one load, one prefix sum and a few reductions. Up to `FEW` a single warp
has a group in each lane, so no warp waits for another: every program pays for its share, and small
calls take little longer than that. More groups than `SCAN` are added up and skipped `SKIP` at a
time, so that only one block of `SCAN` is ever looked at closely.

These functions have no layouts and no tensors of their own making, so that the portable kernel and
the Gluon kernel share them: the caller brings the index ranges.
"""

from __future__ import annotations

import triton
import triton.language as tl

FEW = tl.constexpr(32)  # groups that one warp looks at
SCAN = tl.constexpr(256)  # groups looked at closely
SKIP = tl.constexpr(2048)  # groups skipped at a time, where there are more than SCAN
_PAGE_BITS = tl.constexpr(6)

# Arguments of the scoring kernels whose values and alignments make no variants: all but the two
# that every call aligns to 16 bytes.
NOT_SPECIALIZED = [
    "query_scales_ptr",
    "key_scales_ptr",
    "table_ptr",
    "lengths_ptr",
    "requests_ptr",
    "scores_ptr",
    "groups",
    "max_context",
    "rows_per_group",
    "query_stride",
    "query_scale_stride",
    "page_stride",
    "scale_page_stride",
    "table_stride",
    "scores_stride",
]


@triton.jit
def _add(left, right):
    return left + right


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def clamp_length(length, max_context):
    """Keys of a group that are scored: 0 to `max_context`."""
    return tl.minimum(tl.maximum(length, 0), max_context)


@triton.jit
def pages_of(length):
    """Pages that hold `length` keys, 0 or more; written so that no length overflows."""
    return ((length - 1) >> _PAGE_BITS) + 1


@triton.jit
def _load_lengths(lengths_ptr, index, groups, max_context):
    return clamp_length(tl.load(lengths_ptr + index, mask=index < groups, other=0), max_context)


@triton.jit
def _share_of(total):
    """First page and number of pages that this program takes of `total`."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    share = total // programs
    extra = total - share * programs
    start = program * share + tl.minimum(program, extra)
    return start, share + (program < extra).to(tl.int32)


@triton.jit
def _pick(chosen, values):
    """The one of `values` that is chosen; 0 where none is."""
    return tl.sum(tl.where(chosen, values, 0), 0)


@triton.jit
def _find_among_few(lengths_ptr, requests_ptr, groups, max_context, few_index):
    lengths = _load_lengths(lengths_ptr, few_index, groups, max_context)
    requests = tl.load(requests_ptr + few_index, mask=few_index < groups, other=0)
    counts = pages_of(lengths)
    ends = tl.associative_scan(counts, 0, _add)
    start, todo = _share_of(tl.sum(counts, 0))
    begins = ends - counts
    chosen = (begins <= start) & (start < ends)  # one group, and none where todo is 0
    block = start - _pick(chosen, begins)
    return _pick(chosen, few_index), block, _pick(chosen, lengths), _pick(chosen, requests), todo


@triton.jit
def _find_among_many(lengths_ptr, requests_ptr, groups, max_context, scan_index, skip_index):
    lengths = _load_lengths(lengths_ptr, scan_index, groups, max_context)
    requests = tl.load(requests_ptr + scan_index, mask=scan_index < groups, other=0)
    counts = pages_of(lengths)
    here = tl.sum(counts, 0)
    total = here
    if groups > SCAN:
        added = pages_of(_load_lengths(lengths_ptr, skip_index, groups, max_context))
        for first in range(SKIP, groups, SKIP):
            added += pages_of(_load_lengths(lengths_ptr, skip_index + first, groups, max_context))
        total = tl.sum(added, 0)
    start, todo = _share_of(total)

    passed = 0  # pages of the groups before `first`
    first = 0
    if groups > SCAN:
        skipped = tl.sum(pages_of(_load_lengths(lengths_ptr, skip_index, groups, max_context)), 0)
        while (passed + skipped <= start) & (first + SKIP < groups):
            passed += skipped
            first += SKIP
            skip_lengths = _load_lengths(lengths_ptr, skip_index + first, groups, max_context)
            skipped = tl.sum(pages_of(skip_lengths), 0)
        lengths = _load_lengths(lengths_ptr, scan_index + first, groups, max_context)
        counts = pages_of(lengths)
        here = tl.sum(counts, 0)
        while (passed + here <= start) & (first + SCAN < groups):
            passed += here
            first += SCAN
            lengths = _load_lengths(lengths_ptr, scan_index + first, groups, max_context)
            counts = pages_of(lengths)
            here = tl.sum(counts, 0)
        requests = tl.load(
            requests_ptr + scan_index + first, mask=scan_index + first < groups, other=0
        )

    ends = passed + tl.associative_scan(counts, 0, _add)
    index = scan_index + first
    before = (ends <= start) & (index < groups)
    chosen = (ends - counts <= start) & (start < ends)  # one group, and none where todo is 0
    # One reduction of four sums, because each costs the program's warps a meeting.
    place, skipped, length, request = tl.reduce(
        (
            before.to(tl.int32),
            tl.where(before, counts, 0),
            tl.where(chosen, lengths, 0),
            tl.where(chosen, requests, 0),
        ),
        0,
        _add_four,
    )
    return first + place, start - passed - skipped, length, request, todo


@triton.jit
def find_share(lengths_ptr, requests_ptr, groups, max_context, few_index, scan_index, skip_index):
    """Where this program's share begins and how long it is.

    Parameters
    ----------
    lengths_ptr, requests_ptr : pointers to int32 [groups]
    few_index, scan_index, skip_index : int32 ranges up to `FEW`, `SCAN` and `SKIP` in any layouts

    Returns
    -------
    group, block : int32
        First group and its first page (counted within the group).
    length, request : int32
        Clamped length and request of that group.
    todo : int32
        Pages of the share; where it is 0 the other values mean nothing.
    """
    if groups <= FEW:
        group, block, length, request, todo = _find_among_few(
            lengths_ptr, requests_ptr, groups, max_context, few_index
        )
    else:
        group, block, length, request, todo = _find_among_many(
            lengths_ptr, requests_ptr, groups, max_context, scan_index, skip_index
        )
    return group, block, length, request, todo
