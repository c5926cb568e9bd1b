"""Score every query row of a task: store the scores, describe each row, measure its accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sdsa_quant.accuracy.baseline import KeyReader, baseline_scores
from sdsa_quant.accuracy.metrics import RowAccuracy, count_nonfinite, row_accuracy
from sdsa_quant.accuracy.top_k import top_k_indices
from sdsa_quant.files.scores_file import ScoresWriter

from .chunks import ChunkScorer
from .task import ScoreTask

BEST_KEYS = 4  # that a row's description names


@dataclass(frozen=True, slots=True)
class RowScores:
    """What one query row's scores look like, over the keys that it sees."""

    row: int
    group: int
    request: int
    length: int  # keys
    nonfinite_scores: int
    minimum: float | None  # of the finite scores; None where there are none
    maximum: float | None
    best_keys: tuple[int, ...]  # the first few of top-k, highest score first
    accuracy: RowAccuracy | None  # None without a baseline


def stored_k(task: ScoreTask, top_k: Sequence[int]) -> int:
    """How many keys are chosen for each row: the largest k, or all keys of the longest group."""
    return max(1, min(max(top_k), max(task.group_lengths)))


def score_rows(
    scorer: ChunkScorer,
    *,
    top_k: Sequence[int],
    softmax_scale: float,
    read_keys: KeyReader | None = None,
    writer: ScoresWriter | None = None,
    advance: Callable[[int], None] = lambda rows: None,
) -> list[RowScores]:
    """Score a task chunk by chunk and look at each row while its chunk is there.

    Parameters
    ----------
    scorer : ChunkScorer
        What to score.
    top_k : sequence of int
        The k to measure recall and mass for; `writer` stores `stored_k` of them.
    softmax_scale : float
        What a score is multiplied by before the softmax of mass@k.
    read_keys : callable, optional
        The unquantized keys, to measure accuracy against.
    writer : ScoresWriter, optional
        Where to store scores and top-k indices: those that `scorer` selects, if it does.
    advance : callable
        Is told how many rows have been finished since the last call.
    """
    task = scorer.task
    chosen = stored_k(task, top_k)
    rows: list[RowScores] = []
    for first_row, scores in scorer.chunks():
        first = first_row // task.rows_per_group
        stop = first + scores.shape[0] // task.rows_per_group
        lengths = task.context_lengths[first:stop].repeat_interleave(task.rows_per_group)
        indices = top_k_indices(scores, chosen, lengths)
        if writer is not None:
            selects = scorer.select_backend is not None
            stored = scorer.top_keys(scores.shape[0]) if selects else indices
            writer.write_rows(first_row, scores, stored)
        best_keys = indices[:, :BEST_KEYS].tolist()
        for group in range(first, stop):
            of_group = slice(
                (group - first) * task.rows_per_group, (group - first + 1) * task.rows_per_group
            )
            visible = scores[of_group, : task.group_lengths[group]]
            rows += _describe_group(
                scorer, group, visible, best_keys[of_group], read_keys, top_k, softmax_scale
            )
            advance(task.rows_per_group)
    return rows


def _describe_group(
    scorer: ChunkScorer,
    group: int,
    scores: torch.Tensor,
    best_keys: Sequence[Sequence[int]],
    read_keys: KeyReader | None,
    top_k: Sequence[int],
    softmax_scale: float,
) -> list[RowScores]:
    task = scorer.task
    request, length = task.group_requests[group], task.group_lengths[group]
    first_row = group * task.rows_per_group
    baseline = None
    if read_keys is not None:
        query = task.unquantized_query[first_row : first_row + task.rows_per_group]
        baseline = baseline_scores(query, read_keys, request, length)
    described = []
    for index, of_row in enumerate(best_keys):
        row = first_row + index
        accuracy = None
        if baseline is not None:
            accuracy = row_accuracy(
                row,
                request,
                scores[index],
                baseline[index],
                top_k=top_k,
                softmax_scale=softmax_scale,
            )
        nonfinite = count_nonfinite(scores[index])
        minimum, maximum = _finite_range(scores[index], nonfinite)
        described.append(
            RowScores(
                row=row,
                group=group,
                request=request,
                length=length,
                nonfinite_scores=nonfinite,
                minimum=minimum,
                maximum=maximum,
                best_keys=tuple(key for key in of_row if key >= 0),
                accuracy=accuracy,
            )
        )
    return described


def _finite_range(scores: torch.Tensor, nonfinite: int) -> tuple[float | None, float | None]:
    finite = scores[scores.isfinite()] if nonfinite else scores
    if finite.numel() == 0:
        return None, None
    minimum, maximum = finite.aminmax()
    return float(minimum), float(maximum)
