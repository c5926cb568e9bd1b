"""Other ways to the same scores, for a benchmark to stand beside: flashinfer, and gather + bmm.

Each gives its median time, or why there is none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch

from sdsa_kernels.device import can_find
from sdsa_kernels.problem import ScoreProblem
from sdsa_quant.errors import CheckFailedError
from sdsa_quant.layout import BF16, DIM, PAGE

from .measurement import scoring_call
from .selected import covering_table
from .timing import time_graph
from .written import plain_scores, require_written

_MOST_REASON = 200  # characters


def time_flashinfer(
    problems: Sequence[ScoreProblem], repeats: int, *, calls_per_replay: int = 1
) -> float | str:
    """Median time in us of ``flashinfer.sdsa.indexer_scores``, or why there is none.

    What its graphs write is compared with what `indexer_scores` writes: a time of other scores is
    not comparable.
    """
    if not can_find("flashinfer"):
        return "flashinfer is not installed"
    try:
        module = importlib.import_module("flashinfer.sdsa")
        indexer_scores = module.indexer_scores
    except Exception as error:  # whatever an import of another project raises is why
        return _reason("cannot be imported", error)
    with torch.cuda.device(problems[0].device):
        expected = [plain_scores(each, scoring_call(each, "auto")) for each in problems]
        calls = [_flashinfer_call(each, indexer_scores) for each in problems]

        def verify(index: int, replay: Callable[[], None]) -> None:
            require_written(problems[index], replay, expected[index])

        try:
            calls[0]()
        except Exception as error:  # whatever it refuses a problem with is why
            return _reason("refuses the problem", error)
        try:
            timing = time_graph(calls, repeats, calls_per_replay=calls_per_replay, verify=verify)
        except CheckFailedError as error:
            return _reason("other scores", error)
        except Exception as error:
            return _reason("cannot be captured", error)
    return timing.median_us


def time_gather_bmm(
    problems: Sequence[ScoreProblem], repeats: int, *, calls_per_replay: int = 1
) -> float | str:
    """Median time in us of gathering BF16 pages into one tensor and ``torch.bmm``, or why not.

    What one writes without a kernel: it moves the keys three times and gives BF16 scores.
    """
    first = problems[0]
    lengths = first.context_lengths.tolist()
    if first.key_format != BF16:
        return "needs BF16 keys"
    if len(set(lengths)) != 1 or lengths[0] % PAGE:
        return "needs groups of one length, of whole pages"
    with torch.cuda.device(first.device):
        calls = [_gather_bmm_call(each, len(lengths), lengths[0] // PAGE) for each in problems]
        return time_graph(calls, repeats, calls_per_replay=calls_per_replay).median_us


def _reason(what: str, error: Exception) -> str:
    text = " ".join(f"{what}: {type(error).__name__}: {error}".split())
    return text if len(text) <= _MOST_REASON else text[: _MOST_REASON - 3] + "..."


def _flashinfer_call(
    problem: ScoreProblem, indexer_scores: Callable[..., object]
) -> Callable[[], None]:
    query, key_cache, _, lengths, requests, scores, *scales = problem.call()
    table = covering_table(problem)  # it refuses scores that are wider than its table
    query_scales, key_scales = (
        None if scale is None else scale.view(torch.float8_e4m3fn) for scale in scales
    )

    def call() -> None:
        indexer_scores(
            query,
            key_cache,
            table,
            lengths,
            requests=requests,
            scores=scores,
            query_scales=query_scales,
            key_scales=key_scales,
        )

    return call


def _gather_bmm_call(problem: ScoreProblem, groups: int, blocks: int) -> Callable[[], None]:
    table = problem.block_table[problem.requests.long(), :blocks].long()
    query = problem.query.view(groups, problem.rows_per_group, DIM)

    def call() -> None:
        keys = problem.key_cache[table].view(groups, blocks * PAGE, DIM)
        torch.bmm(query, keys.transpose(1, 2))

    return call
