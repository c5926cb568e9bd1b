"""Rows' accuracy as columns of one float64 tensor: compact, and stored to the bit.

Columns: row, request, length, non-finite scores, non-finite baseline scores, relative L2, max abs,
cosine, Spearman; then for each k recall, mass, same scores, same set, ties left out. NaN stands for
what a row leaves undefined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from sdsa_quant.accuracy.metrics import RowAccuracy, TopKAccuracy

_LENGTH = 2
_COUNTS = 5  # the first columns, integers
_MEASURES = 4
_TOP_K_COLUMNS = 5


def columns(top_k: Sequence[int]) -> int:
    """Number of columns of a row."""
    return _COUNTS + _MEASURES + len(top_k) * _TOP_K_COLUMNS


def recall_column(place: int) -> int:
    """Column of the recall of the k at `place`; NaN where the row was not measured."""
    return _COUNTS + _MEASURES + place * _TOP_K_COLUMNS


def lengths(rows: torch.Tensor) -> torch.Tensor:
    """float64 ``[..]`` lengths of rows ``[.., columns]``."""
    return rows[..., _LENGTH]


def pack_rows(rows: Iterable[RowAccuracy], top_k: Sequence[int]) -> torch.Tensor:
    """float64 ``[rows, columns]``."""
    width = columns(top_k)
    numbers = [_numbers(row, width) for row in rows]
    return torch.tensor(numbers, dtype=torch.float64).view(len(numbers), width)


def _numbers(row: RowAccuracy, width: int) -> list[float]:
    measures = (row.relative_l2, row.max_abs, row.cosine, row.spearman)
    numbers: list[float] = [
        row.row,
        row.request,
        row.length,
        row.nonfinite_scores,
        row.nonfinite_baseline,
        *(math.nan if value is None else value for value in measures),
    ]
    for each in row.top_k:
        numbers += [each.recall, each.mass, each.same_scores, each.same_set, each.ties_left_out]
    return numbers + [math.nan] * (width - len(numbers))


def unpack_rows(rows: torch.Tensor, top_k: Sequence[int]) -> list[RowAccuracy]:
    """Undo `pack_rows`, the same bits."""
    return [_row(numbers, top_k) for numbers in rows.tolist()]


def _row(numbers: Sequence[float], top_k: Sequence[int]) -> RowAccuracy:
    row, request, length, nonfinite_scores, nonfinite_baseline = map(int, numbers[:_COUNTS])
    relative_l2, max_abs, cosine, spearman = (
        None if math.isnan(value) else value for value in numbers[_COUNTS : _COUNTS + _MEASURES]
    )
    measured = length > 0 and nonfinite_scores == nonfinite_baseline == 0
    starts = [recall_column(place) for place in range(len(top_k))] if measured else []
    return RowAccuracy(
        row=row,
        request=request,
        length=length,
        nonfinite_scores=nonfinite_scores,
        nonfinite_baseline=nonfinite_baseline,
        relative_l2=relative_l2,
        max_abs=max_abs,
        cosine=cosine,
        spearman=spearman,
        top_k=tuple(
            _top_k(numbers[start : start + _TOP_K_COLUMNS], k, length)
            for k, start in zip(top_k, starts, strict=False)
        ),
    )


def _top_k(numbers: Sequence[float], k: int, length: int) -> TopKAccuracy:
    recall, mass, same_scores, same_set, ties_left_out = numbers
    kept = min(k, length)
    return TopKAccuracy(
        k=k,
        kept=kept,
        recall=recall,
        mass=mass,
        chance=kept / length,
        same_scores=bool(same_scores),
        same_set=bool(same_set),
        ties_left_out=int(ties_left_out),
    )
