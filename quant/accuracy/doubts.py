"""When an accuracy proves that what it was measured of does not belong together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from .metrics import RowAccuracy, chance_recall

CHANCE_STANDARD_ERRORS = 3.0
HIGH_RELATIVE_L2 = 0.5  # NVFP4 of normally distributed keys and query rows has 0.13
_REASON = "the baseline, the layout or a rotation does not belong to this cache"


def accuracy_doubts(rows: Sequence[RowAccuracy], top_k: Sequence[int]) -> tuple[str, ...]:
    """Sentences about an accuracy that no right pair of cache and baseline has; empty for most.

    A recall is doubtful within 3 standard errors of that of random choices, over the rows longer
    than k; scores are where their mean relative L2 error is above 0.5.

    Parameters
    ----------
    rows : sequence of RowAccuracy
        What was measured, for the same `top_k`.
    top_k : sequence of int
        The k of recall.
    """
    measured = [row for row in rows if row.valid and row.length]
    doubts = []
    for index, k in enumerate(top_k):
        longer = [row for row in measured if row.length > k and not row.constant_baseline]
        recalls = [row.top_k[index].recall for row in longer]
        if recalls and fmean(recalls) <= chance_limit([row.length for row in longer], k):
            doubts.append(f"recall@{k} of {fmean(recalls):.4f} is no better than chance: {_REASON}")
    errors = [row.relative_l2 for row in measured if row.length > 1 and row.relative_l2 is not None]
    if errors and fmean(errors) > HIGH_RELATIVE_L2:
        doubts.append(
            f"relative L2 error {fmean(errors):.3g} of the scores is above {HIGH_RELATIVE_L2}: "
            f"{_REASON}, or values left the range of the format"
        )
    return tuple(doubts)


def chance_limit(lengths: Sequence[float], k: int, forced: int = 0) -> float:
    """The highest mean recall that random choices of k keys could be thought to give.

    Their hits are hypergeometric: for n keys the recall has mean k / n and variance
    (1 - k / n) (n - k) / (n (n - 1)). Of choices that are forced there are fewer to draw, and fewer
    to draw from.
    """
    free = k - forced
    variances = [
        (1 - free / of) * (of - free) / (of * (of - 1)) * (free / k) ** 2
        for of in (n - forced for n in lengths)
        if free
    ]
    standard_error = math.sqrt(math.fsum(variances)) / len(lengths)
    chance = fmean(chance_recall(k, int(n), forced) for n in lengths)
    return chance + CHANCE_STANDARD_ERRORS * standard_error
