"""Other ways to the same scores, for a benchmark to stand beside: flashinfer, and gather + bmm."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from sdsa_kernels.device import can_find
from sdsa_kernels.problem import ScoreProblem
from sdsa_quant.layout import BF16, DIM, PAGE


def flashinfer_call(problem: ScoreProblem) -> Callable[[], None] | None:
    """``flashinfer.sdsa.indexer_scores`` on a problem; None where it is missing or refuses it."""
    if not can_find("flashinfer"):
        return None
    try:
        indexer_scores = importlib.import_module("flashinfer.sdsa").indexer_scores
    except (ImportError, AttributeError):
        return None

    query, key_cache, table, lengths, requests, scores, *scales = problem.call()
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

    try:
        call()
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return None
    return call


def gather_bmm_call(problem: ScoreProblem) -> Callable[[], None] | None:
    """Gather BF16 pages into one tensor, then ``torch.bmm``; None for NVFP4 or ragged lengths.

    What one writes without a kernel: it moves the keys three times and gives BF16 scores.
    """
    lengths = problem.context_lengths.tolist()
    if problem.key_format != BF16 or len(set(lengths)) != 1 or lengths[0] % PAGE:
        return None
    groups, blocks = len(lengths), lengths[0] // PAGE
    table = problem.block_table[problem.requests.long(), :blocks].long()
    query = problem.query.view(groups, problem.rows_per_group, DIM)

    def call() -> None:
        keys = problem.key_cache[table].view(groups, blocks * PAGE, DIM)
        torch.bmm(query, keys.transpose(1, 2))

    return call
