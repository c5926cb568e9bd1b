"""The backends of `indexer_scores`, and the order in which ``auto`` tries them.

A backend is a name and functions of the frozen `ScoreProblem`. Their modules import no compiler
before it is needed, so that a call on a CPU works without Triton and CuTe DSL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sdsa_quant.errors import InputError, UnsupportedError
from sdsa_quant.layout import BF16

from . import torch_scores
from .cute import backend as cute
from .device import capability, device_index
from .plans import Plan
from .problem import ScoreProblem
from .triton import backend as triton

AUTO = "auto"

# Query rows of a group up to which CuTe DSL is the fastest with BF16 keys on SM90.
_CUTE_BF16_ROWS = 2


def _no_plan(problem: ScoreProblem) -> Plan | None:
    return None


def _no_reason(problem: ScoreProblem) -> str | None:
    return None


def _takes_none(device: torch.device, query_format: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute scores."""

    name: str
    # Why it cannot serve a problem, None where it can.
    reason_unsupported: Callable[[ScoreProblem], str | None]
    launch: Callable[[ScoreProblem], None]
    # How to launch a problem again that it has launched (`plans`), where its launches are short.
    make_plan: Callable[[ScoreProblem], Plan | None] = _no_plan
    # What its check of its best kernel found wrong, so that it ran another.
    reason_for_fallback: Callable[[ScoreProblem], str | None] = _no_reason
    # Whether it reads scales in the 128x4 order as they are, on a device and for a query format.
    takes_tiled_scales: Callable[[torch.device, str], bool] = _takes_none


CUTE = Backend(
    "cute",
    reason_unsupported=cute.reason_unsupported,
    launch=cute.launch,
    make_plan=cute.make_plan,
    reason_for_fallback=cute.reason_for_fallback,
    takes_tiled_scales=cute.takes_tiled_scales,
)
TRITON = Backend(
    "triton",
    reason_unsupported=triton.reason_unsupported,
    launch=triton.launch,
    make_plan=triton.make_plan,
)
TORCH = Backend(
    "torch", reason_unsupported=torch_scores.reason_unsupported, launch=torch_scores.launch
)
BACKENDS = (CUTE, TRITON, TORCH)


def backend_names() -> list[str]:
    """Names that ``backend=`` accepts, besides ``auto``."""
    return [backend.name for backend in BACKENDS]


def auto_order(problem: ScoreProblem) -> tuple[Backend, ...]:
    """The backends in the order in which ``auto`` tries them for `problem`.

    As measured on an H200 (docs/explanation/backends.md): CuTe DSL is the fastest, except for BF16
    keys and groups of more than 2 rows, where Triton is 1 to 2 % faster.
    """
    many_rows = problem.rows_per_group > _CUTE_BF16_ROWS
    if problem.key_format == BF16 and many_rows and _is_sm90(problem.device):
        return TRITON, CUTE, TORCH
    return BACKENDS


def _is_sm90(device: torch.device) -> bool:
    return device.type == "cuda" and capability(device_index(device)) == (9, 0)


def choose_backend(problem: ScoreProblem, name: str | None = None) -> Backend:
    """First backend that can serve `problem`, or the one asked for by name.

    Raises
    ------
    ValueError
        `name` is not the name of a backend.
    RuntimeError
        The named backend, or every backend, cannot serve the problem; the message carries each
        one's reason. There is no fallback from a backend asked for by name.
    """
    if name is not None and name != AUTO:
        for backend in BACKENDS:
            if backend.name == name:
                reason = backend.reason_unsupported(problem)
                if reason is not None:
                    raise UnsupportedError(f"backend {name} cannot run here: {reason}")
                return backend
        raise InputError(
            f"must be one of {[AUTO, *backend_names()]}, got {name!r}", argument="backend"
        )
    reasons = []
    for backend in auto_order(problem):
        reason = backend.reason_unsupported(problem)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise UnsupportedError("no backend can run here: " + "; ".join(reasons))
