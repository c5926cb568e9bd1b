"""Calls of the tensor-core kernels that run in a recorder's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .launch_recorder import Session

if TYPE_CHECKING:
    from problems import Problem

TENSOR_CORE_VARIANTS = ("tcgen05_bf16", "tcgen05_nvfp4", "tcgen05_nvfp4_128x4")


def launch_tensor_core(session: Session, problem: Problem) -> None:
    """Launch a call of `indexer_scores` on backend `cute` as if its tensor cores were trusted."""
    from sdsa_kernels import cute_scores, cute_self_check
    from sdsa_kernels.checks import check_scores_call

    for variant in TENSOR_CORE_VARIANTS:
        cute_self_check._verdicts[0, variant] = None
    for name, tensor in vars(problem).items():
        if tensor is not None:
            session.add_tensor(name, tensor)
    cute_scores.launch(check_scores_call(**vars(problem)))
