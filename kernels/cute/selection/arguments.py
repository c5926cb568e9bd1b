"""The arguments of both selecting kernels, once (see `sdsa_kernels.cute.arguments`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sdsa_kernels.cute.arguments import Record

if TYPE_CHECKING:
    from cutlass import Int32, Int64


@dataclass(frozen=True)
class SelectAddresses(Record):
    """Where the tensors of a call are; 0 for outputs and tables that it does not have."""

    scores: Int64
    context_lengths: Int64
    top_keys: Int64
    top_scores: Int64
    block_table: Int64
    requests: Int64
    above: Int64  # a bit of each score of a long row: above the row's threshold
    ties: Int64  # a bit of each score of a long row: equal to the row's threshold
    counts: Int64  # pairs of int32, [programs + rows]: how many of a segment are above and equal
    candidates: Int64  # pairs of int32, key index and order key, [programs + rows, capacity]


@dataclass(frozen=True)
class SelectSizes(Record):
    """Strides, in bytes between rows, and the sizes of a call."""

    score_stride: Int64
    top_keys_stride: Int64
    top_scores_stride: Int64
    table_stride: Int64
    rows: Int32
    rows_per_group: Int32
    max_context: Int32
    top_k: Int32
    words: Int32  # of 32 bits, of a row in `above` and in `ties`
    capacity: Int32  # candidates of a segment
    programs: Int32  # of the marking kernel
