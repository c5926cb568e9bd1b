"""What quantization costs one query row: the formulas, in float64, over the keys that the row sees.

With scores ``s`` and baseline scores ``b`` of the same n keys:

    relative L2 = |s - b| / |b|                   max abs = max |s - b|
    cosine      = s . b / (|s| |b|)               Spearman = Pearson correlation of the ranks,
                                                  equal scores sharing their average rank
    recall@k    = hits / min(k, n), a hit being a key of top-k(s) whose baseline score reaches the
                  k-th largest of b
    mass@k      = sum over top-k(s) of exp(c b) / sum over top-k(b) of exp(c b), c the softmax scale

Where the last f keys (local blocks) are chosen whatever their scores, a top-k is those and the
k - f best of the others, and they count as hits.

A value that its formula leaves undefined (a zero norm, constant scores) is None, and so are the
relative L2, the cosine and Spearman of a single key: they compare keys with each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.errors import InputError

from .top_k import top_k_indices


@dataclass(frozen=True, slots=True)
class TopKAccuracy:
    """How one row's top-k agrees with the baseline's."""

    k: int
    """Keys that an indexer selects."""

    kept: int
    """Keys that are chosen, min(k, length)."""

    recall: float
    """Share of the chosen keys whose baseline score reaches the baseline's k-th largest."""

    mass: float
    """Softmax mass of the baseline that the chosen keys keep, relative to the baseline's choice."""

    chance: float
    """Recall of a random choice, `kept` over the length."""

    same_scores: bool
    """Whether the chosen keys' baseline scores are the baseline's k largest."""

    same_set: bool
    """Whether the chosen keys are the baseline's, ties broken by lower index."""

    ties_left_out: int
    """Keys left out whose baseline score equals the k-th largest."""

    @property
    def is_decided_by_ties(self) -> bool:
        """Whether as many keys as are chosen, or more, were left out for a tie alone."""
        return self.ties_left_out >= self.kept


