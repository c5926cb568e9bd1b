"""The SM90 kernels, launched by their real host code, give the bits of an H200 in the emulator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emulator.host.emulated_launch import emulate_launch, memory_of
from emulator.host.launch_recorder import LaunchRecorder
from emulator.host.standin import reason_unavailable
from emulator.machine.memory import Region
from emulator.probes.h200_record import h200_record

from .recorded_calls import launch_scores
from .score_calls import CALLS, ScoreCall, digest, make_call

pytestmark = pytest.mark.skipif(reason_unavailable() is not None, reason=str(reason_unavailable()))
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

SEEDS = (0, 5)  # of the schedule


def _view(region: Region, scores: torch.Tensor) -> np.ndarray:
    """The bits of the scores in a region that is their storage."""
    words = region.data.view(np.int32)[scores.storage_offset() :]
    strides = tuple(4 * stride for stride in scores.stride())
    return np.lib.stride_tricks.as_strided(words, scores.shape, strides)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("call", CALLS, ids=[call.name for call in CALLS])
def test_scores_are_those_of_an_h200(hopper: LaunchRecorder, call: ScoreCall, seed: int) -> None:
    record = h200_record()
    problem = make_call(call)
    assert digest(problem) == record.digests[f"scores/{call.name}"]
    (launch,) = hopper.record(launch_scores, problem)
    assert call.variant in launch.kernel
    memory = memory_of(launch)
    emulate_launch(launch, memory, seed)
    got = _view(memory["scores"], problem.scores)
    assert np.array_equal(got, record.outputs[f"scores/{call.name}"])
