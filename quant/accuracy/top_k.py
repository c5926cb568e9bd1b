"""The deterministic top-k: higher scores first and, among equal scores, lower key indices.

`torch.topk` alone picks any of several equal scores. Here it only finds each row's k-th largest
score; the keys that reach it, k and the ties at the boundary, are then put in order by two stable
sorts. NaN is never chosen, and -0.0 equals 0.0.
"""

from __future__ import annotations

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.errors import DtypeError, InputError

# Scores that are worked on at a time: bounds the workspace to about 10 bytes for each of them.
_BLOCK_SCORES = 1 << 22


@checked_arguments
def top_k_indices(
    scores: torch.Tensor, k: int, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Indices of each row's k highest scores, highest first, equal scores by lower index.

    Parameters
    ----------
    scores : torch.Tensor
        Input, floating point ``[rows, keys]``, any device.
    k : int
        How many to choose, at least 1.
    lengths : torch.Tensor, optional
        Input, integers ``[rows]`` on the same device: only a row's first ``lengths[row]`` scores
        are looked at. Every score by default.

    Returns
    -------
    torch.Tensor
        int64 ``[rows, k]``, -1 past a row's last choice where it has fewer than k scores.

    Raises
    ------
    TypeError
        `scores` is not floating point.
    ValueError
        `scores` is not two-dimensional, or `k` is less than 1.
    """
    if not scores.is_floating_point():
        raise DtypeError(f"scores must be floating point, got {scores.dtype}")
    if scores.dim() != 2:
        raise InputError(f"scores must be [rows, keys], got {list(scores.shape)}")
    if k < 1:
        raise InputError(f"k must be at least 1, got {k}")
    rows, keys = scores.shape
    chosen = torch.full((rows, k), -1, dtype=torch.int64, device=scores.device)
    if keys == 0:
        return chosen
    step = max(1, _BLOCK_SCORES // keys)
    for start in range(0, rows, step):
        block = slice(start, start + step)
        _choose(scores[block], None if lengths is None else lengths[block], chosen[block])
    return chosen


def _choose(scores: torch.Tensor, lengths: torch.Tensor | None, chosen: torch.Tensor) -> None:
    """Write the choices of a few rows to `chosen`, which holds -1."""
    k = chosen.shape[1]
    excluded = scores.isnan()
    if lengths is not None:
        columns = torch.arange(scores.shape[1], device=scores.device, dtype=torch.int64)
        excluded |= columns >= lengths[:, None]
    candidates = scores.masked_fill(excluded, -torch.inf)
    kth_largest = candidates.topk(min(k, scores.shape[1]), dim=1).values[:, -1:]
    row, column = ((candidates >= kth_largest) & ~excluded).nonzero(as_tuple=True)

    # nonzero() lists them by row, then by column; the two stable sorts keep that among equals.
    value = candidates[row, column] + 0.0  # -0.0 becomes 0.0, for sorts that order by bits
    order = value.sort(descending=True, stable=True).indices
    order = order[row[order].sort(stable=True).indices]
    row, column = row[order], column[order]

    counts = torch.bincount(row, minlength=scores.shape[0])
    first = counts.cumsum(0) - counts
    index = torch.arange(row.shape[0], device=row.device, dtype=torch.int64) - first[row]
    kept = index < k
    chosen[row[kept], index[kept]] = column[kept]
