"""The `cute` backend's kernels in the emulator: the scores contract, in small.

The warp-MMA kernels as they run on SM90, and the tensor-core kernels as they run on SM100, these
also with key scales in the 128x4 order. A call's values fix the schedule that it runs on.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from kernels.contract import LINEAR_SCALES_ONLY, UNSIGNED_SCALES, ScoresContract, Where

from emulator.host.launch_recorder import LaunchRecorder
from emulator.host.recorded_launch import Launch
from emulator.host.standin import reason_unavailable
from emulator.machine.scheduler import POLICIES
from sdsa_quant.formats.scale_order import linear_to_128x4
from support.problems import Problem

from .recorded_calls import launch_scores
from .tcgen05_calls import RecordedCall, launch_tensor_core

pytestmark = pytest.mark.skipif(
    reason_unavailable() is not None, reason=f"the stand-in {reason_unavailable()}"
)

HOST = "launched past the checks, which the other backends are asked about"
SMALL: dict[str, Any] = {"lengths": ("around-a-page",), "most_scores": 5000, "repeats": 1}
TENSOR_CORES = {
    "test_unaligned_keys_are_refused": HOST,
    "test_empty_calls": "nothing is launched, as on SM90",
    "test_negative_scale_bytes_are_decoded": UNSIGNED_SCALES,
    "test_finding_a_share_among_many_groups": "test_more_groups_than_a_warp_has_lanes asks it",
}


@dataclass(frozen=True)
class WarpKernels(Where):
    """The warp-MMA kernels of an SM90 with two multiprocessors."""

    recorders: ClassVar[list[LaunchRecorder]] = []

    def run(self, problem: Problem) -> Problem:
        return emulated(problem, self.recorders[0].record(launch_scores, problem))


@dataclass(frozen=True)
class TensorCoreKernels(Where):
    """The tensor-core kernels of an SM100, of which a few CTAs do all the work."""

    tiled: bool = False  # whether it gets the key scales of every problem in the 128x4 order
    recorders: ClassVar[list[LaunchRecorder]] = []

    def run(self, problem: Problem) -> Problem:
        called = problem
        if self.tiled and problem.key_scales is not None:
            scales = problem.key_scales.reshape(-1, problem.key_scales.shape[-1])
            called = problem.replace(key_scales=linear_to_128x4(scales))
        scored = emulated(called, self.recorders[0].record(launch_tensor_core, called, None))
        return scored.replace(key_scales=problem.key_scales)


def emulated(problem: Problem, launches: list[Launch]) -> Problem:
    """A problem after its launch, on a schedule that follows from its values."""
    seed = zlib.crc32(problem.query.contiguous().view(torch.uint8).numpy()) % len(POLICIES)
    for launch in launches:
        problem, _ = RecordedCall(problem, launch).run(seed)
    return problem


class TestScores(ScoresContract):
    wheres = (
        WarpKernels(
            "sm90",
            rows=(1, 2, 3, 8),
            declined={
                "test_unaligned_keys_are_refused": HOST,
                "test_scales_in_the_128x4_order": HOST,
            },
            **SMALL,
        ),
        TensorCoreKernels(
            "sm100", kinds=("bf16", "nvfp4"), takes_128x4=True, declined=TENSOR_CORES, **SMALL
        ),
        TensorCoreKernels(
            "sm100-128x4",
            kinds=("nvfp4",),
            tiled=True,
            declined={
                **TENSOR_CORES,
                "test_scales_in_the_128x4_order": "every question to it is about them",
                "test_separate_keys_and_scales": LINEAR_SCALES_ONLY,
                "test_scales_at_an_odd_multiple_of_8_bytes": LINEAR_SCALES_ONLY,
            },
            **SMALL,
        ),
    )

    @pytest.fixture(autouse=True)
    def _recorders(self, hopper: LaunchRecorder, recorder: LaunchRecorder) -> None:
        WarpKernels.recorders[:] = [hopper]
        TensorCoreKernels.recorders[:] = [recorder]
