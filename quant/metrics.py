"""What quantization costs one query row: the formulas, in float64, over the keys that the row sees.

With scores ``s`` and baseline scores ``b`` of the same n keys:

    relative L2 = |s - b| / |b|                   max abs = max |s - b|
    cosine      = s . b / (|s| |b|)               Spearman = Pearson correlation of the ranks,
                                                  equal scores sharing their average rank
    recall@k    = hits / min(k, n), a hit being a key of top-k(s) whose baseline score reaches the
                  k-th largest of b
    mass@k      = sum over top-k(s) of exp(c b) / sum over top-k(b) of exp(c b), c the softmax scale

A value that its formula leaves undefined (a zero norm, constant scores) is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import InputError
from .top_k import top_k_indices


@dataclass(frozen=True, slots=True)
class TopKAccuracy:
    """How one row's top-k agrees with the baseline's."""

    k: int
    kept: int  # min(k, length)
    recall: float
    mass: float
    chance: float  # recall of a random choice, kept / length
    same_scores: bool  # the chosen keys' baseline scores are the baseline's k largest
    same_set: bool  # the chosen keys are the baseline's, ties broken by lower index
    ties_left_out: int  # keys beyond the k whose baseline score equals the k-th largest


@dataclass(frozen=True, slots=True)
class RowAccuracy:
    """One query row against its baseline.

    A row with a non-finite score or baseline score is invalid: its measures are None and `top_k` is
    empty. So it is with a row of length 0, which has nothing to measure.
    """

    row: int
    request: int
    length: int  # keys
    nonfinite_scores: int
    nonfinite_baseline: int
    relative_l2: float | None = None
    max_abs: float | None = None
    cosine: float | None = None
    spearman: float | None = None
    top_k: tuple[TopKAccuracy, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether every score and every baseline score is finite."""
        return self.nonfinite_scores == 0 and self.nonfinite_baseline == 0


def row_accuracy(
    row: int,
    request: int,
    scores: torch.Tensor,
    baseline: torch.Tensor,
    *,
    top_k: Sequence[int],
    softmax_scale: float,
) -> RowAccuracy:
    """Measure one query row over the keys that it sees.

    Parameters
    ----------
    row, request : int
        What to call the row in a report.
    scores, baseline : torch.Tensor
        Inputs, float32 ``[length]``, same device; `baseline` from the unquantized keys.
    top_k : sequence of int
        The k to measure recall and mass for, each at least 1.
    softmax_scale : float
        What a score is multiplied by before the softmax; positive.

    Raises
    ------
    ValueError
        The two do not have the same one-dimensional shape, or the scale is not positive and finite.
    """
    if scores.dim() != 1 or scores.shape != baseline.shape:
        raise InputError(
            f"scores and baseline must both be [length], got {list(scores.shape)} and "
            f"{list(baseline.shape)}"
        )
    if not (softmax_scale > 0 and math.isfinite(softmax_scale)):
        raise InputError(f"softmax_scale must be positive and finite, got {softmax_scale}")
    length = scores.shape[0]
    nonfinite_scores, nonfinite_baseline = count_nonfinite(scores), count_nonfinite(baseline)
    if length == 0 or nonfinite_scores or nonfinite_baseline:
        return RowAccuracy(row, request, length, nonfinite_scores, nonfinite_baseline)
    wide_scores, wide_baseline = scores.double(), baseline.double()
    difference = wide_scores - wide_baseline
    return RowAccuracy(
        row=row,
        request=request,
        length=length,
        nonfinite_scores=0,
        nonfinite_baseline=0,
        relative_l2=relative_l2(difference, wide_baseline),
        max_abs=float(difference.abs().max()),
        cosine=cosine(wide_scores, wide_baseline),
        spearman=spearman(scores, baseline),
        top_k=_top_k_accuracies(scores, baseline, wide_baseline, top_k, softmax_scale),
    )


def count_nonfinite(values: torch.Tensor) -> int:
    """How many values are NaN or infinite."""
    return int((~values.isfinite()).sum())


def relative_l2(difference: torch.Tensor, baseline: torch.Tensor) -> float | None:
    """``|difference| / |baseline|`` of float64 ``[n]``; None for a zero baseline."""
    norm = float(baseline.norm())
    return float(difference.norm()) / norm if norm else None


def cosine(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """Cosine of the angle between two float64 ``[n]``; None where one of them is zero."""
    # One square root of the product, and not the product of two: equal vectors give exactly 1.
    squares = float(first.dot(first)) * float(second.dot(second))
    if squares == 0:
        return None
    return max(-1.0, min(1.0, float(first.dot(second)) / math.sqrt(squares)))


def average_ranks(values: torch.Tensor) -> torch.Tensor:
    """float64 ranks of ``[n]`` values from 1 up; equal values share the mean of their ranks."""
    ordered, order = values.sort()
    _, run, counts = ordered.unique_consecutive(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = torch.empty(values.shape[0], dtype=torch.float64, device=values.device)
    ranks[order] = (last - (counts - 1) / 2)[run]
    return ranks


def spearman(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """Spearman's rank correlation of two ``[n]``; None where one of them is constant."""
    middle = (first.shape[0] + 1) / 2  # the mean of the ranks, ties or not
    return cosine(average_ranks(first) - middle, average_ranks(second) - middle)


def _top_k_accuracies(
    scores: torch.Tensor,
    baseline: torch.Tensor,
    wide_baseline: torch.Tensor,
    top_k: Sequence[int],
    softmax_scale: float,
) -> tuple[TopKAccuracy, ...]:
    if not top_k:
        return ()
    length = scores.shape[0]
    widest = min(max(top_k), length)
    # A smaller top-k is the beginning of a larger one.
    chosen = top_k_indices(scores[None], widest)[0]
    best = top_k_indices(baseline[None], widest)[0]
    # Subtracting the largest exponent before exp keeps every power at or below 1, the largest at 1.
    weights = ((wide_baseline - wide_baseline.max()) * softmax_scale).exp()
    accuracies = []
    for k in top_k:
        kept = min(k, length)
        accuracies.append(
            _one_top_k(k, chosen[:kept], best[:kept], baseline, weights),
        )
    return tuple(accuracies)


def _one_top_k(
    k: int,
    chosen: torch.Tensor,
    best: torch.Tensor,
    baseline: torch.Tensor,
    weights: torch.Tensor,
) -> TopKAccuracy:
    kept, length = chosen.shape[0], baseline.shape[0]
    kth_largest = baseline[best[-1]]
    chosen_scores, best_scores = baseline[chosen], baseline[best]
    # Sorted before they are added, so that the same scores in another order have the same sum.
    chosen_mass = weights[chosen].sort(descending=True).values.sum()
    best_mass = weights[best].sort(descending=True).values.sum()
    return TopKAccuracy(
        k=k,
        kept=kept,
        recall=int((chosen_scores >= kth_largest).sum()) / kept,
        mass=float(chosen_mass / best_mass),
        chance=kept / length,
        same_scores=bool((chosen_scores.sort(descending=True).values == best_scores).all()),
        same_set=bool((chosen.sort().values == best.sort().values).all()),
        ties_left_out=int((baseline >= kth_largest).sum()) - kept,
    )
