"""Summaries of many rows: what they count, what they leave out, and where the worst row is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdsa_quant.accuracy.metrics import RowAccuracy, TopKAccuracy, row_accuracy
from sdsa_quant.accuracy.summary import RowValue, nearest_rank, summarize_accuracy


def row_with_recall(row: int, recall: float) -> RowAccuracy:
    top_k = TopKAccuracy(64, 64, recall, recall, 0.25, recall == 1, recall == 1, 0)
    return RowAccuracy(
        row, row // 2, 256, 0, 0, False, 1 - recall, 1 - recall, recall, recall, (top_k,)
    )


def test_one_bad_row_of_a_hundred_is_seen() -> None:
    # CASES 59: 99 rows with recall 1.0 and one with 0.0.
    rows = [row_with_recall(row, 0.0 if row == 70 else 1.0) for row in range(100)]
    accuracy = summarize_accuracy(rows, (64,))
    recall = accuracy.top_k[0].recall
    assert (recall.mean, recall.median, recall.minimum, recall.p1) == (0.99, 1.0, 0.0, 0.0)
    assert recall.worst == RowValue(value=0.0, row=70, request=35, length=256)
    assert accuracy.top_k[0].rows_with_same_scores == 99


def test_the_worst_of_an_error_is_its_largest() -> None:
    rows = [row_with_recall(row, 1 - row / 100) for row in range(100)]
    error = summarize_accuracy(rows, (64,)).relative_l2
    assert error.worst == RowValue(pytest.approx(0.99), row=99, request=49, length=256)
    assert (error.p99, error.maximum) == (pytest.approx(0.98), pytest.approx(0.99))


def test_invalid_and_empty_rows_are_counted_and_left_out() -> None:
    # CASES 20 and 56: a row of length 0, and a NaN in the scores of row 3.
    baseline = torch.arange(10.0)
    broken = baseline.clone()
    broken[4] = math.nan
    given_scores = [baseline, baseline[:0], baseline, broken, baseline]
    rows = [
        row_accuracy(index, 0, scores, baseline[: scores.shape[0]], top_k=(4,), softmax_scale=1.0)
        for index, scores in enumerate(given_scores)
    ]
    accuracy = summarize_accuracy(rows, (4,))
    assert (accuracy.rows, accuracy.rows_measured) == (5, 3)
    assert (accuracy.rows_empty, accuracy.rows_invalid) == (1, 1)
    assert [row.row for row in rows if not row.valid] == [3]
    assert accuracy.top_k[0].recall.rows == 3  # of 10 keys and k = 4
    assert accuracy.top_k[0].recall.minimum == 1.0


def test_ties_that_decide_are_counted() -> None:
    few, many = torch.arange(300.0).clamp(max=240), torch.arange(300.0).clamp(max=170)
    rows = [
        row_accuracy(0, 0, scores, scores, top_k=(50, 64), softmax_scale=1.0)
        for scores in (few, many)
    ]
    found = [
        (each.rows_with_ties, each.most_ties_left_out, each.rows_decided_by_ties)
        for each in summarize_accuracy(rows, (50, 64)).top_k
    ]
    # 60 and 130 keys have the highest score; k of them are chosen.
    assert found == [(2, 80, 1), (1, 66, 1)]


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5])
def test_rows_of_one_score_are_not_a_perfect_recall(value: float) -> None:
    some, same = torch.arange(300.0), torch.full((300,), value)
    rows = [
        row_accuracy(0, 0, -some, some, top_k=(64,), softmax_scale=1.0),
        row_accuracy(1, 0, some, same, top_k=(64,), softmax_scale=1.0),
        row_accuracy(2, 0, some[:1], same[:1], top_k=(64,), softmax_scale=1.0),
    ]
    accuracy = summarize_accuracy(rows, (64,))
    assert (accuracy.rows_measured, accuracy.rows_constant) == (3, 1)
    assert (accuracy.top_k[0].recall.rows, accuracy.top_k[0].recall.mean) == (1, 0.0)


def test_flushed_scores_are_no_fault_of_the_capture() -> None:
    some = torch.arange(300.0)
    row = row_accuracy(0, 0, torch.zeros(300), some, top_k=(64,), softmax_scale=1.0)
    accuracy = summarize_accuracy([row], (64,))
    assert (accuracy.rows_constant, accuracy.top_k[0].recall.rows) == (0, 1)


def test_one_key_has_no_cosine() -> None:
    two, one = torch.tensor([1.0, 2.0]), torch.tensor([2.0])
    rows = [
        row_accuracy(0, 0, two, two, top_k=(1,), softmax_scale=1.0),
        row_accuracy(1, 0, -one, one, top_k=(1,), softmax_scale=1.0),
    ]
    accuracy = summarize_accuracy(rows, (1,))
    for measure in (accuracy.cosine, accuracy.relative_l2, accuracy.spearman):
        assert measure.rows == 1
    assert (accuracy.cosine.mean, accuracy.relative_l2.mean) == (1.0, 0.0)
    assert accuracy.max_abs.maximum == 4.0


def test_rows_that_keep_every_key_are_left_out() -> None:
    missed = torch.arange(300.0)
    rows = [
        row_accuracy(0, 0, -missed, missed, top_k=(64, 300), softmax_scale=1.0),
        row_accuracy(1, 0, missed[:64], missed[:64], top_k=(64, 300), softmax_scale=1.0),
        row_accuracy(2, 0, missed[:0], missed[:0], top_k=(64, 300), softmax_scale=1.0),
    ]
    longer, none = summarize_accuracy(rows, (64, 300)).top_k
    assert (longer.k, longer.recall.rows, longer.recall.mean) == (64, 1, 0.0)
    assert longer.rows_longer_than_k == 1
    assert longer.chance == pytest.approx(64 / 300)
    assert (none.k, none.recall.rows, none.recall.mean, none.chance) == (300, 0, None, None)


def test_no_rows_leave_everything_undefined() -> None:
    accuracy = summarize_accuracy([], (64,))
    assert accuracy.rows_measured == 0
    assert accuracy.cosine.rows == 0
    assert (accuracy.cosine.mean, accuracy.cosine.p1, accuracy.cosine.worst) == (None, None, None)
    assert accuracy.top_k[0].chance is None


def test_a_row_with_an_undefined_measure_is_left_out_of_that_measure_only() -> None:
    zero, some = torch.zeros(8), torch.arange(8.0)
    rows = [
        row_accuracy(index, 0, scores, scores, top_k=(2,), softmax_scale=1.0)
        for index, scores in enumerate((zero, some))
    ]
    accuracy = summarize_accuracy(rows, (2,))
    assert (accuracy.cosine.rows, accuracy.max_abs.rows) == (1, 2)


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), percent=st.integers(1, 100))
def test_nearest_rank_is_the_first_value_that_covers_the_share(
    values: list[float], percent: int
) -> None:
    ordered = sorted(values)
    covering = [
        value
        for value in ordered
        if 100 * sum(other <= value for other in ordered) >= percent * len(ordered)
    ]
    assert nearest_rank(ordered, percent) == covering[0]
