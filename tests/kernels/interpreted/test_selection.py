"""The selecting kernels under Triton's interpreter: the selection contract."""

from __future__ import annotations

import pytest
import torch
from kernels.selection_contract import EDGES, check_hard_rows, check_selection, padded

from sdsa_kernels import select_top_k
from sdsa_kernels.testing.selection import reference_top_k


@pytest.mark.parametrize(("lengths", "k"), EDGES, ids=lambda value: str(value))
def test_lengths_around_k(generator: torch.Generator, lengths: list[int], k: int) -> None:
    rows = [torch.randn(length, generator=generator) for length in lengths]
    check_selection(padded(rows, max(lengths)), lengths, k, backend="triton")


# One block of scores; two blocks; a threshold and candidates; more candidates than a block.
@pytest.mark.parametrize(
    ("length", "k"), [(200, 64), (8192, 300), (20_000, 500), (20_001, 6000)], ids=str
)
def test_hard_rows(generator: torch.Generator, length: int, k: int) -> None:
    check_hard_rows(length, k, generator, backend="triton")


def test_long_and_short_rows_share_the_programs(generator: torch.Generator) -> None:
    lengths = [8193, 0, 100, 30_000, 8192, 9000, 1, 12_288]
    rows = [torch.randn(length, generator=generator) for length in lengths]
    check_selection(padded(rows, 30_000), lengths, 700, backend="triton")


def test_more_rows_than_are_looked_at_at_once(generator: torch.Generator) -> None:
    lengths = [0, 5] * 550
    for row in (3, 1023, 1024, 1099):
        lengths[row] = 8_200 + row
    rows = [torch.randn(length, generator=generator) for length in lengths]
    check_selection(padded(rows, 9_400), lengths, 20, backend="triton")


def test_rows_of_a_group_and_slots(generator: torch.Generator) -> None:
    scores = torch.randn(6, 9000, generator=generator)
    table = torch.randperm(300, generator=generator)[:282].view(2, 141).int()
    keys = torch.empty(6, 99, dtype=torch.int32)
    select_top_k(
        scores,
        torch.tensor([9000, 40], dtype=torch.int32),
        top_keys=keys,
        block_table=table,
        requests=torch.tensor([1, 0], dtype=torch.int32),
        slots=True,
        backend="triton",
    )
    expected = reference_top_k(scores, [9000, 40], 99, rows_per_group=3, tables=table.flip(0))
    assert torch.equal(keys, expected)
