"""Random scoring calls of a given shape, as many as a rotation needs, for measurements.

Every call of a rotation reads pages of its own, in random order, out of one interleaved cache; they
share the query rows, the lengths and the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sdsa_kernels.checks import check_scores_call
from sdsa_kernels.device import available_bytes
from sdsa_kernels.problem import ScoreCall, ScoreProblem
from sdsa_quant.errors import UnsupportedError
from sdsa_quant.formats.scale_order import linear_to_128x4
from sdsa_quant.layout import BF16, DIM, FORMAT_PAIRS, NVFP4, PACKED_DIM, PAGE, SCALES_PER_KEY
from sdsa_quant.paging import page_views, record_bytes

from .compare import UNTOUCHED

_LEAST_SCALE, _PAST_SCALES = 0x28, 0x40  # E4M3 bytes of 0.125 to 1.875

# Of exact problems.
_LARGEST_INTEGER = 3
_FIRST_EXPONENTS = (1, 4, 7, 10, 13)  # of three neighbours: all 15 that a normal number can have
_MANTISSAS = 8
_SCALE_BYTES = 0x7F  # 0 to 0x7E: every number that is not negative
_STRIDE = 37  # prime to their number: neighbouring keys have scales far apart
_EVERY = 4  # one key in so many has eight blocks that count, the others have one
_SEED = 20261130


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one call."""

    lengths: tuple[int, ...]  # keys of each group
    rows_per_group: int
    max_context: int

    @property
    def rows(self) -> int:
        return len(self.lengths) * self.rows_per_group

    @property
    def blocks(self) -> list[int]:
        """Pages of each group."""
        return [-(-min(length, self.max_context) // PAGE) for length in self.lengths]


def synthetic_problems(
    shape: Shape, format_pair: str, device: torch.device, *, rotations: int, seed: int
) -> list[ScoreProblem]:
    """`rotations` calls of one shape on `device`, reproducible from `seed`.

    Raises
    ------
    RuntimeError
        The device has too little free memory; the message has the bytes.
    """
    query_format, key_format = FORMAT_PAIRS[format_pair]
    pages = sum(shape.blocks) * rotations
    record = record_bytes(key_format)
    needed = pages * record + shape.rows * shape.max_context * 4
    free = available_bytes(device)
    if needed > free:
        raise UnsupportedError(
            f"a shape of {len(shape.lengths)} groups needs {needed:,} bytes for {rotations} "
            f"rotations and scores; {device} has {free:,} bytes free"
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
    order = torch.randperm(pages, device=device, generator=generator, dtype=torch.int64).int()
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
    requests = torch.arange(len(shape.lengths), dtype=torch.int32, device=device)
    scores = torch.empty((shape.rows, shape.max_context), device=device, dtype=torch.float32)
    return [
        check_scores_call(
            (query, key_cache, table, lengths, requests, scores, query_scales, key_scales)
        )
        for table in _block_tables(shape, order, rotations)
    ]


def _block_tables(shape: Shape, order: torch.Tensor, rotations: int) -> Sequence[torch.Tensor]:
    """A table for each rotation; `order` is dealt out group by group."""
    blocks = shape.blocks
    columns = torch.arange(max(blocks, default=0), device=order.device, dtype=torch.int64)
    used = columns < torch.tensor(blocks, dtype=torch.int64, device=order.device)[:, None]
    tables = []
    for part in order.view(rotations, -1):
        table = torch.full(used.shape, -1, dtype=torch.int32, device=order.device)
        table[used] = part
        tables.append(table)
    return tables


def exact_problem(
    format_pair: str,
    device: torch.device,
    lengths: Sequence[int],
    *,
    rows_per_group: int,
    pages: int = 61,
) -> ScoreProblem:
    """A checked call with one group per length, its scores filled with `UNTOUCHED`.

    Its sums are exact in float32, in whatever order, and NVFP4 scales are yet of every kind, E4M3
    bytes 0 to 0x7E: three keys in four have one block that is not zero, of any scale, in any of the
    eight blocks; the fourth has eight of scales 0.5, 1 and 2. A query row's scales differ by their
    exponent, by at most 4 times. So a score is a whole number below 2^23 of some power of two.

    Parameters
    ----------
    format_pair : str
        A key of `FORMAT_PAIRS`.
    device : torch.device
        Of every tensor.
    lengths : sequence of int
        Keys of each group.
    rows_per_group : int
        1 to 8.
    pages : int
        Pages that the block table lists, in random order and repeatedly.
    """
    query_format, key_format = FORMAT_PAIRS[format_pair]
    generator = torch.Generator().manual_seed(_SEED)
    rows = len(lengths) * rows_per_group
    records = torch.zeros((pages, record_bytes(key_format)), dtype=torch.uint8, device="cpu")
    key_cache, key_scales = page_views(records, key_format)
    if key_scales is None:
        _fill_integers(key_cache, generator)
    else:
        _fill_keys(key_cache, key_scales.view(torch.uint8), generator)
    if query_format == NVFP4:
        query = torch.empty((rows, PACKED_DIM), dtype=torch.uint8, device="cpu")
        query.random_(0, 256, generator=generator)
        query_scales = _query_scales(rows, generator)
    else:
        query, query_scales = torch.empty((rows, DIM), dtype=torch.bfloat16, device="cpu"), None
        _fill_integers(query, generator)
    blocks = -(-max(lengths) // PAGE)
    table = torch.randint(
        0, pages, (len(lengths), blocks), generator=generator, dtype=torch.int64, device="cpu"
    )
    moved, scales = page_views(records.to(device), key_format)
    call = ScoreCall(
        query=query.to(device),
        key_cache=moved,
        block_table=table.int().to(device),
        context_lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        requests=torch.arange(len(lengths), dtype=torch.int32, device=device),
        scores=torch.full((rows, max(lengths) + 1), UNTOUCHED, dtype=torch.float32, device=device),
        query_scales=None if query_scales is None else query_scales.to(device),
        key_scales=scales,
    )
    return check_scores_call(call)


def with_tiled_scales(problem: ScoreProblem) -> ScoreProblem:
    """The same call with the scales of its linear pages in the 128x4 order."""
    assert problem.key_scales is not None
    tiled = linear_to_128x4(problem.key_scales.reshape(-1, SCALES_PER_KEY))
    return replace(problem, key_scales=tiled)


def _fill_integers(values: torch.Tensor, generator: torch.Generator) -> None:
    limits = -_LARGEST_INTEGER, _LARGEST_INTEGER + 1
    values.copy_(
        torch.randint(*limits, values.shape, generator=generator, dtype=torch.int64, device="cpu")
    )


def _fill_keys(codes: torch.Tensor, scales: torch.Tensor, generator: torch.Generator) -> None:
    """Random codes uint8 ``[pages, 64, 64]`` and scales ``[pages, 64, 8]`` of every byte."""
    codes.random_(0, 256, generator=generator)
    keys = torch.arange(codes.shape[0] * PAGE, device="cpu", dtype=torch.int64)
    one_block = (keys % _EVERY != 0).view(-1, PAGE)
    number = keys - keys // _EVERY - 1  # among the keys of one block, for those
    block = number % SCALES_PER_KEY
    counts = torch.arange(SCALES_PER_KEY, device="cpu", dtype=torch.int64) == block[:, None]
    left_out = one_block[..., None] & ~counts.view(*one_block.shape, SCALES_PER_KEY)
    codes.unflatten(-1, (SCALES_PER_KEY, -1)).masked_fill_(left_out[..., None], 0)
    tame = 0x30 + 8 * torch.randint(
        0, 3, scales.shape, generator=generator, device="cpu", dtype=torch.int64
    )
    any_byte = (number * _STRIDE % _SCALE_BYTES).view(*one_block.shape, 1).expand_as(scales)
    scales.copy_(torch.where(one_block[..., None], any_byte, tame))


def _query_scales(rows: int, generator: torch.Generator) -> torch.Tensor:
    """float8_e4m3fn ``[rows, 8]``, one mantissa and neighbouring exponents a row, in turn all.

    A subnormal number has no neighbour with its digits: those rows have one scale, or 0.
    """
    shape = (rows, SCALES_PER_KEY)
    number = torch.arange(rows, device="cpu", dtype=torch.int64) * _STRIDE
    mantissa = (number % _MANTISSAS)[:, None]
    firsts = torch.tensor([0, *_FIRST_EXPONENTS], dtype=torch.int64, device="cpu")
    first = firsts[number // _MANTISSAS % len(firsts)][:, None]
    step = torch.randint(0, 3, shape, generator=generator, device="cpu", dtype=torch.int64)
    subnormal = torch.where(step == 0, 0, mantissa)
    scale_bytes = torch.where(first == 0, subnormal, (first + step) * _MANTISSAS + mantissa)
    # The last mantissa with the last exponent is NaN.
    scale_bytes = torch.where(scale_bytes == _SCALE_BYTES, scale_bytes - _MANTISSAS, scale_bytes)
    return scale_bytes.to(torch.uint8).view(torch.float8_e4m3fn)
