"""`indexer_threshold_select`: the keys that reach a row's threshold, and an exact repair.

Scores of a few tiles at a time are computed by `indexer_scores` into a bounded workspace, in groups
of up to 8 rows that see as many keys as the longest of them; what a row does not see is masked.
Then, for every row,

    above, equal, unordered  =  score > t,  score == t,  neither (NaN)
    the n-th above           -> slot top_k + n
    the n-th equal           -> slot top_k - 1 - n, and after the last of them the unordered ones

in ascending key index, so that the result is the same in every run. On a GPU nothing reads device
values on the host: the shapes depend on `max_context` alone, and so does the time of the selection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sdsa_kernels.scores import indexer_scores
from sdsa_quant.layout import MAX_ROWS

from .checks import TILE_ROWS, check_threshold_select

# Scores in the workspace at a time, 4 bytes each; a selection takes about 5 times as many bytes.
_CPU_SCORES = 1 << 22
_CUDA_SCORES = 1 << 26


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Keys of some rows on either side of their thresholds, in the order of their slots."""

    above: torch.Tensor  # int64 [rows, capacity], past the count anything
    ties: torch.Tensor  # int64 [rows, top_k]
    above_count: torch.Tensor  # int64 [rows]
    tie_count: torch.Tensor  # int64 [rows], equal and unordered ones
    fits: torch.Tensor  # bool [rows]


