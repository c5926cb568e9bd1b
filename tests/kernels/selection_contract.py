"""What a selection must be, asked of each backend wherever it runs: rows, and what to compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sdsa_kernels import select_top_k
from sdsa_kernels.testing.selection import hard_rows, reference_top_k

GARBAGE = torch.tensor([torch.nan, torch.inf, 3e38, 12345.0])
GUARDS = 3
POISON = -77

# Lengths and numbers of keys: nothing, one, around k, around what a tile of a kernel holds.
EDGES = (
    ([0, 1, 6, 7, 8, 64, 0, 65], 7),
    ([0, 1, 2, 100], 1),
    ([63, 64, 65, 300, 4095, 4096, 4097], 64),
    ([5000, 200, 0], 65_535),
)


def padded(rows: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """float32 ``[rows, width]`` with a row stride of its own and garbage past each row."""
    count = len(rows)
    whole = GARBAGE.repeat(count * (width + 5) // 4 + 1)[: count * (width + 5)]
    scores = whole.clone().view(count, width + 5)[:, :width]
    for row, values in enumerate(rows):
        scores[row, : values.shape[0]] = values
    return scores


def check_selection(
    scores: torch.Tensor,
    lengths: Sequence[int],
    k: int,
    *,
    backend: str,
    device: str = "cpu",
    rows_per_group: int = 1,
) -> None:
    """Select with guards around the outputs, and compare all of them with the reference."""
    rows = scores.shape[0]
    keys = torch.full((rows, k + GUARDS), POISON, dtype=torch.int32, device=device)
    values = torch.full((rows, k + GUARDS), float(POISON), device=device)
    there = torch.empty_strided(scores.shape, scores.stride(), device=device).copy_(scores)
    select_top_k(
        there,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        top_keys=keys[:, :k],
        top_scores=values[:, :k],
        backend=backend,
    )
    keys, values = keys.cpu(), values.cpu()
    expected = reference_top_k(scores, lengths, k, rows_per_group=rows_per_group)
    assert torch.equal(keys[:, :k], expected)
    assert (keys[:, k:] == POISON).all()
    assert (values[:, k:] == POISON).all()
    found = scores.gather(1, expected.long().clamp(min=0)) if scores.shape[1] else values[:, :k]
    found = found.masked_fill(expected < 0, -torch.inf)
    assert torch.equal(values[:, :k].view(torch.int32), found.view(torch.int32))


def check_hard_rows(
    length: int, k: int, generator: torch.Generator, *, backend: str, device: str = "cpu"
) -> None:
    """`check_selection` of every hard row of a length."""
    rows = list(hard_rows(length, k, generator).values())
    check_selection(padded(rows, length), [length] * len(rows), k, backend=backend, device=device)
