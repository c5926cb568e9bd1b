"""Score a task in chunks of whole groups, all in one buffer.

Every group's scores come from the same arithmetic in a chunk as in the whole, so chunks are bitwise
equal to it; they only need a smaller buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sdsa_kernels.device import available_bytes
from sdsa_kernels.problem import ScoreProblem
from sdsa_quant.errors import Hint, InputError, UnsupportedError

from .task import ScoreTask


class ChunkScorer:
    """Scores a task in chunks of whole groups, all in one buffer that is allocated here.

    Parameters
    ----------
    task : ScoreTask
        What to score.
    chunk : int, optional
        Groups in a chunk, the last chunk may have fewer; every group by default.

    Raises
    ------
    ValueError
        `chunk` is less than 1.
    RuntimeError
        The buffer needs more memory than there is; the message has the bytes, and a chunk that
        fits. Or no backend can serve the task here.
    """

    def __init__(self, task: ScoreTask, chunk: int | None = None) -> None:
        if chunk is not None and chunk < 1:
            raise InputError(f"must be at least 1 group, got {chunk}", argument="chunk")
        self.task = task
        self.groups_per_chunk = min(chunk or task.groups, task.groups)
        rows = self.groups_per_chunk * task.rows_per_group
        self.buffer_bytes = _scores_bytes(rows, task.max_context)
        self.whole_bytes = _scores_bytes(task.rows, task.max_context)
        require_memory(task, self.groups_per_chunk)
        self._scores = torch.empty(
            (rows, task.max_context), dtype=torch.float32, device=task.device
        )
        self.backend = task.chosen_backend(self._scores)

    @property
    def in_chunks(self) -> bool:
        """Whether there is more than one chunk."""
        return self.groups_per_chunk < self.task.groups

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Each chunk's first row and scores ``[rows, max_context]``, -inf at and past a length.

        The scores are a view of the buffer: the next chunk overwrites them.
        """
        for first, stop in self._bounds():
            scores = self._scores_of(first, stop).fill_(-torch.inf)
            self.task.score_groups(first, stop, scores)
            self.task.restore_scores(first, stop, scores)
            yield first * self.task.rows_per_group, scores

    def run(self) -> None:
        """Score every chunk and keep none: what a timing repeats. Allocates nothing itself."""
        for first, stop in self._bounds():
            self.task.score_groups(first, stop, self._scores_of(first, stop))

    def problem(self) -> ScoreProblem:
        """The call over the first chunk's groups, checked."""
        return self.task.problem(self._scores)

    def last_problem(self) -> ScoreProblem:
        """The call over the last chunk's groups, checked: what `run` leaves in the buffer."""
        first, stop = list(self._bounds())[-1]
        return self.task.problem(self._scores_of(first, stop), first)

    def _bounds(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self.task.groups, self.groups_per_chunk):
            yield first, min(first + self.groups_per_chunk, self.task.groups)

    def _scores_of(self, first: int, stop: int) -> torch.Tensor:
        return self._scores[: (stop - first) * self.task.rows_per_group]


def _scores_bytes(rows: int, max_context: int) -> int:
    """Bytes of a float32 scores buffer."""
    return rows * max_context * torch.float32.itemsize


def require_memory(task: ScoreTask, groups: int) -> None:
    """Refuse a buffer for the scores of some groups that does not fit into the memory that is left.

    Raises
    ------
    RuntimeError
        It does not fit; the message has the bytes, and a chunk that does where one does.
    """
    rows = groups * task.rows_per_group
    needed = _scores_bytes(rows, task.max_context)
    available = available_bytes(task.device)
    if needed <= available:
        return
    fitting = available // _scores_bytes(task.rows_per_group, task.max_context)
    message = (
        f"the scores buffer needs {needed:,} bytes ({rows:,} rows x {task.max_context:,} keys x 4 "
        f"bytes), but only {available:,} are available on {task.device}"
    )
    if not fitting:
        raise UnsupportedError(f"{message}; not even one group at a time fits")
    hint = Hint("chunk", "to score so many groups at a time", fitting)
    raise UnsupportedError(message, hint=hint)
