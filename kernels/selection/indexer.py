"""`indexer_top_k`: the keys that a row's query selects, from the paged cache."""

from __future__ import annotations

import torch

from sdsa_kernels.checks import require_device, require_dtype, require_shape
from sdsa_kernels.problem import MAX_CONTEXT
from sdsa_kernels.scores import indexer_scores
from sdsa_quant.arguments import checked_argument
from sdsa_quant.errors import InputError
from sdsa_quant.layout import PAGE

from .checks import check_outputs
from .select import select_top_k


def indexer_top_k(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    requests: torch.Tensor,
    top_keys: torch.Tensor,
    top_scores: torch.Tensor | None = None,
    query_scales: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    slots: bool = False,
    backend: str | None = None,
) -> None:
    """The `k` keys of each row with the highest ``query[q] . key[k]``, in ascending key index.

    The scores are those of `indexer_scores`, the selection is that of `select_top_k`. No scores
    need to be given: the call allocates what it needs, and inside a capture the graph owns it, so
    that replays allocate nothing and share nothing.

    Parameters
    ----------
    query, key_cache, block_table, context_lengths, requests, query_scales, key_scales
        As in `indexer_scores`. Lengths are clamped to the keys that the block table has room for,
        64 a column.
    top_keys : torch.Tensor
        Output, int32 ``[rows, k]``, row stride free, `k` from 1 to 65,535: key indices, then -1
        where a row has fewer than `k` keys.
    top_scores : torch.Tensor, optional
        Output, float32 ``[rows, k]``, row stride free: their scores, then -inf.
    slots : bool
        Write slots of the cache, ``page * 64 + key % 64``, instead of key indices, in the same
        order.
    backend : str, optional
        ``"auto"`` (the default), ``"torch"``, ``"triton"`` or ``"cute"``.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride, alignment or device is wrong, scales are missing, or slots do not fit
        int32.
    RuntimeError
        No backend, or not the one asked for, can serve this call on this machine.
    """
    require_dtype("block_table", block_table, (torch.int32,), "int32 [requests, blocks]")
    require_shape("block_table", block_table, (None, None), "int32 [requests, blocks]")
    require_dtype("query", query, (torch.bfloat16, torch.uint8), "bfloat16 or uint8 [rows, n]")
    require_shape("query", query, (None, None), "bfloat16 or uint8 [rows, n]")
    require_dtype("context_lengths", context_lengths, (torch.int32,), "int32 [groups]")
    rows = query.shape[0]
    checked_argument("slots", slots, bool)
    require_dtype("key_cache", key_cache, (torch.bfloat16, torch.uint8), "bfloat16 or uint8 pages")
    check_outputs(top_keys, top_scores, rows)
    require_device("top_keys", top_keys, query.device, "query")
    if slots and key_cache.shape[0] * PAGE > 2**31:
        raise InputError(
            f"must have at most {2**31 // PAGE} pages, whose slots int32 can count, "
            f"got {key_cache.shape[0]}",
            argument="key_cache",
        )
    width = _width(block_table, context_lengths)
    scores = torch.empty((rows, width), dtype=torch.float32, device=query.device)
    indexer_scores(
        query,
        key_cache,
        block_table,
        context_lengths,
        requests=requests,
        scores=scores,
        query_scales=query_scales,
        key_scales=key_scales,
        backend=backend,
    )
    select_top_k(
        scores,
        context_lengths,
        top_keys=top_keys,
        top_scores=top_scores,
        block_table=block_table,
        requests=requests,
        slots=slots,
        backend=backend,
    )


def _width(block_table: torch.Tensor, context_lengths: torch.Tensor) -> int:
    """Columns that the scores of a call need: those of the longest row where the host can know."""
    width = min(block_table.shape[1] * PAGE, MAX_CONTEXT)
    if context_lengths.device.type == "cpu" and context_lengths.numel():
        return max(0, min(width, int(context_lengths.max())))
    return width
