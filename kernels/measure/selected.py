"""Measure the selection of a row's top-k: `indexer_top_k` as a whole, and `select_top_k` alone.

No time is given of what did not write the keys of the contract: what was timed runs once more, and
its keys must be those that torch's own sort of whole rows gives for the scores of a plain call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from sdsa_kernels.problem import ScoreProblem
from sdsa_kernels.selection.checks import check_select_call
from sdsa_kernels.selection.indexer import indexer_top_k
from sdsa_kernels.selection.select import choose_select_backend, select_top_k
from sdsa_kernels.selection.torch_select import order_keys
from sdsa_quant.errors import CheckFailedError
from sdsa_quant.layout import PAGE

from .measurement import scoring_call
from .timing import Timing, time_eager, time_graph
from .written import row_lengths

_ENTRIES_AT_A_TIME = 1 << 22
_UNWRITTEN = -7  # no key, and not the -1 of a row that has no more
_INDEX_BITS = 32
_LOWER_BITS = 2**31 - 1
_NONE = torch.iinfo(torch.int64).min  # below every score's


@dataclass(frozen=True, slots=True)
class SelectionMeasurement:
    """What it takes to select the top-k of every row."""

    top_k: int
    backend: str  # that selected
    calls_per_replay: int
    scores_and_top_k: Timing  # of `indexer_top_k`, on pages as cold as the rotation makes them
    select: Timing  # of `select_top_k` on scores that exist, over and over


def measure_selection(
    problems: Sequence[ScoreProblem],
    top_k: int,
    repeats: int,
    *,
    backend: str = "auto",
    calls_per_replay: int = 1,
) -> SelectionMeasurement:
    """Measure `indexer_top_k` over a rotation of problems, and `select_top_k` on one's scores.

    Parameters
    ----------
    problems : sequence of ScoreProblem
        The same work on different pages, all on one device. Their scores are overwritten: the
        first one's are there afterwards.
    top_k : int
        Keys to select in each row, 1 to 65,535.
    repeats : int
        Samples to take of each.
    backend : str
        As `indexer_top_k` takes it.
    calls_per_replay : int
        Calls in a graph, on a GPU.

    Returns
    -------
    SelectionMeasurement
        Graph replays on a GPU, plain repeats on a CPU.

    Raises
    ------
    ValueError
        `top_k` or `repeats` is out of range.
    RuntimeError
        No backend, or not the one asked for, can serve the calls on this machine.
    CheckFailedError
        What was timed did not write the keys of the contract.
    """
    first = problems[0]
    keys = torch.empty((first.rows, top_k), dtype=torch.int32, device=first.device)
    wide = [replace(each, block_table=covering_table(each)) for each in problems]
    select = functools.partial(
        select_top_k, first.scores, first.context_lengths, top_keys=keys, backend=backend
    )
    checked = check_select_call(
        first.scores, first.context_lengths, keys, None, None, None, slots=False
    )
    expected = []
    for problem in problems:
        scoring_call(problem, backend)()
        expected.append(first_keys(problem, top_k))
    both = _time_checked(
        [_top_k_call(each, keys, backend) for each in wide],
        keys,
        expected,
        repeats,
        calls_per_replay,
    )
    scoring_call(first, backend)()  # rotations may share their scores
    alone = _time_checked([select], keys, expected[:1], repeats, calls_per_replay)
    name = choose_select_backend(checked, backend).name
    return SelectionMeasurement(top_k, name, calls_per_replay, both, alone)


def first_keys(problem: ScoreProblem, top_k: int) -> torch.Tensor:
    """int32 ``[rows, top_k]``: the keys that the scores of `problem` select, by sorting whole rows.

    Higher score first, equal scores lower index first, NaN below -inf; in ascending index, then -1.
    """
    rows, width = problem.scores.shape
    lengths = row_lengths(problem)
    count = min(top_k, width)
    chosen = torch.full((rows, top_k), -1, dtype=torch.int32, device=problem.device)
    index = torch.arange(width, device=problem.device, dtype=torch.int64)
    step = max(1, _ENTRIES_AT_A_TIME // max(width, 1))
    for start in range(0, rows, step):
        part = problem.scores[start : start + step]
        order = (order_keys(part).long() << _INDEX_BITS) + (_LOWER_BITS - index)
        order.masked_fill_(index >= lengths[start : start + step, None], _NONE)
        best, keys = order.sort(dim=1, descending=True)
        best, keys = best[:, :count], keys[:, :count]
        keys = keys.masked_fill(best == _NONE, width).sort(dim=1).values
        chosen[start : start + step, :count] = keys.masked_fill(keys == width, -1).int()
    return chosen


def covering_table(problem: ScoreProblem) -> torch.Tensor:
    """The block table, with so many columns that it has room for every column of the scores.

    As an engine's table, which is as wide as the longest request that it takes. What is added is
    page 0, which nobody reads: it is past every length.
    """
    blocks = -(-problem.max_context // PAGE)
    missing = max(0, blocks - problem.block_table.shape[1])
    if not missing:
        return problem.block_table
    return torch.nn.functional.pad(problem.block_table, (0, missing))


def _top_k_call(problem: ScoreProblem, keys: torch.Tensor, backend: str) -> Callable[[], None]:
    return functools.partial(
        indexer_top_k,
        problem.query,
        problem.key_cache,
        problem.block_table,
        problem.context_lengths,
        requests=problem.requests,
        top_keys=keys,
        query_scales=problem.query_scales,
        key_scales=problem.key_scales,
        backend=backend,
    )


def _time_checked(
    calls: Sequence[Callable[[], None]],
    keys: torch.Tensor,
    expected: Sequence[torch.Tensor],
    repeats: int,
    calls_per_replay: int,
) -> Timing:
    """Time calls that all write to `keys`, and compare what they write with what is expected."""
    if keys.device.type != "cuda":
        keys.fill_(_UNWRITTEN)
        timing = time_eager(calls[0], repeats)
        _require_keys(keys, expected[0])
        return timing

    def verify(index: int, replay: Callable[[], None]) -> None:
        keys.fill_(_UNWRITTEN)
        replay()
        _require_keys(keys, expected[index])

    with torch.cuda.device(keys.device):
        return time_graph(calls, repeats, calls_per_replay=calls_per_replay, verify=verify)


def _require_keys(keys: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = (keys != expected).any(dim=1).nonzero().flatten().tolist()
    if not wrong:
        return
    row = wrong[0]
    unwritten = int((keys[row] == _UNWRITTEN).sum())
    what = "selected other keys than the scores do in"
    if unwritten:
        what = f"left {unwritten:,} of {keys.shape[1]:,} keys unwritten in"
    raise CheckFailedError(
        f"what was timed is not the selection: it {what} row {row}; no time is given"
    )
