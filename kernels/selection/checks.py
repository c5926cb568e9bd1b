"""The validation of selections: shapes, dtypes, strides and devices, and no device values."""

from __future__ import annotations

import torch

from sdsa_kernels.checks import (
    describe,
    require_device,
    require_dtype,
    require_row_contiguous,
    require_shape,
)
from sdsa_kernels.problem import MAX_CONTEXT
from sdsa_quant.arguments import checked_argument
from sdsa_quant.errors import InputError

from .problem import MAX_TOP_K, SelectProblem


def check_outputs(top_keys: torch.Tensor, top_scores: torch.Tensor | None, rows: int) -> None:
    """Check what a selection writes, for a number of rows.

    Raises
    ------
    TypeError
        A tensor has the wrong dtype, or is not one.
    ValueError
        A shape, stride or device is wrong, or `k` is not 1 to 65,535.
    """
    wanted = f"int32 [{rows}, k]"
    require_dtype("top_keys", top_keys, (torch.int32,), wanted)
    require_shape("top_keys", top_keys, (rows, None), wanted)
    k = top_keys.shape[1]
    if not 1 <= k <= MAX_TOP_K:
        raise InputError(f"top_keys must have 1 to {MAX_TOP_K} columns, got {describe(top_keys)}")
    _require_separate_rows("top_keys", top_keys)
    if top_scores is None:
        return
    wanted = f"float32 [{rows}, {k}], as many entries as top_keys"
    require_dtype("top_scores", top_scores, (torch.float32,), wanted)
    require_shape("top_scores", top_scores, (rows, k), wanted)
    _require_separate_rows("top_scores", top_scores)
    require_device("top_scores", top_scores, top_keys.device, "top_keys")


def check_select_call(
    scores: torch.Tensor,
    context_lengths: torch.Tensor,
    top_keys: torch.Tensor,
    top_scores: torch.Tensor | None,
    block_table: torch.Tensor | None,
    requests: torch.Tensor | None,
    slots: bool,
) -> SelectProblem:
    """Validate the arguments of one call of `select_top_k`.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride or device is wrong, or slots are wanted without a block table.
    """
    require_dtype("scores", scores, (torch.float32,), "float32 [rows, max_context]")
    require_shape("scores", scores, (None, None), "float32 [rows, max_context]")
    require_row_contiguous("scores", scores)
    rows, max_context = scores.shape
    if max_context > MAX_CONTEXT:
        raise InputError(
            f"must have at most {MAX_CONTEXT} columns, got {max_context}", argument="scores"
        )
    require_dtype("context_lengths", context_lengths, (torch.int32,), "int32 [groups]")
    require_shape("context_lengths", context_lengths, (None,), "int32 [groups]")
    require_row_contiguous("context_lengths", context_lengths)
    groups = context_lengths.shape[0]
    if (rows % groups if groups else rows) or (groups and not rows):
        raise InputError(
            f"must have the same number of rows for each of the {groups} groups of "
            f"context_lengths, got {rows} rows",
            argument="scores",
        )
    checked_argument("slots", slots, bool)
    check_outputs(top_keys, top_scores, rows)
    tensors = [("context_lengths", context_lengths), ("top_keys", top_keys)]
    if slots:
        table, request = _check_table(block_table, requests, groups)
        tensors += [("block_table", table), ("requests", request)]
    for name, tensor in tensors:
        require_device(name, tensor, scores.device, "scores")
    return SelectProblem(
        scores=scores,
        context_lengths=context_lengths,
        top_keys=top_keys,
        top_scores=top_scores,
        block_table=block_table if slots else None,
        requests=requests if slots else None,
        rows_per_group=rows // groups if groups else 1,
    )


def _check_table(
    block_table: torch.Tensor | None, requests: torch.Tensor | None, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    for name, given in (("block_table", block_table), ("requests", requests)):
        if given is None:
            raise InputError("must be given for slots=True, got None", argument=name)
    assert block_table is not None
    assert requests is not None
    require_dtype("block_table", block_table, (torch.int32,), "int32 [requests, blocks]")
    require_shape("block_table", block_table, (None, None), "int32 [requests, blocks]")
    require_row_contiguous("block_table", block_table)
    wanted = f"int32 [{groups}], one entry for each context length"
    require_dtype("requests", requests, (torch.int32,), wanted)
    require_shape("requests", requests, (groups,), wanted)
    require_row_contiguous("requests", requests)
    return block_table, requests


def _require_separate_rows(name: str, tensor: torch.Tensor) -> None:
    require_row_contiguous(name, tensor)
    if tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
        raise InputError(
            f"must have rows that do not overlap: a row stride of at least {tensor.shape[1]}, "
            f"got {tensor.stride(0)}",
            argument=name,
        )
