"""The backends of `indexer_scores`, and the order in which ``auto`` tries them.

A backend is three things: its name, a function that says why it cannot serve a problem (or None
where it can), and a function that launches one. Both take the frozen `ScoreProblem`. One whose
launches are short has a fourth, which makes a plan of a problem that it has launched (`plans`). One
that checks its kernels when they first run has a fifth: what it found wrong, and so ran another.
Backends are imported when they are first asked, never before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from sdsa_quant.errors import InputError, UnsupportedError
from sdsa_quant.paging import BF16

from .device import capability, device_index
from .plans import Plan
from .problem import ScoreProblem

AUTO = "auto"

# Query rows of a group up to which CuTe DSL is the fastest with BF16 keys on SM90.
_CUTE_BF16_ROWS = 2


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute scores."""

    name: str
    reason_unsupported: Callable[[ScoreProblem], str | None]
    launch: Callable[[ScoreProblem], None]
    make_plan: Callable[[ScoreProblem], Plan | None] = lambda problem: None
    reason_for_fallback: Callable[[ScoreProblem], str | None] = lambda problem: None


def _function(module: str, name: str) -> Callable[[ScoreProblem], Any]:
    """A function of a backend's module, which is imported when the function is called."""

    def call(problem: ScoreProblem) -> Any:
        return getattr(import_module(f".{module}", __package__), name)(problem)

    return call


BACKENDS: tuple[Backend, ...] = (
    Backend(
        "cute",
        _function("cute.backend", "reason_unsupported"),
        _function("cute.backend", "launch"),
        _function("cute.backend", "make_plan"),
        _function("cute.backend", "reason_for_fallback"),
    ),
    Backend(
        "triton",
        _function("triton.backend", "reason_unsupported"),
        _function("triton.backend", "launch"),
        _function("triton.backend", "make_plan"),
    ),
    Backend(
        "torch",
        _function("torch_scores", "reason_unsupported"),
        _function("torch_scores", "launch"),
    ),
)


def backend_names() -> list[str]:
    """Names that ``backend=`` accepts, besides ``auto``."""
    return [backend.name for backend in BACKENDS]


def auto_order(problem: ScoreProblem) -> tuple[Backend, ...]:
    """The backends in the order in which ``auto`` tries them for `problem`.

    As measured on an H200 (docs/explanation/backends.md): CuTe DSL is the fastest, except for BF16
    keys and groups of more than 2 rows, where Triton is 1 to 2 % faster.
    """
    cute, triton, torch_backend = BACKENDS
    many_rows = problem.rows_per_group > _CUTE_BF16_ROWS
    if problem.key_format == BF16 and many_rows and _is_sm90(problem.device):
        return triton, cute, torch_backend
    return BACKENDS


def _is_sm90(device: torch.device) -> bool:
    return device.type == "cuda" and capability(device_index(device)) == (9, 0)


def choose_backend(problem: ScoreProblem, name: str | None = None) -> Backend:
    """First backend that can serve `problem`, or the one asked for by name.

    Raises
    ------
    ValueError
        `name` is no backend.
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
        raise InputError(f"backend must be one of {[AUTO, *backend_names()]}, got {name!r}")
    reasons = []
    for backend in auto_order(problem):
        reason = backend.reason_unsupported(problem)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise UnsupportedError("no backend can run here: " + "; ".join(reasons))
