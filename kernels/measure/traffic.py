"""How many bytes one call of `indexer_scores` must move, at least.

Per call, with ``pages(g) = ceil(min(length(g), max_context) / 64)``:

    key bytes   = sum over groups of pages(g) * record     (4,608 bytes NVFP4, 16,384 bytes BF16)
    query bytes = rows * row bytes                         (72 bytes NVFP4, 256 bytes BF16)
    score bytes = sum over groups of length(g) * rows_per_group * 4

A page counts once per group that reads it: requests shared between groups may be served by the L2
cache, which this model leaves out. Tables and lengths are left out too: they are 4 bytes a page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sdsa_kernels.testing.problems import Shape
from sdsa_quant.layout import (
    BF16_RECORD_BYTES,
    DIM,
    FORMAT_PAIRS,
    NVFP4,
    NVFP4_RECORD_BYTES,
    PACKED_DIM,
    PAGE,
    SCALES_PER_KEY,
)

_BF16_ROW_BYTES = 2 * DIM
_NVFP4_ROW_BYTES = PACKED_DIM + SCALES_PER_KEY
_SCORE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one call moves."""

    pages: int
    key_bytes: int
    query_bytes: int
    score_bytes: int

    @property
    def total_bytes(self) -> int:
        """Keys, queries and scores together."""
        return self.key_bytes + self.query_bytes + self.score_bytes

    def gigabytes_per_second(self, microseconds: float) -> float:
        """Bandwidth of a call that took `microseconds`, in 10^9 bytes per second."""
        return self.total_bytes / microseconds / 1e3 if microseconds > 0 else math.inf


def score_traffic(
    context_lengths: Sequence[int],
    *,
    rows_per_group: int,
    max_context: int,
    query_format: str,
    key_format: str,
) -> Traffic:
    """Bytes of one call.

    Parameters
    ----------
    context_lengths : sequence of int
        Keys of each group, on the host; clamped to `max_context`.
    rows_per_group : int
        Query rows of each group.
    max_context : int
        Columns of ``scores``.
    query_format, key_format : str
        ``"bf16"`` or ``"nvfp4"``.
    """
    lengths = [max(0, min(int(length), max_context)) for length in context_lengths]
    pages = sum(-(-length // PAGE) for length in lengths)
    record = NVFP4_RECORD_BYTES if key_format == NVFP4 else BF16_RECORD_BYTES
    row_bytes = _NVFP4_ROW_BYTES if query_format == NVFP4 else _BF16_ROW_BYTES
    return Traffic(
        pages=pages,
        key_bytes=pages * record,
        query_bytes=len(lengths) * rows_per_group * row_bytes,
        score_bytes=sum(lengths) * rows_per_group * _SCORE_BYTES,
    )


def shape_traffic(shape: Shape, format_pair: str) -> Traffic:
    """Bytes of one call of a shape, with `format_pair` of query rows and keys."""
    query_format, key_format = FORMAT_PAIRS[format_pair]
    return score_traffic(
        shape.lengths,
        rows_per_group=shape.rows_per_group,
        max_context=shape.max_context,
        query_format=query_format,
        key_format=key_format,
    )
