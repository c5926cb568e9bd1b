"""The pass loop: every row once, in passes of a bounded size, with one workspace for all."""

from __future__ import annotations

import pytest
import torch

from sdsa_quant.formats import blocks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rows", "width", "sizes"),
    [
        (0, 16, []),
        (1, 16, [1]),
        (6, 16, [6]),
        (13, 16, [6, 6, 1]),
        (3, 97, [1, 1, 1]),  # a row is never cut
        (200, 0, [100, 100]),  # rows without values take no memory, and are passed all the same
    ],
    ids=["none", "one", "one pass", "a rest", "wide", "empty rows"],
)
def test_every_row_is_in_one_pass(
    rows: int, width: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "values_per_pass", lambda device: 100)
    found = [part for part, _ in blocks.passes(rows, width, CPU)]
    covered = [row for part in found for row in range(rows)[part]]
    assert covered == list(range(rows))
    assert [len(range(rows)[part]) for part in found] == sizes


def test_passes_share_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "values_per_pass", lambda device: 100)
    memories = [memory for _, memory in blocks.passes(13, 16, CPU, workspace=3)]
    assert {memory.data_ptr() for memory in memories} == {memories[0].data_ptr()}
    assert {(memory.dtype, memory.numel()) for memory in memories} == {(torch.int32, 3 * 6 * 16)}
