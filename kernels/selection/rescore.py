"""`rescore_top_k`: candidates that NVFP4 scores chose, ranked by the scores of their BF16 keys."""

from __future__ import annotations

import torch

from sdsa_kernels.checks import (
    check_pages,
    require_device,
    require_dtype,
    require_row_contiguous,
    require_shape,
)
from sdsa_kernels.scores import indexer_scores
from sdsa_quant.arguments import checked_argument
from sdsa_quant.errors import InputError
from sdsa_quant.layout import BF16, DIM, PAGE

from .checks import check_outputs
from .select import select_top_k


def rescore_top_k(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    candidates: torch.Tensor,
    *,
    requests: torch.Tensor,
    top_keys: torch.Tensor,
    top_scores: torch.Tensor | None = None,
    slots: bool = False,
    backend: str | None = None,
) -> None:
    """The `k` of each row's candidates with the highest BF16 scores, in ascending key index.

    The second pass of two: `indexer_top_k` chooses ``m * k`` candidates from NVFP4 keys, and this
    call the best `k` of those from BF16 keys. The scores are those of `indexer_scores` for groups
    of one row, so that a row of which all `k` best keys are among the candidates gets BF16's own
    top-k. The candidates' keys are copied side by side, 256 bytes each, scored as a cache of their
    own, and selected from by `select_top_k`; nothing is read on the host, so that the call can be
    captured after one call.

    Parameters
    ----------
    query : torch.Tensor
        Input, bfloat16 ``[rows, 128]``; row stride a multiple of 16 bytes.
    key_cache : torch.Tensor
        Input, bfloat16 ``[pages, 64, 128]``; contiguous inside a page, page stride a multiple of 16
        bytes.
    block_table : torch.Tensor
        Input, int32 ``[requests, blocks]``, page numbers of `key_cache`.
    candidates : torch.Tensor
        Input, int32 ``[rows, n]``: key indices in ascending order, then -1, as `indexer_top_k`
        writes them.
    requests : torch.Tensor
        Input, int32 ``[groups]``, rows of `block_table`; any value where no row of the group has
        candidates.
    top_keys : torch.Tensor
        Output, int32 ``[rows, k]``, row stride free: key indices, then -1 where a row has fewer
        than `k` candidates.
    top_scores : torch.Tensor, optional
        Output, float32 ``[rows, k]``, row stride free: their scores, then -inf.
    slots : bool
        Write slots of the cache, ``page * 64 + key % 64``, instead of key indices, in the same
        order.
    backend : str, optional
        As in `indexer_top_k`.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride, alignment or device is wrong, or slots do not fit int32.
    RuntimeError
        No backend, or not the one asked for, can serve this call on this machine.
    """
    checked_argument("slots", slots, bool)
    groups = _check(query, key_cache, block_table, candidates, requests, top_keys, top_scores)
    rows, number = candidates.shape
    if not rows or not number:
        top_keys.fill_(-1)
        if top_scores is not None:
            top_scores.fill_(-torch.inf)
        return
    there = candidates >= 0
    counts = there.sum(1, dtype=torch.int32)
    index = candidates.clamp(min=0).long()
    slot = _slots_of(index, block_table, requests, counts, rows // groups)
    blocks = -(-number // PAGE)
    keys = key_cache.new_empty((rows, blocks * PAGE, DIM))
    keys[:, :number] = key_cache[slot // PAGE, slot % PAGE]
    table = torch.arange(rows * blocks, dtype=torch.int32, device=query.device)
    scores = torch.empty((rows, number), dtype=torch.float32, device=query.device)
    indexer_scores(
        query,
        keys.view(-1, PAGE, DIM),
        table.view(rows, blocks),
        counts,
        requests=torch.arange(rows, dtype=torch.int32, device=query.device),
        scores=scores,
        backend=backend,
    )
    chosen = torch.empty_like(top_keys)
    select_top_k(scores, counts, top_keys=chosen, top_scores=top_scores, backend=backend)
    result = (slot if slots else index).gather(1, chosen.clamp(min=0).long())
    top_keys.copy_(torch.where(chosen >= 0, result, -1))


def _slots_of(
    index: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor,
    counts: torch.Tensor,
    rows_per_group: int,
) -> torch.Tensor:
    """int64 ``[rows, n]``: slots of key indices; slot 0 stands for what is no candidate."""
    place = torch.arange(index.shape[1], dtype=torch.int64, device=index.device)
    there = place[None, :] < counts[:, None]
    row = torch.arange(index.shape[0], dtype=torch.int64, device=index.device)
    request = requests.long()[row // rows_per_group].masked_fill(counts == 0, 0)
    pages = block_table.long()[request[:, None], index // PAGE]
    return torch.where(there, pages * PAGE + index % PAGE, 0)


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    candidates: torch.Tensor,
    requests: torch.Tensor,
    top_keys: torch.Tensor,
    top_scores: torch.Tensor | None,
) -> int:
    """The number of groups of a call whose shapes, dtypes and devices are right."""
    wanted = f"bfloat16 [rows, {DIM}]"
    require_dtype("query", query, (torch.bfloat16,), wanted)
    require_shape("query", query, (None, DIM), wanted)
    rows = query.shape[0]
    check_pages(key_cache, (BF16,))
    require_dtype("block_table", block_table, (torch.int32,), "int32 [requests, blocks]")
    require_shape("block_table", block_table, (None, None), "int32 [requests, blocks]")
    wanted = f"int32 [{rows}, n], a row for each query row"
    require_dtype("candidates", candidates, (torch.int32,), wanted)
    require_shape("candidates", candidates, (rows, None), wanted)
    require_row_contiguous("candidates", candidates)
    require_dtype("requests", requests, (torch.int32,), "int32 [groups]")
    require_shape("requests", requests, (None,), "int32 [groups]")
    check_outputs(top_keys, top_scores, rows)
    tensors = {
        "key_cache": key_cache,
        "block_table": block_table,
        "candidates": candidates,
        "requests": requests,
        "top_keys": top_keys,
    }
    for name, tensor in tensors.items():
        require_device(name, tensor, query.device, "query")
    groups = requests.shape[0]
    if (rows % groups if groups else rows) or (groups and not rows):
        raise InputError(
            f"must have the same number of rows for each of the {groups} groups of requests, "
            f"got {rows} rows",
            argument="query",
        )
    if not block_table.numel() and candidates.numel():
        raise InputError("must have a page for the candidates, got none", argument="block_table")
    return groups
