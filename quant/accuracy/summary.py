"""Many rows' accuracy as one report: mean, median, worst 1 %, extremes and the worst row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal

from sdsa_quant.arguments import checked_argument

if TYPE_CHECKING:  # reports are read back without torch
    from .metrics import RowAccuracy, TopKAccuracy


Statistic = Literal["mean", "median", "minimum", "p1", "p99", "maximum"]


@dataclass(frozen=True, slots=True)
class RowValue:
    """A value and the row that it belongs to."""

    value: float
    """The value."""

    row: int
    """Number of the query row; where heads rank by themselves, row x heads + head."""

    request: int
    """The request that it belongs to."""

    length: int
    """Keys that it sees, or blocks where those are selected."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One measure over the rows that define it; None throughout where no row does.

    `p1` and `p99` are of nearest rank, so each is the value of a row: with 100 rows `p1` is the
    minimum. `worst` is the minimum of a similarity and the maximum of an error, the first such row.
    """

    rows: int
    """Rows that define the measure."""

    mean: float | None
    """Mean over these rows; null if there are none, like all that follow."""

    median: float | None
    """Median."""

    minimum: float | None
    """Smallest value."""

    p1: float | None
    """Percentile 1, of nearest rank: the value of a row."""

    p99: float | None
    """Percentile 99, of nearest rank."""

    maximum: float | None
    """Largest value."""

    worst: RowValue | None
    """The first row with the worst value: the smallest similarity or the largest error."""

    def statistic(self, name: Statistic) -> float | None:
        """The field of this name."""
        value: float | None = getattr(self, name)
        return value


@dataclass(frozen=True, slots=True)
class TopKSummary:
    """How the top-k of the rows with more than k keys agree with the baseline's.

    A row with no more keys than k keeps them all, and a row of constant baseline scores ties them
    all, so that their recall of 1 says nothing about their scores: they are left out.
    """

    k: int
    """Number of keys that are selected."""

    recall: Summary
    """Share of the baseline's top-k that the quantized scores still choose."""

    mass: Summary
    """Softmax mass that the quantized top-k keeps, relative to the baseline's own top-k."""

    chance: float | None
    """Recall of a random choice: the mean over these rows of k / length; null without any."""

    rows_longer_than_k: int
    """Rows with more than k keys, not of constant scores: those that all of this is over."""

    rows_with_same_scores: int
    """Rows whose chosen keys have the baseline's k largest scores."""

    rows_with_same_set: int
    """Rows that choose the baseline's very keys, ties broken by lower index."""

    rows_with_ties: int
    """Rows with a key left out whose baseline score equals the k-th largest."""

    most_ties_left_out: int
    """The most such keys of one row."""

    rows_decided_by_ties: int
    """Rows that leave out as many such keys as they choose, or more: their recall says little."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Every row's accuracy, summarized over the valid rows."""

    rows: int
    """All query rows."""

    rows_measured: int
    """Rows that the measures are over."""

    rows_empty: int
    """Rows of length 0, left out."""

    rows_invalid: int
    """Rows with a non-finite score or baseline score, left out."""

    rows_constant: int
    """Rows of several keys with one baseline score, an error of the capture; not in `top_k`."""

    top_k: tuple[TopKSummary, ...]
    """Agreement of the top-k, by k, over the rows longer than k."""

    relative_l2: Summary
    """L2 norm of the score errors over that of the baseline scores."""

    max_abs: Summary
    """Largest absolute error of a score."""

    cosine: Summary
    """Cosine similarity of scores and baseline scores."""

    spearman: Summary
    """Spearman's rank correlation of scores and baseline scores."""


def summarize_accuracy(rows: Sequence[RowAccuracy], top_k: Sequence[int]) -> Accuracy:
    """Summarize rows that `row_accuracy` measured for the same `top_k`."""
    from .metrics import RowAccuracy  # with torch, which whoever has measured rows has too

    rows = checked_argument("rows", rows, Sequence[RowAccuracy])
    top_k = checked_argument("top_k", top_k, Sequence[int])
    invalid = [row for row in rows if not row.valid]
    empty = [row for row in rows if row.valid and row.length == 0]
    measured = _measured(rows)
    return Accuracy(
        rows=len(rows),
        rows_measured=len(measured),
        rows_empty=len(empty),
        rows_invalid=len(invalid),
        rows_constant=sum(row.constant_baseline for row in measured),
        top_k=tuple(
            _summarize_top_k(
                [row for row in measured if row.length > k and not row.constant_baseline], index, k
            )
            for index, k in enumerate(top_k)
        ),
        relative_l2=_summarize(measured, lambda row: row.relative_l2, worst=max),
        max_abs=_summarize(measured, lambda row: row.max_abs, worst=max),
        cosine=_summarize(measured, lambda row: row.cosine, worst=min),
        spearman=_summarize(measured, lambda row: row.spearman, worst=min),
    )


def nearest_rank(ordered: Sequence[float], percent: int) -> float:
    """Smallest of the ascending values that at least `percent` % of them do not exceed."""
    return ordered[max(1, math.ceil(Fraction(percent * len(ordered), 100))) - 1]


def _measured(rows: Sequence[RowAccuracy]) -> list[RowAccuracy]:
    return [row for row in rows if row.valid and row.length > 0]


def _summarize(
    rows: Iterable[RowAccuracy],
    measure: Callable[[RowAccuracy], float | None],
    worst: Callable[[Iterable[float]], float],
) -> Summary:
    values = [
        RowValue(value, row.row, row.request, row.length)
        for row in rows
        if (value := measure(row)) is not None
    ]
    if not values:
        return Summary(0, None, None, None, None, None, None, None)
    ordered = sorted(value.value for value in values)
    worst_value = worst(ordered)
    return Summary(
        rows=len(values),
        mean=fmean(ordered),
        median=median(ordered),
        minimum=ordered[0],
        p1=nearest_rank(ordered, 1),
        p99=nearest_rank(ordered, 99),
        maximum=ordered[-1],
        worst=next(value for value in values if value.value == worst_value),
    )


def _summarize_top_k(rows: Sequence[RowAccuracy], index: int, k: int) -> TopKSummary:
    def of(row: RowAccuracy) -> TopKAccuracy:
        return row.top_k[index]

    agreements = [of(row) for row in rows]
    return TopKSummary(
        k=k,
        recall=_summarize(rows, lambda row: of(row).recall, worst=min),
        mass=_summarize(rows, lambda row: of(row).mass, worst=min),
        chance=fmean(each.chance for each in agreements) if agreements else None,
        rows_longer_than_k=len(rows),
        rows_with_same_scores=sum(each.same_scores for each in agreements),
        rows_with_same_set=sum(each.same_set for each in agreements),
        rows_with_ties=sum(each.ties_left_out > 0 for each in agreements),
        most_ties_left_out=max((each.ties_left_out for each in agreements), default=0),
        rows_decided_by_ties=sum(each.is_decided_by_ties for each in agreements),
    )
