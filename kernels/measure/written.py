"""That what was timed is what was asked for: the scores that timed calls and replays leave behind.

`scores` is filled with `UNTOUCHED`, the timed call runs once more, and what it wrote is compared
with what a plain call writes: by row, a sum weighted by the key's index. The weights tell keys
apart, and a replay that wrote nothing, something else, or past a length is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sdsa_kernels.problem import ScoreProblem
from sdsa_kernels.testing.compare import UNTOUCHED
from sdsa_quant.errors import CheckFailedError

_ENTRIES_AT_A_TIME = 1 << 22
_OTHER_FILL = -1234.5
_GOLDEN = 0.6180339887498949  # its multiples, less their whole part, never come close to each other
# Of a row's weighted magnitudes. The same kernel gives the same bits; on a CPU another number of
# threads may add in another order.
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class WrittenScores:
    """What a call wrote, in two numbers a row."""

    weighted: torch.Tensor  # float64 [rows], sum of scores times weights
    magnitude: torch.Tensor  # float64 [rows], sum of magnitudes times weights


def plain_scores(
    problem: ScoreProblem, call: Callable[[], object], *, past: bool = True
) -> WrittenScores:
    """What a plain call writes.

    Parameters
    ----------
    problem : ScoreProblem
        What the call leaves the scores of.
    call : callable
        The call.
    past : bool
        Whether nothing may be written past a length; false where other calls use the same buffer.

    Raises
    ------
    CheckFailedError
        It writes past a length, nothing at all, or something else every time.
    """
    found = []
    for fill in (_OTHER_FILL, UNTOUCHED):  # two, because a score may be either
        problem.scores.fill_(fill)
        call()
        found.append(_read(problem, fill if past else None))
    wrong = _differing_rows(*found)
    if wrong:
        raise CheckFailedError(
            f"two plain calls wrote different scores, or none, to row {wrong[0]}"
        )
    return found[1]


def zero_scores(problem: ScoreProblem) -> WrittenScores:
    """What writes zeros below every length, as the page-gather roof does."""
    zeros = torch.zeros(problem.rows, dtype=torch.float64, device=problem.device)
    return WrittenScores(zeros, zeros)


def require_written(
    problem: ScoreProblem, timed: Callable[[], object], expected: WrittenScores
) -> None:
    """Run what was timed once more, and compare what it writes.

    Raises
    ------
    CheckFailedError
        It wrote other scores, or fewer, or more.
    """
    problem.scores.fill_(UNTOUCHED)
    timed()
    compare_written(problem, expected)


def compare_written(problem: ScoreProblem, expected: WrittenScores, *, past: bool = True) -> None:
    """Compare what is in ``problem.scores``, filled with `UNTOUCHED` before; as `plain_scores`.

    Raises
    ------
    CheckFailedError
        These are other scores, or fewer, or more.
    """
    wrong = _differing_rows(_read(problem, UNTOUCHED if past else None), expected)
    if wrong:
        row = wrong[0]
        length = int(row_lengths(problem)[row])
        untouched = int((problem.scores[row, :length] == UNTOUCHED).sum())
        what = "wrote other scores than a plain call to"
        if untouched:
            what = f"left {untouched:,} of {length:,} scores unwritten in"
        raise CheckFailedError(
            f"what was timed is not the call: it {what} row {row}; no time is given"
        )


def _differing_rows(found: WrittenScores, expected: WrittenScores) -> list[int]:
    off = (found.weighted - expected.weighted).abs()
    rows = ~(off <= _TOLERANCE * expected.magnitude)
    return [int(row) for row in rows.nonzero().flatten().tolist()]


def _read(problem: ScoreProblem, fill: float | None) -> WrittenScores:
    """What is below the lengths; past them must be `fill`, if it is given."""
    lengths = row_lengths(problem)[:, None]
    rows, width = problem.scores.shape
    weighted = torch.zeros(rows, dtype=torch.float64, device=problem.device)
    magnitude = torch.zeros_like(weighted)
    step = max(_ENTRIES_AT_A_TIME // max(rows, 1), 64)
    for first in range(0, width, step):
        part = problem.scores[:, first : first + step]
        keys = torch.arange(first, first + part.shape[1], device=problem.device, dtype=torch.int64)
        below = keys < lengths
        past = (part != fill) & ~below
        if fill is not None and bool(past.any()):
            row, key = past.nonzero()[0].tolist()
            raise CheckFailedError(
                f"what was timed is not the call: it wrote entry {first + key} of row {row}, past "
                f"its length; no time is given"
            )
        weights = 1 + (keys.double() * _GOLDEN).frac()
        products = torch.where(below, part.double() * weights, 0.0)
        weighted += products.sum(dim=1)
        magnitude += products.abs().sum(dim=1)
    return WrittenScores(weighted, magnitude)


def row_lengths(problem: ScoreProblem) -> torch.Tensor:
    """int32 ``[rows]``: the keys that each row sees."""
    lengths = problem.context_lengths.clamp(0, problem.max_context)
    return lengths.repeat_interleave(problem.rows_per_group)
