"""Bytes that one call of `indexer_scores` has to move.

Every group reads the pages of its keys whole, also the last one, and each of its rows' queries;
it writes four bytes for each score. Two groups of one request read the same pages twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sdsa_quant.layout import DIM, PACKED_DIM, PAGE, SCALES_PER_KEY
from sdsa_quant.paging import NVFP4, record_bytes

_BF16_BYTES = 2
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one call reads and writes."""

    pages: int  # read, counted once for each group
    key_bytes: int  # codes and scales, or BF16 keys
    query_bytes: int
    score_bytes: int

    @property
    def total_bytes(self) -> int:
        """Keys, queries and scores together."""
        return self.key_bytes + self.query_bytes + self.score_bytes


def query_row_bytes(query_format: str) -> int:
    """Bytes of one query row: 72 for NVFP4, 256 for BF16."""
    return PACKED_DIM + SCALES_PER_KEY if query_format == NVFP4 else DIM * _BF16_BYTES


def scores_bytes(rows: int, max_context: int) -> int:
    """Bytes of a scores buffer of that many rows and columns."""
    return rows * max_context * _FLOAT32_BYTES


def call_traffic(
    context_lengths: Sequence[int], rows_per_group: int, key_format: str, query_format: str
) -> Traffic:
    """Traffic of one call over groups of these lengths, in keys."""
    pages = sum(-(-length // PAGE) for length in context_lengths)
    rows = rows_per_group * len(context_lengths)
    return Traffic(
        pages=pages,
        key_bytes=pages * record_bytes(key_format),
        query_bytes=rows * query_row_bytes(query_format),
        score_bytes=scores_bytes(rows_per_group, sum(context_lengths)),
    )
