"""The validation of selections: shapes, dtypes, strides and devices, and no device values."""

from __future__ import annotations

import torch

from sdsa_kernels.checks import (
    describe,
    require_dense_rows,
    require_device,
    require_separate_rows,
)
from sdsa_kernels.problem import MAX_CONTEXT
from sdsa_quant.arguments import checked_argument
from sdsa_quant.errors import InputError
from sdsa_quant.layout import MAX_TOP_K

from .problem import SelectProblem


def check_outputs(top_keys: torch.Tensor, top_scores: torch.Tensor | None, rows: int) -> None:
    """Check what a selection writes, for a number of rows.

    Raises
    ------
    TypeError
        A tensor has the wrong dtype, or is not one.
    ValueError
        A shape, stride or device is wrong, or `k` is not 1 to 65,535.
    """
    require_dense_rows("top_keys", top_keys, torch.int32, (rows, None), f"[{rows}, k]")
    k = top_keys.shape[1]
    if not 1 <= k <= MAX_TOP_K:
        raise InputError(f"top_keys must have 1 to {MAX_TOP_K} columns, got {describe(top_keys)}")
    require_separate_rows("top_keys", top_keys, k)
    if top_scores is None:
        return
    words = f"[{rows}, {k}], as many entries as top_keys"
    require_dense_rows("top_scores", top_scores, torch.float32, (rows, k), words)
    require_separate_rows("top_scores", top_scores, k)
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
    require_dense_rows("scores", scores, torch.float32, (None, None), "[rows, max_context]")
    rows, max_context = scores.shape
    if max_context > MAX_CONTEXT:
        raise InputError(
            f"must have at most {MAX_CONTEXT} columns, got {max_context}", argument="scores"
        )
    require_dense_rows("context_lengths", context_lengths, torch.int32, (None,), "[groups]")
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
    words = "[requests, blocks]"
    require_dense_rows("block_table", block_table, torch.int32, (None, None), words)
    words = f"[{groups}], one entry for each context length"
    require_dense_rows("requests", requests, torch.int32, (groups,), words)
    return block_table, requests
