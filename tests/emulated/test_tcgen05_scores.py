"""The tensor-core kernels, executed: their PTX in the emulator, launched by the real host code.

What every backend is asked is in the scores contract (`test_scores_contract`), on one schedule.
Here are the shares of CTAs, runs and warps on one schedule too; and with
``pytest -m large tests/emulated/test_tcgen05_scores.py`` everything on 20, and long contexts.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from emulator.host.launch_recorder import LaunchRecorder
from emulator.host.recorded_launch import Device
from emulator.host.standin import reason_unavailable
from sdsa_quant.formats.scale_order import linear_to_128x4
from support.problems import GARBAGE_ENTRIES, Problem, assert_scores, make_problem

from .tcgen05_calls import RecordedCall, launch_planned, record_call

pytestmark = pytest.mark.skipif(
    reason_unavailable() is not None, reason=f"the stand-in {reason_unavailable()}"
)

VALUES = ("nvfp4", "bf16", "tiled")  # tiled is NVFP4 with scales in the 128x4 order
EDGES = (0, 1, 63, 64, 65, 127, 128, 129)
MANY = 20

# How many schedules a case runs on; which policies these have follows from the case.
on_schedules = pytest.mark.parametrize(
    "schedules", [1, pytest.param(MANY, marks=pytest.mark.large)], ids=["one-schedule", "many"]
)


def _problem(values: str, lengths: Sequence[int], **options: object) -> Problem:
    """A problem whose scales are linear; see `_run` for tiled ones."""
    seed = options.pop("seed", 0)
    generator = torch.Generator().manual_seed(seed)
    kind = "bf16" if values == "bf16" else "nvfp4"
    return make_problem(lengths, generator=generator, kind=kind, **options)


def _run(
    recorder: LaunchRecorder,
    values: str,
    problem: Problem,
    *,
    exact: bool,
    seeds: Sequence[int],
    ctas: int | None = None,
) -> None:
    """Run a problem on some schedules, and hold each result against float64."""
    called = problem
    if values == "tiled":
        assert problem.key_scales is not None
        scales = problem.key_scales.reshape(-1, problem.key_scales.shape[-1])
        called = problem.replace(key_scales=linear_to_128x4(scales))
    call = record_call(recorder, called, ctas)
    for seed in seeds:
        scored, _ = call.run(seed)
        assert_scores(problem.replace(scores=scored.scores), exact=exact)


@pytest.mark.large
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("rows", range(1, 9))
def test_every_edge_of_a_tile(recorder: LaunchRecorder, values: str, rows: int) -> None:
    problem = _problem(values, EDGES, rows_per_group=rows, integers=True)
    seeds = range(rows, rows + MANY)
    _run(recorder, values, problem, exact=True, seeds=seeds)


@pytest.mark.large
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("rows", [1, 5])
def test_values_that_are_rounded(recorder: LaunchRecorder, values: str, rows: int) -> None:
    problem = _problem(values, [129, 64, 200], rows_per_group=rows)
    _run(recorder, values, problem, exact=False, seeds=range(rows, rows + MANY))


@on_schedules
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("ctas", [1, 2, 5])
def test_groups_of_a_cta_and_ctas_of_a_group(
    recorder: LaunchRecorder, values: str, ctas: int, schedules: int
) -> None:
    # Shares end inside of groups and inside of tiles; a CTA has more tiles than stages.
    problem = _problem(values, [700, 40, 0, 129, 330], rows_per_group=2, integers=True)
    _run(recorder, values, problem, exact=True, seeds=range(ctas, ctas + schedules), ctas=ctas)


@on_schedules
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("length", [1, 600])
def test_a_single_group(recorder: LaunchRecorder, values: str, length: int, schedules: int) -> None:
    problem = _problem(values, [length], rows_per_group=4, integers=True)
    _run(recorder, values, problem, exact=True, seeds=range(length, length + schedules), ctas=3)


@on_schedules
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("lengths", [[4300], [4100, 90]], ids=["one-group", "two-groups"])
def test_long_runs_and_late_ctas(
    recorder: LaunchRecorder, values: str, lengths: list[int], schedules: int
) -> None:
    # A warp holds 32 table entries at a time; a second CTA takes the last 16th of the list.
    problem = _problem(values, lengths, rows_per_group=1, integers=True)
    _run(recorder, values, problem, exact=True, seeds=range(schedules), ctas=1)


@pytest.mark.large
@pytest.mark.parametrize("garbage", GARBAGE_ENTRIES)
@pytest.mark.parametrize(
    ("values", "pitch", "separate"),
    [
        ("nvfp4", 4624, False),
        ("nvfp4", 9216, False),
        ("nvfp4", None, True),
        ("tiled", None, True),
        ("bf16", 16_400, False),
        ("bf16", 40_960, False),
    ],
)
def test_pitches_layouts_and_tables(
    recorder: LaunchRecorder,
    values: str,
    pitch: int | None,
    separate: bool,
    garbage: int,
) -> None:
    problem = _problem(
        values,
        [130, 0, 64, 193],
        rows_per_group=3,
        integers=True,
        page_pitch=pitch,
        separate=separate,
        garbage=garbage,
    )
    seeds = range(abs(garbage) % 8, abs(garbage) % 8 + MANY)
    _run(recorder, values, problem, exact=True, seeds=seeds, ctas=2)


@on_schedules
@pytest.mark.parametrize("values", VALUES)
def test_lengths_are_clamped_and_rows_may_be_wide(
    recorder: LaunchRecorder, values: str, schedules: int
) -> None:
    problem = _problem(values, [300, 70, 129], rows_per_group=2, integers=True, max_context=128)
    _run(recorder, values, problem, exact=True, seeds=range(schedules), ctas=1)
    wide = _problem(values, [1, 65], rows_per_group=1, integers=True, max_context=1 << 16)
    _run(recorder, values, wide, exact=True, seeds=range(schedules))


@on_schedules
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("groups", [33, 200, 2100])
def test_more_groups_than_a_warp_has_lanes(
    recorder: LaunchRecorder, values: str, groups: int, schedules: int
) -> None:
    # Few of them have keys: the first and last ones, and some in between.
    lengths = [0] * groups
    for group, length in ((0, 65), (31, 1), (32, 130), (groups // 2, 70), (groups - 1, 64)):
        lengths[group] = length
    problem = _problem(values, lengths, rows_per_group=1, integers=True)
    _run(recorder, values, problem, exact=True, seeds=range(groups, groups + schedules), ctas=2)


@pytest.mark.parametrize("values", ["nvfp4", "bf16"])
def test_a_plan_launches_at_other_addresses(recorder: LaunchRecorder, values: str) -> None:
    planned, problem = (
        _problem(values, [130, 64], rows_per_group=2, integers=True, seed=seed) for seed in (1, 2)
    )
    (launch,) = recorder.record(launch_planned, problem, planned)
    scored, _ = RecordedCall(problem, launch).run(0)
    assert_scores(scored, exact=True)


def test_sm103() -> None:
    with LaunchRecorder(Device(capability=(10, 3), multiprocessors=1)) as recorder:
        for values in VALUES:
            problem = _problem(values, EDGES, rows_per_group=3, integers=True)
            _run(recorder, values, problem, exact=True, seeds=range(1))


@pytest.mark.large
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("rows", [1, 8])
def test_a_few_thousand_keys(recorder: LaunchRecorder, values: str, rows: int) -> None:
    problem = _problem(values, [5000, 37, 2049], rows_per_group=rows, integers=True)
    for ctas in (1, 3, 40):
        _run(recorder, values, problem, exact=True, seeds=range(8), ctas=ctas)


@pytest.mark.large
@pytest.mark.parametrize("values", VALUES)
def test_a_second_wave_of_ctas(recorder: LaunchRecorder, values: str) -> None:
    # From 64 pages a CTA on, the last 16th of the list goes to CTAs of a second wave.
    problem = _problem(values, [6000, 3000, 90], rows_per_group=1, integers=True)
    call = record_call(recorder, problem, ctas=2) if values != "tiled" else None
    assert call is None or call.launch.grid == (4, 1, 1)
    _run(recorder, values, problem, exact=True, seeds=range(4), ctas=2)
