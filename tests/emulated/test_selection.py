"""The CuTe DSL kernels of `select_top_k` end to end, on adversarial schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from kernels.selection_contract import POISON, padded

from emulator.host.emulated_launch import emulate_launch, memory_of
from emulator.host.launch_recorder import LaunchRecorder
from emulator.host.recorded_launch import Device
from emulator.host.standin import reason_unavailable
from sdsa_kernels.testing.selection import hard_rows, reference_top_k

from .recorded_calls import launch_selection

pytestmark = pytest.mark.skipif(reason_unavailable() is not None, reason=str(reason_unavailable()))
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

TILE = 8192


def select(
    recorder: LaunchRecorder,
    scores: torch.Tensor,
    lengths: Sequence[int],
    k: int,
    *,
    seeds: Sequence[int] = (0,),
    rows_per_group: int = 1,
    table: torch.Tensor | None = None,
) -> None:
    """Run the launches of a call in the emulator, and compare all outputs with the reference."""
    rows = scores.shape[0]
    tensors = {
        "scores": scores,
        "context_lengths": torch.tensor(lengths, dtype=torch.int32),
        "top_keys": torch.full((rows, k + 3), POISON, dtype=torch.int32)[:, :k],
        "top_scores": torch.full((rows, k + 1), float(POISON))[:, :k],
    }
    if table is not None:
        tensors["block_table"] = table
        tensors["requests"] = torch.arange(len(lengths), dtype=torch.int32)
    launches = recorder.record(launch_selection, tensors, table is not None)
    keys = reference_top_k(scores, lengths, k, rows_per_group=rows_per_group)
    expected = keys
    if table is not None:
        expected = reference_top_k(scores, lengths, k, rows_per_group=rows_per_group, tables=table)
    values = (
        scores.gather(1, keys.long().clamp(min=0)) if scores.shape[1] else tensors["top_scores"]
    )
    values = values.masked_fill(keys < 0, -torch.inf)
    for seed in seeds:
        memory = memory_of(launches[0])
        for launch in launches:
            emulate_launch(launch, memory, seed)
        found = {
            name: torch.from_numpy(memory[name].data.view(np.int32).copy()).view(rows, -1)
            for name in ("top_keys", "top_scores")
        }
        assert torch.equal(found["top_keys"][:, :k], expected)
        assert torch.equal(found["top_scores"][:, :k], values.view(torch.int32))
        assert (found["top_keys"][:, k:] == POISON).all()
        assert (found["top_scores"][:, k:].view(torch.float32) == POISON).all()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def test_short_rows(hopper: LaunchRecorder, generator: torch.Generator) -> None:
    lengths = [0, 1, 6, 7, 8, 64, 0, 65, 700]
    scores = padded([torch.randn(length, generator=generator) for length in lengths], 700)
    select(hopper, scores, lengths, 7, seeds=(0, 1, 2))


def test_long_rows(hopper: LaunchRecorder, generator: torch.Generator) -> None:
    """Rows of one tile and more, of several programs, and some that need no threshold."""
    lengths = [TILE, 3 * TILE + 1, 100, 0, TILE + 1, 5]
    scores = padded([torch.randn(length, generator=generator) for length in lengths], 3 * TILE + 9)
    select(hopper, scores, lengths, 300, seeds=(0, 5))


def test_hard_rows(hopper: LaunchRecorder, generator: torch.Generator) -> None:
    length = TILE + 100
    rows = list(hard_rows(length, 257, generator).values())
    select(hopper, padded(rows, length), [length] * len(rows), 257)


def test_slots_of_groups(hopper: LaunchRecorder, generator: torch.Generator) -> None:
    lengths = [130, 64, 9000]
    scores = torch.randn(6, 9024, generator=generator)
    table = torch.randperm(3 * 141, generator=generator).view(3, 141).int()
    select(hopper, scores, lengths, 100, rows_per_group=2, table=table)


@pytest.fixture(scope="module")
def blackwell() -> Iterator[LaunchRecorder]:
    with LaunchRecorder(Device(capability=(10, 0), multiprocessors=2)) as recorder:
        yield recorder


def test_later_gpus(blackwell: LaunchRecorder, generator: torch.Generator) -> None:
    lengths = [TILE + 77, 300]
    scores = padded([torch.randn(length, generator=generator) for length in lengths], TILE + 80)
    select(blackwell, scores, lengths, 64)
