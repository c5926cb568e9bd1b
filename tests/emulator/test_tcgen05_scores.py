"""The tensor-core kernels, executed: their PTX in the emulator, launched by the real host code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from emulator.launch_recorder import LaunchRecorder
from emulator.standin import reason_unavailable
from emulator.tcgen05_calls import record_call
from problems import Problem, assert_scores, make_problem
from sdsa_quant.scale_order import linear_to_128x4

pytestmark = pytest.mark.skipif(
    reason_unavailable() is not None, reason=f"the stand-in {reason_unavailable()}"
)

VALUES = ("nvfp4", "bf16", "tiled")  # tiled is NVFP4 with scales in the 128x4 order
EDGES = (0, 1, 63, 64, 65, 127, 128, 129)
SCHEDULES = 20
FEW_SCHEDULES = 3


def _problem(values: str, lengths: Sequence[int], seed: int = 0, **options: object) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    kind = "bf16" if values == "bf16" else "nvfp4"
    problem = make_problem(lengths, generator=generator, kind=kind, **options)  # type: ignore[arg-type]
    if values != "tiled":
        return problem
    assert problem.key_scales is not None
    scales = problem.key_scales.reshape(-1, problem.key_scales.shape[-1])
    return problem.replace(key_scales=linear_to_128x4(scales))


def _assert_scores(
    recorder: LaunchRecorder,
    problem: Problem,
    *,
    exact: bool,
    seeds: Sequence[int],
    ctas: int | None = None,
) -> None:
    call = record_call(recorder, problem, ctas)
    for seed in seeds:
        scored, _ = call.run(seed)
        assert_scores(scored, exact=exact)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_every_edge_of_a_tile(recorder: LaunchRecorder, values: str, rows: int) -> None:
    problem = _problem(values, EDGES, rows_per_group=rows, integers=True)
    _assert_scores(recorder, problem, exact=True, seeds=range(rows, rows + FEW_SCHEDULES))