def indexer_threshold_select(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    row_ends: torch.Tensor,
    tile_requests: torch.Tensor,
    block_table: torch.Tensor,
    *,
    thresholds: torch.Tensor,
    counters: torch.Tensor,
    candidates: torch.Tensor,
    max_context: int,
    top_k: int,
    query_scales: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
    ranges: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """The keys of each row with ``query[q] . key[k] > thresholds[q]``, and those that tie with it.

    The names, the order and the meaning of the arguments are those of
    ``flashinfer.sdsa.indexer_threshold_select``. Beyond it, any number of rows, NVFP4 keys with
    BF16 query rows, CPU tensors and every GPU from SM80 on are accepted, and pairs have a fixed
    order. A key whose score is NaN, or any key where the threshold is NaN, counts as a tie.

    A row *fits* where its candidates fit the capacity and its first `top_k` keys of the order of
    selections are among its pairs. With `arrivals` and `ranges` every other row is selected again
    at its exact ``min(row_ends[r], top_k)``-th largest score, which makes it fit where the capacity
    is at least ``top_k - 1``.

    Parameters
    ----------
    query, key_cache, query_scales, key_scales
        As in `indexer_scores`; query rows come in tiles of 128, of which the last may be short.
    row_ends : torch.Tensor
        Input, int32 ``[rows]``: row ``r`` sees keys below ``row_ends[r]``, clamped to
        `max_context`.
    tile_requests : torch.Tensor
        Input, int32 ``[tiles]``: each tile's row of `block_table`.
    block_table : torch.Tensor
        Input, int32 ``[requests, blocks]``, page numbers.
    thresholds : torch.Tensor
        Input, float32 ``[rows]``; a row that is selected again gets its new threshold.
    counters : torch.Tensor
        Output, int32 ``[rows, 2]``, zeroed by the caller: numbers of candidates and of ties, which
        may exceed the slots for them.
    candidates : torch.Tensor
        Output, int32 ``[rows, top_k + capacity, 2]``: pairs of a key and the bits of its float32
        score. The n-th candidate is at ``top_k + n`` for n below the capacity, the n-th tie at
        ``top_k - 1 - n`` for n below `top_k`; other slots are left as they are. Where
        ``score - threshold`` is exact for every pair of a row, its pairs hold that instead of the
        score, which is the same order.
    max_context : int
        Most keys that a row sees; the block table has columns for them.
    top_k : int
        Keys to select in a row, 1 to 65,535.
    arrivals : torch.Tensor, optional
        int32 ``[tiles]``, zeroed once; left as it is.
    ranges : torch.Tensor, optional
        Output, int32 ``[2, rows]``: first and past-last slot of each row's pairs.
    backend : str, optional
        What computes the scores, as in `indexer_scores`.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride, alignment, device or number is wrong, or scales are missing.
    RuntimeError
        No backend, or not the one asked for, can serve this call on this machine.
    """
    check_threshold_select(
        query,
        row_ends,
        tile_requests,
        block_table,
        thresholds,
        counters,
        candidates,
        max_context,
        top_k,
        query_scales,
        arrivals,
        ranges,
    )
    rows = query.shape[0]
    with torch.inference_mode():
        ends = row_ends.clamp(0, max_context)
        width = max_context
        if query.device.type == "cpu":
            width = int(ends.max()) if rows else 0
        room = _CUDA_SCORES if query.device.type == "cuda" else _CPU_SCORES
        step = max(1, room // (TILE_ROWS * max(width, 1))) * TILE_ROWS
        for start in range(0, max(rows, 1), step):
            part = slice(start, min(start + step, rows))
            tiles = tile_requests[start // TILE_ROWS :]
            scores = torch.empty(
                (part.stop - start, width), dtype=torch.float32, device=query.device
            )
            _score(query, key_cache, ends, tiles, block_table, query_scales, key_scales, part,
                   scores, backend)  # fmt: skip
            _select(
                scores,
                ends[part],
                thresholds[part],
                counters[part],
                candidates[part],
                None if ranges is None else ranges[:, part],
                top_k,
            )


def _score(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    ends: torch.Tensor,
    tiles: torch.Tensor,
    block_table: torch.Tensor,
    query_scales: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    part: slice,
    scores: torch.Tensor,
    backend: str | None,
) -> None:
    """Scores of a range of rows, in groups that see what the longest of their rows sees."""
    rows = part.stop - part.start
    rows_per_group = math.gcd(rows, MAX_ROWS) or 1
    groups = rows // rows_per_group
    indexer_scores(
        query[part],
        key_cache,
        block_table,
        ends[part].view(groups, rows_per_group).amax(1) if groups else ends[part],
        requests=tiles.repeat_interleave(TILE_ROWS // rows_per_group)[:groups].contiguous(),
        scores=scores,
        query_scales=None if query_scales is None else query_scales[part],
        key_scales=key_scales,
        backend=backend,
    )


def _select(
    scores: torch.Tensor,
    ends: torch.Tensor,
    thresholds: torch.Tensor,
    counters: torch.Tensor,
    candidates: torch.Tensor,
    ranges: torch.Tensor | None,
    top_k: int,
) -> None:
    """Write thresholds, counters, candidates and ranges of the rows of some scores."""
    rows, width = scores.shape
    if not rows:
        return
    capacity = candidates.shape[1] - top_k
    seen = torch.arange(width, device=scores.device, dtype=torch.int64) < ends[:, None]
    pairs = _pairs(scores, seen, ends, thresholds, top_k, capacity)
    if ranges is not None and (scores.device.type != "cpu" or not bool(pairs.fits.all())):
        kth = _kth_largest(scores, seen, ends, top_k)
        thresholds.copy_(torch.where(pairs.fits, thresholds, kth))
        pairs = _pairs(scores, seen, ends, thresholds, top_k, capacity)
    above = pairs.above_count.clamp(max=capacity)
    ties = pairs.tie_count.clamp(max=top_k)
    counters[:, 0], counters[:, 1] = pairs.above_count, pairs.tie_count
    # [rows, top_k + capacity]: ties from the last of their slots down, then candidates
    keys = torch.cat((pairs.ties.flip(1), pairs.above), dim=1)
    slot = torch.arange(keys.shape[1], device=scores.device, dtype=torch.int64)
    first, past = top_k - ties, top_k + above
    written = (slot >= first[:, None]) & (slot < past[:, None])
    if width:
        stored = scores.gather(1, keys.clamp(max=width - 1))
        stored = _less_the_threshold(stored, thresholds[:, None], written)
        found = torch.stack((keys.int(), stored.view(torch.int32)), dim=2)
        candidates.copy_(torch.where(written[:, :, None], found, candidates))
    if ranges is not None:
        ranges[0], ranges[1] = first, past


def _pairs(
    scores: torch.Tensor,
    seen: torch.Tensor,
    ends: torch.Tensor,
    thresholds: torch.Tensor,
    top_k: int,
    capacity: int,
) -> _Pairs:
    limit = thresholds[:, None]
    above, above_count = _first_keys(seen & (scores > limit), capacity)
    equal, equal_count = _first_keys(seen & (scores == limit), top_k)
    unordered = seen & ~((scores > limit) | (scores == limit) | (scores < limit))
    missing, missing_count = _first_keys(unordered, top_k)
    # The n-th tie: equal ones first, since NaN is below every number.
    index = torch.arange(top_k, device=scores.device, dtype=torch.int64)
    later = (index - equal_count[:, None]).clamp(min=0)
    ties = torch.where(index < equal_count[:, None], equal, missing.gather(1, later))

    wanted = ends.clamp(max=top_k)
    by_order = above_count + equal_count >= wanted
    # All that a row sees is there, and only what is not wanted is left out.
    complete = above_count + equal_count + missing_count == ends
    complete &= ~thresholds.isnan() | (ends <= top_k)
    fits = (above_count <= capacity) & (by_order | complete)
    return _Pairs(above, ties, above_count, equal_count + missing_count, fits)


def _first_keys(mask: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the first `most` true entries of each row, and the number of all of them.

    The n-th is where the running count reaches n: a search that has the same shape whatever the
    mask is. Past a row's number the columns are out of range.
    """
    rows, width = mask.shape
    if not width:
        none = torch.zeros((rows, most), dtype=torch.int64, device=mask.device)
        return none, torch.zeros(rows, dtype=torch.int64, device=mask.device)
    running = mask.cumsum(1, dtype=torch.int32)
    nth = torch.arange(1, most + 1, dtype=torch.int32, device=mask.device)
    columns = torch.searchsorted(running, nth.expand(rows, most).contiguous())
    return columns, running[:, -1].long()


def _kth_largest(
    scores: torch.Tensor, seen: torch.Tensor, ends: torch.Tensor, top_k: int
) -> torch.Tensor:
    """float32 ``[rows]``: the ``min(end, top_k)``-th largest score; NaN counts as -inf."""
    if not scores.shape[1]:
        return scores.new_full((scores.shape[0],), -torch.inf)
    known = scores.masked_fill(~seen | scores.isnan(), -torch.inf)
    best = known.topk(min(top_k, scores.shape[1]), dim=1).values
    last = (ends.clamp(max=top_k).long() - 1).clamp(min=0)
    return best.gather(1, last[:, None])[:, 0]


def _less_the_threshold(
    stored: torch.Tensor, limit: torch.Tensor, written: torch.Tensor
) -> torch.Tensor:
    """``stored - limit`` in the rows where that is exact for all that is written, else `stored`.

    The error of a float64 difference is known exactly (Knuth's two-sum), so that a difference is
    exact where that error is 0 and the difference itself is a float32.
    """
    left, right = stored.double(), limit.double()
    difference = left - right
    subtracted = left - difference
    error = (left - (difference + subtracted)) + (subtracted - right)
    rounded = difference.float()
    exact = (error == 0) & (rounded.double() == difference)
    exact |= stored.isnan() | ~written
    return torch.where(exact.all(1, keepdim=True), rounded, stored)
