"""What a format does to query rows: lost blocks, and rows that are of no use any more.

Query rows that carry a softmax scale or the weights of heads are small enough for NVFP4 to flush
them to zero, and large ones saturate. Their scores are then wrong, whatever the keys are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sdsa_quant.formats.nvfp4 import dequantize_nvfp4
from sdsa_quant.layout import HIGH_QUERY_ERROR

from .blocks import BlockStatistics


@dataclass(frozen=True, slots=True)
class QueryLoss:
    """What NVFP4 does to the blocks of query rows, and to the rows."""

    blocks: int
    """Blocks of 16 values of all rows, after the cache's transform."""

    flushed: int
    """Blocks with a nonzero value whose scale is 0, so that every value is lost."""

    subnormal: int
    """Blocks with a subnormal scale, below 2^-6."""

    saturated: int
    """Blocks with a magnitude above 2688."""

    relative_error: float
    """Relative L2 error of all rows together."""

    rows_lost: int
    """Rows with a relative L2 error above 0.25."""

    first_lost: int | None
    """Index of the first of them; null without any."""

    def share(self, count: int) -> float:
        """`count` as a share of all blocks, 0 where there are none."""
        return count / self.blocks if self.blocks else 0.0


def query_loss(query: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> QueryLoss:
    """What was lost of query rows that were quantized.

    Parameters
    ----------
    query : torch.Tensor
        Floating point ``[rows, 128]``, finite, before quantization.
    codes, scales : torch.Tensor
        uint8 ``[rows, 64]`` and float8_e4m3fn ``[rows, 8]``.
    """
    statistics = BlockStatistics()
    statistics.add_nvfp4(query, codes, scales)
    lost = rows_lost(query, dequantize_nvfp4(codes, scales, torch.float64)).nonzero().flatten()
    return QueryLoss(
        blocks=statistics.blocks,
        flushed=statistics.flushed,
        subnormal=statistics.subnormal,
        saturated=statistics.saturated,
        relative_error=statistics.relative_error,
        rows_lost=lost.shape[0],
        first_lost=int(lost[0]) if lost.shape[0] else None,
    )


def rows_lost(query: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """bool ``[rows]``: whether a row's relative L2 error is above 0.25.

    Parameters
    ----------
    query, stored : torch.Tensor
        Floating point ``[rows, ..]``, before and after; a row may have several heads.
    """
    exact = query.double().flatten(1)
    error = stored.double().flatten(1).sub(exact)
    limit = HIGH_QUERY_ERROR * torch.linalg.vector_norm(exact, dim=1)
    return torch.linalg.vector_norm(error, dim=1) > limit
