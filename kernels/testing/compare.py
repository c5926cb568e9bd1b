"""Compare the scores of one call with float64, page by page on the device that computed them."""

from __future__ import annotations

from dataclasses import replace

import torch

from sdsa_kernels.problem import ScoreProblem
from sdsa_quant.errors import CheckFailedError
from sdsa_quant.layout import DIM, PAGE

from .reference import reference_decode

UNTOUCHED = 12345.0  # fill `scores` with it before the call that is compared
_PAGES_AT_A_TIME = 1024
_FLOAT32_EPSILON = 2.0**-24


def compare_scores(problem: ScoreProblem) -> float:
    """Compare ``problem.scores`` with float64 products of the decoded rows and keys.

    An error may reach ``128 * 2^-24 * sum |q k|``, what float32 summation in any order can cost.
    Entries at and past a length must still hold `UNTOUCHED`.

    Returns
    -------
    float
        The largest error.

    Raises
    ------
    CheckFailedError
        A score is further off, or an entry past a length was written.
    """
    query = reference_decode(problem.query, problem.query_scales)
    lengths = problem.context_lengths.clamp(0, problem.max_context).tolist()
    requests = problem.requests.tolist()
    problem = replace(problem, key_scales=problem.linear_key_scales())
    largest = 0.0
    for group, length in enumerate(lengths):
        rows = slice(group * problem.rows_per_group, (group + 1) * problem.rows_per_group)
        past = problem.scores[rows, length:]
        if bool((past != UNTOUCHED).any()):
            raise CheckFailedError(f"group {group}: an entry past its length {length} was written")
        if length:
            table = problem.block_table[requests[group], : -(-length // PAGE)]
            scores = problem.scores[rows, :length]
            largest = max(largest, _compare_group(problem, group, query[rows], table, scores))
    return largest


def _compare_group(
    problem: ScoreProblem,
    group: int,
    query: torch.Tensor,
    table: torch.Tensor,
    scores: torch.Tensor,
) -> float:
    largest = 0.0
    for first in range(0, table.shape[0], _PAGES_AT_A_TIME):
        pages = table[first : first + _PAGES_AT_A_TIME].long()
        scales = None if problem.key_scales is None else problem.key_scales[pages]
        keys = reference_decode(problem.key_cache[pages], scales).view(-1, DIM)
        part = scores[:, first * PAGE : first * PAGE + keys.shape[0]].double()
        keys = keys[: part.shape[1]]
        error = (part - query @ keys.T).abs()
        bound = DIM * _FLOAT32_EPSILON * (query.abs() @ keys.abs().T)
        wrong = ~(error <= bound)
        if bool(wrong.any()):
            row, key = (int(i) for i in wrong.nonzero()[0])
            raise CheckFailedError(
                f"group {group}, row {row}, key {first * PAGE + key}: score {part[row, key]:.9g} "
                f"is off by {error[row, key]:.3g}; float32 allows {bound[row, key]:.3g}"
            )
        largest = max(largest, float(error.max()))
    return largest
