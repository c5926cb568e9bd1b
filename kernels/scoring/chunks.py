"""Score a task in chunks of whole groups, all in one buffer.

Every group's scores come from the same arithmetic in a chunk as in the whole, so chunks are bitwise
equal to it; they only need a smaller buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sdsa_kernels.device import available_bytes
from sdsa_kernels.problem import ScoreProblem
from sdsa_kernels.selection.checks import check_select_call
from sdsa_kernels.selection.problem import SelectProblem
from sdsa_kernels.selection.select import choose_select_backend, select_top_k
from sdsa_quant.errors import Hint, InputError, UnsupportedError
from sdsa_quant.layout import MAX_TOP_K

from .task import ScoreTask


class ChunkScorer:
    """Scores a task in chunks of whole groups, all in one buffer that is allocated here.

    Parameters
    ----------
    task : ScoreTask
        What to score.
    chunk : int, optional
        Groups in a chunk, the last chunk may have fewer; every group by default.
    select : int, optional
        How many keys to select for each row of a chunk, 1 to 65,535; none by default.

    Raises
    ------
    ValueError
        `chunk` is less than 1, or `select` is not 1 to 65,535.
    RuntimeError
        The buffer needs more memory than there is; the message has the bytes, and a chunk that
        fits. Or no backend can serve the task here.
    """

    def __init__(
        self, task: ScoreTask, chunk: int | None = None, *, select: int | None = None
    ) -> None:
        if chunk is not None and chunk < 1:
            raise InputError(f"must be at least 1 group, got {chunk}", argument="chunk")
        if select is not None and not 1 <= select <= MAX_TOP_K:
            raise InputError(f"must be 1 to {MAX_TOP_K:,} keys, got {select}", argument="select")
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
        self._top_keys = None
        self.select_backend = None
        if select is not None:
            self._top_keys = torch.empty((rows, select), dtype=torch.int32, device=task.device)
            problem = self._selection(0, self.groups_per_chunk, self._top_keys)
            self.select_backend = choose_select_backend(problem, task.backend).name

    @property
    def in_chunks(self) -> bool:
        """Whether there is more than one chunk."""
        return self.groups_per_chunk < self.task.groups

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Each chunk's first row and scores ``[rows, max_context]``, -inf at and past a length.

        The scores are a view of the buffer: the next chunk overwrites them, and `top_keys`.
        """
        for first, stop in self._bounds():
            scores = self._scores_of(first, stop).fill_(-torch.inf)
            self.task.score_groups(first, stop, scores)
            self._select(first, stop, scores)
            self.task.restore_scores(first, stop, scores)
            yield first * self.task.rows_per_group, scores

    def top_keys(self, rows: int) -> torch.Tensor:
        """int32 ``[rows, select]``: what `select_top_k` chose for the rows of the last chunk.

        It chooses from the scores as `indexer_scores` writes them, which is before a gain and a
        center are taken back: by these an engine selects.
        """
        assert self._top_keys is not None
        return self._top_keys[:rows]

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

    def _select(self, first: int, stop: int, scores: torch.Tensor) -> None:
        if self._top_keys is not None:
            select_top_k(
                scores,
                self.task.context_lengths[first:stop],
                top_keys=self._top_keys[: scores.shape[0]],
                backend=self.task.backend,
            )

    def _selection(self, first: int, stop: int, top_keys: torch.Tensor) -> SelectProblem:
        lengths = self.task.context_lengths[first:stop]
        return check_select_call(
            self._scores_of(first, stop), lengths, top_keys, None, None, None, False
        )

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