@dataclass(frozen=True, slots=True)
class RowAccuracy:
    """One query row against its baseline.

    A row with a non-finite score or baseline score is invalid: its measures are None and `top_k` is
    empty. The same holds for a row of length 0.
    """

    row: int
    request: int
    length: int  # keys
    nonfinite_scores: int
    nonfinite_baseline: int
    constant_baseline: bool = False  # more than one key, all of one baseline score
    relative_l2: float | None = None
    max_abs: float | None = None
    cosine: float | None = None
    spearman: float | None = None
    top_k: tuple[TopKAccuracy, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether every score and every baseline score is finite."""
        return self.nonfinite_scores == 0 and self.nonfinite_baseline == 0


@checked_arguments
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
    return RowBaseline(baseline, top_k=top_k, softmax_scale=softmax_scale).measure(
        row, request, scores
    )


def chance_recall(k: int, length: int, forced: int = 0) -> float:
    """Recall@k of a random choice from `length` keys, the last `forced` of which are in it."""
    if length <= k or not forced:
        return min(k, length) / length
    free = k - forced
    return (forced + free * free / (length - forced)) / k


@dataclass(frozen=True, slots=True)
class _BestKeys:
    """The baseline's top-k, without what is chosen whatever its score."""

    k: int
    indices: torch.Tensor  # int64 [min(k, length) - forced], ascending
    scores: torch.Tensor  # of these keys, highest first
    mass: torch.Tensor
    ties_left_out: int


class RowBaseline:
    """The baseline scores of one query row, to measure any number of score rows against.

    What depends on the baseline alone (its ranks, its top-k, the softmax) is worked out once.

    Parameters
    ----------
    scores : torch.Tensor
        Input, float32 ``[length]``, from the unquantized keys.
    top_k : sequence of int
        The k to measure recall and mass for, each at least 1.
    softmax_scale : float
        What a score is multiplied by before the softmax; positive.
    forced : int
        Of the last keys, how many every top-k has whatever their scores, fewer than the least k.

    Raises
    ------
    ValueError
        `scores` is not one-dimensional, the scale is not positive and finite, or as many keys as
        a k are forced.
    """

    def __init__(
        self,
        scores: torch.Tensor,
        *,
        top_k: Sequence[int],
        softmax_scale: float,
        forced: int = 0,
    ) -> None:
        if scores.dim() != 1:
            raise InputError(f"baseline must be [length], got {list(scores.shape)}")
        if not (softmax_scale > 0 and math.isfinite(softmax_scale)):
            raise InputError(f"softmax_scale must be positive and finite, got {softmax_scale}")
        if not 0 <= forced < min(top_k, default=1):
            raise InputError(f"forced must be 0 to less than every k, got {forced}")
        self._scores = scores
        self._forced = forced
        self._length = scores.shape[0]
        self._nonfinite = count_nonfinite(scores)
        self._constant = self._length > 1 and bool(scores.min() == scores.max())
        self._best: tuple[_BestKeys, ...] = ()
        if self._length and not self._nonfinite:
            self._wide = scores.double()
            self._centered_ranks = centered_ranks(scores)
            # Subtracting the largest keeps every power at or below 1, the largest at 1.
            self._weights = ((self._wide - self._wide.max()) * softmax_scale).exp()
            self._best = self._find_best(top_k)

    def measure(self, row: int, request: int, scores: torch.Tensor) -> RowAccuracy:
        """Measure one row of scores.

        Parameters
        ----------
        row, request : int
            What to call the row in a report.
        scores : torch.Tensor
            Input, float32 ``[length]``, on the baseline's device.

        Raises
        ------
        ValueError
            `scores` does not have the baseline's shape.
        """
        if scores.shape != self._scores.shape:
            raise InputError(
                f"scores and baseline must both be [length], got {list(scores.shape)} and "
                f"{list(self._scores.shape)}"
            )
        nonfinite = count_nonfinite(scores)
        if self._length == 0 or nonfinite or self._nonfinite:
            return RowAccuracy(row, request, self._length, nonfinite, self._nonfinite)
        wide = scores.double()
        difference = wide - self._wide
        several = self._length > 1
        return RowAccuracy(
            row=row,
            request=request,
            length=self._length,
            nonfinite_scores=0,
            nonfinite_baseline=0,
            constant_baseline=self._constant,
            relative_l2=relative_l2(difference, self._wide) if several else None,
            max_abs=float(difference.abs().max()),
            cosine=cosine(wide, self._wide) if several else None,
            spearman=cosine(centered_ranks(scores), self._centered_ranks),
            top_k=self._measure_top_k(scores),
        )

    def _find_best(self, top_k: Sequence[int]) -> tuple[_BestKeys, ...]:
        if not top_k:
            return ()
        # A smaller top-k is the beginning of a larger one.
        free = self._free(self._scores)
        widest = self._choose(free, min(max(top_k), self._length) - self._forced)
        found = []
        for k in top_k:
            indices = widest[: k - self._forced]
            scores = free[indices]
            found.append(
                _BestKeys(
                    k=k,
                    indices=indices.sort().values,
                    scores=scores,
                    mass=self._mass(indices),
                    ties_left_out=(
                        int((free >= scores[-1]).sum()) - indices.shape[0] if len(scores) else 0
                    ),
                )
            )
        return tuple(found)

    def _free(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores that decide."""
        return scores[: self._length - self._forced]

    @staticmethod
    def _choose(free: torch.Tensor, count: int) -> torch.Tensor:
        """The best of the scores that decide; of none where all keys are forced."""
        if not count:
            return torch.empty(0, dtype=torch.int64, device=free.device)
        return top_k_indices(free[None], count)[0]

    def _mass(self, indices: torch.Tensor) -> torch.Tensor:
        """Softmax mass of some keys and those forced, up to the common denominator."""
        weights = self._weights[indices]
        if self._forced:
            weights = torch.cat([weights, self._weights[self._length - self._forced :]])
        # Sorted before they are added, so that the same scores in another order have the same sum.
        return weights.sort(descending=True).values.sum()

    def _measure_top_k(self, scores: torch.Tensor) -> tuple[TopKAccuracy, ...]:
        if not self._best:
            return ()
        widest = max(best.indices.shape[0] for best in self._best)
        chosen = self._choose(self._free(scores), widest)
        return tuple(self._compare(chosen[: best.indices.shape[0]], best) for best in self._best)

    def _compare(self, chosen: torch.Tensor, best: _BestKeys) -> TopKAccuracy:
        kept = chosen.shape[0] + self._forced
        chosen_scores = self._scores[chosen].sort(descending=True).values
        hits = int((chosen_scores >= best.scores[-1]).sum()) if len(chosen) else 0
        return TopKAccuracy(
            k=best.k,
            kept=kept,
            recall=(hits + self._forced) / kept,
            mass=float(self._mass(chosen) / best.mass),
            chance=chance_recall(best.k, self._length, self._forced),
            same_scores=bool((chosen_scores == best.scores).all()),
            same_set=bool((chosen.sort().values == best.indices).all()),
            ties_left_out=best.ties_left_out,
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


def centered_ranks(values: torch.Tensor) -> torch.Tensor:
    """`average_ranks` less their mean, which is the same with ties and without."""
    return average_ranks(values) - (values.shape[0] + 1) / 2


def spearman(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """Spearman's rank correlation of two ``[n]``; None where one of them is constant."""
    return cosine(centered_ranks(first), centered_ranks(second))
