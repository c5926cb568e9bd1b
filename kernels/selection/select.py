"""`select_top_k`: check the call, choose a backend, launch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sdsa_kernels.cute import select as cute_select
from sdsa_kernels.switches import checked_mode
from sdsa_kernels.triton import select as triton_select
from sdsa_kernels.value_checks import check_selection_values
from sdsa_quant.errors import InputError, UnsupportedError

from . import torch_select
from .checks import check_select_call
from .problem import SelectProblem

_AUTO = "auto"


@dataclass(frozen=True, slots=True)
class SelectBackend:
    """One way to select."""

    name: str
    # Why it cannot serve a problem, None where it can.
    reason_unsupported: Callable[[SelectProblem], str | None]
    launch: Callable[[SelectProblem], None]


BACKENDS = (
    SelectBackend("cute", cute_select.reason_unsupported, cute_select.launch),
    SelectBackend("triton", triton_select.reason_unsupported, triton_select.launch),
    SelectBackend("torch", torch_select.reason_unsupported, torch_select.launch),
)


def select_backend_names() -> list[str]:
    """Names that ``backend=`` of `select_top_k` accepts, besides ``auto``."""
    return [backend.name for backend in BACKENDS]


def select_top_k(
    scores: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    top_keys: torch.Tensor,
    top_scores: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    requests: torch.Tensor | None = None,
    slots: bool = False,
    backend: str | None = None,
) -> None:
    """The `k` first keys of each row: higher score first, equal scores lower key index first.

    NaN is below -inf, and -0 equals +0. The keys are written in ascending key index, so that there
    is one answer, the same on every backend and in every run. On a GPU the call can be captured
    after one call; it does not synchronize, and a graph owns the workspace of its calls.

    Parameters
    ----------
    scores : torch.Tensor
        Input, float32 ``[rows, max_context]``, row stride free; entries at or past a row's length
        are not looked at.
    context_lengths : torch.Tensor
        Input, int32 ``[groups]``, in keys; clamped to ``max_context``. A group is ``rows / groups``
        consecutive rows.
    top_keys : torch.Tensor
        Output, int32 ``[rows, k]``, row stride free, `k` from 1 to 65,535: key indices, then -1
        where a row has fewer than `k` keys.
    top_scores : torch.Tensor, optional
        Output, float32 ``[rows, k]``, row stride free: their scores, then -inf.
    block_table : torch.Tensor, optional
        Input, int32 ``[requests, blocks]``, for `slots`.
    requests : torch.Tensor, optional
        Input, int32 ``[groups]``, rows of `block_table`, for `slots`; any value where the length
        is 0.
    slots : bool
        Write slots of the cache, ``page * 64 + key % 64``, instead of key indices, in the same
        order.
    backend : str, optional
        ``"auto"`` (the default), ``"cute"``, ``"triton"`` or ``"torch"``.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride or device is wrong, or slots are wanted without a block table. With
        ``SDSA_CHECK=1`` in the environment, also a length, request or page number out of range.
    RuntimeError
        No backend, or not the one asked for, can serve this call on this machine.
    """
    problem = check_select_call(
        scores, context_lengths, top_keys, top_scores, block_table, requests, slots
    )
    if checked_mode():
        check_selection_values(problem)
    choose_select_backend(problem, backend).launch(problem)


def choose_select_backend(problem: SelectProblem, name: str | None = None) -> SelectBackend:
    """First backend that can serve `problem`, or the one asked for by name.

    Raises
    ------
    ValueError
        `name` is not the name of a backend.
    RuntimeError
        The named backend, or every backend, cannot serve the problem.
    """
    reasons = []
    for backend in BACKENDS:
        if name not in (None, _AUTO, backend.name):
            continue
        reason = backend.reason_unsupported(problem)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    if not reasons:
        names = [_AUTO, *select_backend_names()]
        raise InputError(f"must be one of {names}, got {name!r}", argument="backend")
    raise UnsupportedError("no backend can select here: " + "; ".join(reasons))
