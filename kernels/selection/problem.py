"""What a checked selection is: all that a backend needs, and nothing that it must ask again."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SelectProblem:
    """One validated call of `select_top_k`; tensors are the caller's own, never copies.

    `block_table` and `requests` are there where slots are wanted, and None where keys are.
    """

    scores: torch.Tensor  # float32 [rows, max_context], row stride free
    context_lengths: torch.Tensor  # int32 [groups]
    top_keys: torch.Tensor  # int32 [rows, k], row stride free
    top_scores: torch.Tensor | None  # float32 [rows, k], row stride free
    block_table: torch.Tensor | None  # int32 [requests, blocks], row stride free
    requests: torch.Tensor | None  # int32 [groups]
    rows_per_group: int

    @property
    def rows(self) -> int:
        """Rows to select from."""
        return self.scores.shape[0]

    @property
    def max_context(self) -> int:
        """Lengths are clamped to it."""
        return self.scores.shape[1]

    @property
    def top_k(self) -> int:
        """Keys to select in a row."""
        return self.top_keys.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of every tensor of the call."""
        return self.scores.device
