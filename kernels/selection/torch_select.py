"""Selection by torch, on CPU tensors, and on CUDA tensors where nothing better runs.

A score and its key index make one int64 that has the order of the contract, and no two of a row
are equal: the order key of the score in the upper half (below), the index counted down in the
lower. So any top-k of those is the top-k.

The order key of a float32 is the int32 of its bits, with the lower 31 turned over for negative
numbers; -0 gets that of +0, and NaN the least int32, which is below that of -inf.
"""

from __future__ import annotations

import torch

from sdsa_quant.layout import PAGE

from .problem import SelectProblem

_INT32_MIN = -(2**31)
_LOWER_BITS = 2**31 - 1
_INDEX_BITS = 32


def reason_unsupported(problem: SelectProblem) -> str | None:
    """None where this backend can serve `problem`, else why not."""
    if problem.device.type not in ("cpu", "cuda"):
        return f"tensors must be on a CPU or CUDA device, not on {problem.device}"
    if problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "it reads the context lengths on the host, which a graph capture forbids"
    return None


def order_keys(scores: torch.Tensor) -> torch.Tensor:
    """int32 of the shape of float32 `scores`: a larger one is earlier, NaN last, -0 equals +0."""
    bits = scores.contiguous().view(torch.int32)
    keys = bits ^ ((bits >> 31) & _LOWER_BITS)
    keys = keys.masked_fill(bits == _INT32_MIN, 0)
    return keys.masked_fill(scores.isnan(), _INT32_MIN)


def launch(problem: SelectProblem) -> None:
    """Write the selection of `problem`; see `sdsa_kernels.select_top_k`."""
    with torch.inference_mode():
        lengths = problem.context_lengths.long().clamp(0, problem.max_context).tolist()
        for row in range(problem.rows):
            _select_row(problem, row, lengths[row // problem.rows_per_group])


def _select_row(problem: SelectProblem, row: int, length: int) -> None:
    scores = problem.scores[row, :length]
    count = min(problem.top_k, length)
    if count < length:
        index = torch.arange(length, device=scores.device, dtype=torch.int64)
        combined = (order_keys(scores).long() << _INDEX_BITS) + (_LOWER_BITS - index)
        chosen = combined.topk(count, sorted=False).indices.sort().values
    else:
        chosen = torch.arange(length, device=scores.device, dtype=torch.int64)
    if problem.top_scores is not None:
        problem.top_scores[row, :count] = scores[chosen]
        problem.top_scores[row, count:] = -torch.inf
    if problem.block_table is not None and problem.requests is not None and count:
        pages = problem.block_table[problem.requests[row // problem.rows_per_group].long()]
        chosen = pages[chosen // PAGE].long() * PAGE + chosen % PAGE
    problem.top_keys[row, :count] = chosen.int()
    problem.top_keys[row, count:] = -1
