"""Random scoring calls of a given shape, as many as a rotation needs, for measurements.

Every call of a rotation reads pages of its own, in random order, out of one interleaved cache; they
share the query rows, the lengths and the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sdsa_kernels.checks import BF16, NVFP4, ScoreProblem, check_scores_call
from sdsa_kernels.measure.traffic import Traffic, score_traffic
from sdsa_kernels.memory import available_bytes
from sdsa_quant.errors import UnsupportedError
from sdsa_quant.layout import DIM, PACKED_DIM, PAGE, SCALES_PER_KEY
from sdsa_quant.paging import page_views, record_bytes

# Query format and key format of each choice of values.
FORMATS = {"bf16": (BF16, BF16), "nvfp4": (NVFP4, NVFP4), "mixed": (BF16, NVFP4)}

_LEAST_SCALE, _PAST_SCALES = 0x28, 0x40  # E4M3 bytes of 0.125 to 1.875


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one call."""

    lengths: tuple[int, ...]  # keys of each group
    rows_per_group: int
    max_context: int

    @property
    def rows(self) -> int:
        """Query rows of all groups."""
        return len(self.lengths) * self.rows_per_group

    def traffic(self, values: str) -> Traffic:
        """Bytes that one call moves with `values`, a key of `FORMATS`."""
        query_format, key_format = FORMATS[values]
        return score_traffic(
            self.lengths,
            rows_per_group=self.rows_per_group,
            max_context=self.max_context,
            query_format=query_format,
            key_format=key_format,
        )


def synthetic_problems(
    shape: Shape, values: str, device: torch.device, *, rotations: int, seed: int
) -> list[ScoreProblem]:
    """`rotations` calls of one shape on `device`, reproducible from `seed`.

    Raises
    ------
    RuntimeError
        The device has too little free memory; the message has the bytes.
    """
    query_format, key_format = FORMATS[values]
    pages = shape.traffic(values).pages * rotations
    record = record_bytes(key_format)
    needed = pages * record + shape.rows * shape.max_context * 4
    free = available_bytes(device)
    if needed > free:
        raise UnsupportedError(
            f"a shape of {len(shape.lengths)} groups needs {needed:,} bytes for {rotations} "
            f"rotations and scores, {device} has {free:,} bytes free"
        )
    generator = torch.Generator(device).manual_seed(seed)
    buffer = torch.empty((pages, record), dtype=torch.uint8, device=device)
    key_cache, key_scales = page_views(buffer, key_format)
    if key_scales is None:
        key_cache.normal_(generator=generator)
    else:
        buffer.random_(0, 256, generator=generator)
        key_scales.view(torch.uint8).random_(_LEAST_SCALE, _PAST_SCALES, generator=generator)
    query_scales = None
    if query_format == BF16:
        query = torch.empty((shape.rows, DIM), dtype=torch.bfloat16, device=device)
        query.normal_(generator=generator)
    else:
        query = torch.empty((shape.rows, PACKED_DIM), dtype=torch.uint8, device=device)
        query.random_(0, 256, generator=generator)
        query_scales = query.new_empty((shape.rows, SCALES_PER_KEY))
        query_scales.random_(_LEAST_SCALE, _PAST_SCALES, generator=generator)
    order = torch.randperm(pages, device=device, generator=generator).int()
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
    requests = torch.arange(len(shape.lengths), dtype=torch.int32, device=device)
    scores = torch.empty((shape.rows, shape.max_context), device=device)
    return [
        check_scores_call(
            query, key_cache, table, lengths, requests, scores, query_scales, key_scales
        )
        for table in _block_tables(shape, order, rotations)
    ]


def _block_tables(shape: Shape, order: torch.Tensor, rotations: int) -> Sequence[torch.Tensor]:
    """A table for each rotation; `order` is dealt out group by group."""
    blocks = [-(-min(length, shape.max_context) // PAGE) for length in shape.lengths]
    columns = torch.arange(max(blocks, default=0), device=order.device)
    used = columns < torch.tensor(blocks, device=order.device)[:, None]
    tables = []
    for part in order.view(rotations, -1):
        table = torch.full(used.shape, -1, dtype=torch.int32, device=order.device)
        table[used] = part
        tables.append(table)
    return tables
