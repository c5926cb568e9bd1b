"""What a checked call is: all that a backend needs, and nothing that it must ask again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sdsa_quant.formats.scale_order import linear_pages
from sdsa_quant.layout import PAGE
from sdsa_quant.short_repr import short_repr

# Kernels count keys in 32 bits, up to the end of the tile of two pages that holds the last one.
MAX_CONTEXT = 2**31 - 2 * PAGE

TILED_SCALES_REASON = (
    "key_scales are in the 128x4 order, which on a GPU only the tensor cores of SM10x take, with "
    "NVFP4 query rows (linear_from_128x4 brings them into the linear order)"
)


class ScoreCall(NamedTuple):
    """The tensors of one call of `indexer_scores`, unchecked, in the order of its parameters."""

    query: torch.Tensor
    key_cache: torch.Tensor
    block_table: torch.Tensor
    context_lengths: torch.Tensor
    requests: torch.Tensor
    scores: torch.Tensor
    query_scales: torch.Tensor | None = None
    key_scales: torch.Tensor | None = None


# A `ScoreCall` or the plain tuple of the same tensors, which takes less time to make.
CallTensors = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
]


@dataclass(frozen=True, slots=True)
class ScoreProblem:
    """One validated call of `indexer_scores`; tensors are the caller's own, never copies.

    Scale tensors are held as their uint8 bytes. `query_format` and `key_format` are ``"bf16"`` or
    ``"nvfp4"``; NVFP4 query rows go with NVFP4 keys only, BF16 query rows go with both.
    """

    query: torch.Tensor  # bf16 [rows, 128] or uint8 [rows, 64], row stride free
    query_scales: torch.Tensor | None  # uint8 [rows, 8], row stride free
    key_cache: torch.Tensor  # bf16 [pages, 64, 128] or uint8 [pages, 64, 64], page stride free
    key_scales: torch.Tensor | None  # uint8 [pages, 64, 8], page stride free, or tiled: 1-D
    block_table: torch.Tensor  # int32 [requests, blocks], row stride free, columns contiguous
    context_lengths: torch.Tensor  # int32 [groups]
    requests: torch.Tensor  # int32 [groups]
    scores: torch.Tensor  # float32 [rows, max_context], row stride free, columns contiguous
    rows: int
    groups: int
    rows_per_group: int
    max_context: int
    query_format: str
    key_format: str

    def __repr__(self) -> str:
        return short_repr(self)

    def call(self) -> ScoreCall:
        """The tensors of the call, in the order of `indexer_scores`."""
        return ScoreCall(
            self.query,
            self.key_cache,
            self.block_table,
            self.context_lengths,
            self.requests,
            self.scores,
            self.query_scales,
            self.key_scales,
        )

    @property
    def tiled_scales(self) -> bool:
        """Whether `key_scales` are the whole cache's in the 128x4 order, and not linear pages."""
        return self.key_scales is not None and self.key_scales.dim() == 1

    def linear_key_scales(self) -> torch.Tensor | None:
        """`key_scales` as linear pages ``[pages, 64, 8]``; a copy where they are tiled."""
        if self.key_scales is None or not self.tiled_scales:
            return self.key_scales
        return linear_pages(self.key_scales, self.key_cache.shape[0])

    @property
    def device(self) -> torch.device:
        """Device of every tensor of the call."""
        return self.scores.device


@dataclass(frozen=True, slots=True)
class WriteProblem:
    """Rows to quantize and where each goes; outputs have a first dimension of pages or of rows.

    A validated half of one call of `quantize_write_nvfp4`: its keys, or its query rows.
    """

    values: torch.Tensor  # bf16, fp16 or fp32 [n, 128]
    index: torch.Tensor  # int64 [n]: a slot of the cache, or a row; negative ones are skipped
    codes: torch.Tensor  # uint8 [pages, 64, 64] or [rows, 64]
    scales: torch.Tensor  # uint8 [pages, 64, 8] or [rows, 8]

    def __repr__(self) -> str:
        return short_repr(self)
