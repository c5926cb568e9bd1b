"""Scoring problems for tests: shuffled pages, ragged lengths, poison wherever nobody may look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sdsa_kernels import indexer_scores
from sdsa_kernels.problem import ScoreCall
from sdsa_kernels.testing.compare import UNTOUCHED
from sdsa_kernels.testing.reference import reference_decode, reference_scores
from sdsa_quant.formats.nvfp4 import quantize_nvfp4
from sdsa_quant.layout import BLOCK, DIM, FORMAT_PAIRS, PACKED_DIM, PAGE, SCALES_PER_KEY
from sdsa_quant.paging import page_views, record_bytes

GARBAGE_ENTRIES = (-1, 0x7FFFFFFF, -(2**31))  # for table entries past a length
GUARDS = 3  # entries between two rows of scores
KINDS = tuple(FORMAT_PAIRS)  # query x key formats; mixed is BF16 rows against NVFP4 keys


@dataclass(frozen=True)
class Problem:
    """Arguments of one call of `indexer_scores`."""

    query: torch.Tensor
    key_cache: torch.Tensor
    block_table: torch.Tensor
    context_lengths: torch.Tensor
    requests: torch.Tensor
    scores: torch.Tensor
    query_scales: torch.Tensor | None
    key_scales: torch.Tensor | None

    def run(self, backend: str | None = None) -> torch.Tensor:
        """Call `indexer_scores` and return its output."""
        indexer_scores(
            self.query,
            self.key_cache,
            self.block_table,
            self.context_lengths,
            requests=self.requests,
            scores=self.scores,
            query_scales=self.query_scales,
            key_scales=self.key_scales,
            backend=backend,
        )
        return self.scores

    def reference(self) -> torch.Tensor:
        """float64 scores, NaN past each length."""
        return reference_scores(ScoreCall(**vars(self)))

    def replace(self, **changes: object) -> Problem:
        """The same problem with some arguments changed."""
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> Problem:
        """The same problem on another device: strides, neighbours and shared storage kept."""
        storages: dict[int, torch.Tensor] = {}
        moved = {}
        for name, tensor in vars(self).items():
            moved[name] = None if tensor is None else _to_device(tensor, device, storages)
        return Problem(**moved)

    def guards(self) -> torch.Tensor:
        """The entries of the buffer around `scores` that follow each row."""
        rows, width = self.scores.shape
        return self.scores.as_strided((rows, GUARDS), (self.scores.stride(0), 1), width)


def _to_device(
    tensor: torch.Tensor, device: torch.device | str, storages: dict[int, torch.Tensor]
) -> torch.Tensor:
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in storages:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        storages[storage.data_ptr()] = whole.to(device, copy=True)
    there = storages[storage.data_ptr()].view(tensor.dtype)
    return there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def integer_values(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """bfloat16 integers -3 to 3: their dot products are exact in any order of summation."""
    return torch.randint(-3, 4, tuple(shape), generator=generator).bfloat16()


def integer_nvfp4(
    shape: Sequence[int], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales whose values are small integers times powers of two, exact in any order."""
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator)
    exponents = torch.randint(6, 9, (*shape[:-1], shape[-1] // BLOCK), generator=generator)
    return codes.to(torch.uint8), (exponents << 3).to(torch.uint8).view(torch.float8_e4m3fn)


def gaussian_values(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """bfloat16 normal values, each block of 16 times its own power of two between 2^-4 and 2^4."""
    values = torch.randn(tuple(shape), generator=generator)
    exponents = torch.randint(-4, 5, (*shape[:-1], shape[-1] // BLOCK), generator=generator)
    return (values * torch.exp2(exponents.float()).repeat_interleave(BLOCK, -1)).bfloat16()


def make_problem(
    lengths: Sequence[int],
    *,
    generator: torch.Generator,
    kind: str = "nvfp4",
    rows_per_group: int = 1,
    max_context: int | None = None,
    integers: bool = False,
    page_pitch: int | None = None,
    separate: bool = False,
    spare_pages: int = 3,
    garbage: int = -1,
) -> Problem:
    """One group per length, each of its own request, in shuffled pages.

    Unused pages and, within a group's last page, keys past the length are poisoned: NaN scales and
    NaN keys. Table entries past a length are `garbage`, and a guard column of it follows.
    """
    groups = len(lengths)
    blocks = [-(-length // PAGE) for length in lengths]
    pages = sum(blocks) + spare_pages
    query_kind = "nvfp4" if kind == "nvfp4" else "bf16"
    values = "bf16" if kind == "bf16" else "nvfp4"

    pitch = page_pitch or record_bytes(values)
    buffer = torch.full((pages, pitch), 0xFF, dtype=torch.uint8)
    key_cache, key_scales = page_views(buffer[:, : record_bytes(values)], values)
    if separate and key_scales is not None:
        key_cache = torch.full((pages, PAGE, PACKED_DIM), 0xFF, dtype=torch.uint8)
        key_scales = torch.full((pages, PAGE, SCALES_PER_KEY), 0xFF, dtype=torch.uint8)
        key_scales = key_scales.view(torch.float8_e4m3fn)

    order = torch.randperm(pages, generator=generator).tolist()
    table = torch.full((groups, max(blocks, default=0) + 1), garbage, dtype=torch.int32)
    for group, length in enumerate(lengths):
        for block in range(blocks[group]):
            page = order.pop()
            table[group, block] = page
            count = min(length - block * PAGE, PAGE)
            _fill_page(key_cache[page], key_scales, page, count, integers, generator)

    rows = groups * rows_per_group
    query_scales = None
    if query_kind == "bf16":
        make = integer_values if integers else gaussian_values
        query = make((rows, DIM), generator)
    elif integers:
        query, query_scales = integer_nvfp4((rows, DIM), generator)
    else:
        query, query_scales = quantize_nvfp4(gaussian_values((rows, DIM), generator))

    width = max_context if max_context is not None else max(lengths, default=0) + 5
    # Guard entries follow every row, so that a write past the row is seen.
    scores = torch.full((rows, width + GUARDS), UNTOUCHED)[:, :width]
    return Problem(
        query=query,
        key_cache=key_cache,
        block_table=table,
        context_lengths=torch.tensor(lengths, dtype=torch.int32),
        requests=torch.arange(groups, dtype=torch.int32),
        scores=scores,
        query_scales=query_scales,
        key_scales=key_scales,
    )


def _fill_page(
    keys: torch.Tensor,
    scales: torch.Tensor | None,
    page: int,
    count: int,
    integers: bool,
    generator: torch.Generator,
) -> None:
    if scales is None:
        make = integer_values if integers else gaussian_values
        keys[:count] = make((count, DIM), generator)
    elif integers:
        keys[:count], filled = integer_nvfp4((count, DIM), generator)
        scales[page, :count].view(torch.uint8).copy_(filled.view(torch.uint8))
    else:
        keys[:count], filled = quantize_nvfp4(gaussian_values((count, DIM), generator))
        scales[page, :count].view(torch.uint8).copy_(filled.view(torch.uint8))


def assert_scores(problem: Problem, *, exact: bool) -> None:
    """`problem.scores` equal the reference below each length and are untouched past it.

    `exact` asks for the very same numbers; otherwise an error may reach 128 * 2^-24 * sum |q k|,
    what float32 summation in any order can cost.
    """
    here = problem.to("cpu")
    scores, reference = here.scores.double(), here.reference()
    past = reference.isnan()
    assert (scores[past] == UNTOUCHED).all(), "an entry at or past a length was written"
    assert (here.guards() == UNTOUCHED).all(), "an entry past a row was written"
    if exact:
        assert torch.equal(scores[~past], reference[~past])
        return
    error, bound = (scores - reference).abs(), DIM * 2.0**-24 * _absolute_reference(here)
    assert (error[~past] <= bound[~past]).all(), f"largest error {error[~past].max()}"


def _absolute_reference(problem: Problem) -> torch.Tensor:
    """``sum |q k|`` of every score, NaN past each length."""
    decoded = ScoreCall(
        reference_decode(problem.query, problem.query_scales).abs(),
        reference_decode(problem.key_cache, problem.key_scales).abs(),
        problem.block_table,
        problem.context_lengths,
        problem.requests,
        problem.scores,
    )
    return reference_scores(decoded)
