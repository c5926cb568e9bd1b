"""Random scoring calls whose scores are exact: every right kernel gives the very same bits.

Values are small integers times powers of two, so that no product and no sum of 128 of them is ever
rounded in float32. Pages are few and listed many times, so that a long call needs little memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sdsa_kernels.checks import NVFP4, ScoreProblem, check_scores_call
from sdsa_quant.formats.scale_order import linear_to_128x4
from sdsa_quant.layout import DIM, PACKED_DIM, PAGE, SCALES_PER_KEY
from sdsa_quant.paging import page_views, record_bytes

from .compare import UNTOUCHED
from .problems import FORMATS

_LARGEST_INTEGER = 3
_SCALE_BYTES = (0x30, 0x38, 0x40)  # E4M3 of 0.5, 1 and 2
_SEED = 20261130


def exact_problem(
    values: str,
    device: torch.device,
    lengths: Sequence[int],
    *,
    rows_per_group: int,
    pages: int = 61,
) -> ScoreProblem:
    """A checked call with one group per length, its scores filled with `UNTOUCHED`.

    Parameters
    ----------
    values : str
        A key of `synthetic.FORMATS`.
    device : torch.device
        Of every tensor.
    lengths : sequence of int
        Keys of each group.
    rows_per_group : int
        1 to 8.
    pages : int
        Pages that the block table lists, in random order and repeatedly.
    """
    query_format, key_format = FORMATS[values]
    generator = torch.Generator().manual_seed(_SEED)
    rows = len(lengths) * rows_per_group
    records = torch.zeros((pages, record_bytes(key_format)), dtype=torch.uint8)
    key_cache, key_scales = page_views(records, key_format)
    _fill(key_cache, key_scales, generator)
    if query_format == NVFP4:
        query = torch.empty((rows, PACKED_DIM), dtype=torch.uint8)
        query_scales = torch.empty((rows, SCALES_PER_KEY), dtype=torch.float8_e4m3fn)
    else:
        query, query_scales = torch.empty((rows, DIM), dtype=torch.bfloat16), None
    _fill(query, query_scales, generator)
    blocks = -(-max(lengths) // PAGE)
    table = torch.randint(0, pages, (len(lengths), blocks), generator=generator)
    moved, scales = page_views(records.to(device), key_format)
    return check_scores_call(
        query.to(device),
        moved,
        table.int().to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.arange(len(lengths), dtype=torch.int32, device=device),
        torch.full((rows, max(lengths) + 1), UNTOUCHED, device=device),
        None if query_scales is None else query_scales.to(device),
        scales,
    )


def with_tiled_scales(problem: ScoreProblem) -> ScoreProblem:
    """The same call with the scales of its linear pages in the 128x4 order."""
    assert problem.key_scales is not None
    tiled = linear_to_128x4(problem.key_scales.reshape(-1, SCALES_PER_KEY))
    return replace(problem, key_scales=tiled)


def _fill(values: torch.Tensor, scales: torch.Tensor | None, generator: torch.Generator) -> None:
    if scales is None:
        limits = -_LARGEST_INTEGER, _LARGEST_INTEGER + 1
        values.copy_(torch.randint(*limits, values.shape, generator=generator))
        return
    values.random_(0, 256, generator=generator)
    choice = torch.randint(0, len(_SCALE_BYTES), scales.shape, generator=generator)
    scales.view(torch.uint8).copy_(torch.tensor(_SCALE_BYTES, dtype=torch.uint8)[choice])
