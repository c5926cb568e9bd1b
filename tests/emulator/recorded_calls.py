"""Calls that run in a recorder's process: the host paths that tests record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .launch_recorder import Session

if TYPE_CHECKING:
    from problems import Problem


def launch_scores(session: Session, problem: Problem) -> None:
    """Check and launch a call of `indexer_scores` on backend `cute`."""
    from sdsa_kernels import cute_scores
    from sdsa_kernels.checks import check_scores_call

    for name, tensor in vars(problem).items():
        if tensor is not None:
            session.add_tensor(name, tensor)
    cute_scores.launch(check_scores_call(**vars(problem)))
