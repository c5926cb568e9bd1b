"""`indexer_scores`: check the call, choose a backend, launch it; or launch it as it was before."""

from __future__ import annotations

import torch

from .backends import choose_backend
from .checks import check_scores_call
from .plans import launch_again, remember, signature
from .switches import checked_mode
from .value_checks import check_device_values


def indexer_scores(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    requests: torch.Tensor,
    scores: torch.Tensor,
    query_scales: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """``scores[q, k] = query[q] . key[k]`` for every key ``k`` that row ``q`` sees.

    A group is ``rows / groups`` (1 to 8) consecutive query rows of one request that see the same
    keys: the first ``context_lengths[g]`` keys of the pages that row ``requests[g]`` of
    `block_table` lists. The signature and meaning are those of ``flashinfer.sdsa.indexer_scores``;
    beyond it, BF16 query rows may meet NVFP4 keys, and any GPU from SM80 on and any CPU works.

    Parameters
    ----------
    query : torch.Tensor
        Input, bfloat16 ``[rows, 128]`` or NVFP4 codes uint8 ``[rows, 64]``; row stride a multiple
        of 16 bytes.
    key_cache : torch.Tensor
        Input, bfloat16 ``[pages, 64, 128]`` or NVFP4 codes uint8 ``[pages, 64, 64]``; contiguous
        inside a page, page stride a multiple of 16 bytes.
    block_table : torch.Tensor
        Input, int32 ``[requests, blocks]``, page numbers; only the entries of pages below a group's
        length are read.
    context_lengths : torch.Tensor
        Input, int32 ``[groups]``, in keys; clamped to ``max_context``.
    requests : torch.Tensor
        Input, int32 ``[groups]``, rows of `block_table`; any value where the length is 0.
    scores : torch.Tensor
        Output, float32 ``[rows, max_context]``, in memory of its own; every entry at or past a
        row's length is left untouched.
    query_scales : torch.Tensor, optional
        Input, float8_e4m3fn (or its uint8 bytes) ``[rows, 8]``, with NVFP4 query rows.
    key_scales : torch.Tensor, optional
        Input, float8_e4m3fn (or its uint8 bytes) ``[pages, 64, 8]``, with NVFP4 keys; page stride a
        multiple of 8 bytes. Or, for NVFP4 query rows on an SM10x (or on a CPU), the scales of the
        whole cache in the 128x4 order: 1-D, as `sdsa_quant.linear_to_128x4` makes them of
        ``[pages * 64, 8]``, starting at a multiple of 16 bytes.
    backend : str, optional
        ``"auto"`` (the default), ``"torch"``, ``"triton"`` or ``"cute"``.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride, alignment or device is wrong, or scales are missing. With ``SDSA_CHECK=1``
        in the environment, also a length, request or page number out of range; that mode reads
        device values and so cannot be captured.
    RuntimeError
        No backend, or not the one asked for, can serve this call on this machine.
    """
    checked = checked_mode()
    arguments = (
        query,
        key_cache,
        block_table,
        context_lengths,
        requests,
        scores,
        query_scales,
        key_scales,
    )
    if not checked and launch_again(arguments, backend):
        return
    problem = check_scores_call(arguments)
    if checked:
        check_device_values(problem)
    chosen = choose_backend(problem, backend)
    chosen.launch(problem)
    plan = chosen.make_plan(problem)
    if plan is not None:
        remember(signature(arguments, backend), plan)
