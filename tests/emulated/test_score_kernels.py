"""The scoring kernels end to end, launched by their real host code, on adversarial schedules.

What every backend is asked is in the scores contract (`test_scores_contract`); here are every
schedule, GPUs later than SM90, and bugs planted in the PTX, which must not pass.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from emulator.errors import (
    DataRace,
    Deadlock,
    EmulationError,
    Faults,
    InFlightRead,
    MissingProxyFence,
    PhaseError,
    UnwrittenRead,
)
from emulator.host.emulated_launch import emulate_launch, memory_of
from emulator.host.launch_recorder import LaunchRecorder
from emulator.host.recorded_launch import Device, Launch
from emulator.host.standin import reason_unavailable
from emulator.machine.scheduler import POLICIES, Policy
from support.problems import Problem, assert_scores, make_problem

from .recorded_calls import launch_scores

pytestmark = pytest.mark.skipif(reason_unavailable() is not None, reason=str(reason_unavailable()))
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

# Copies as late as possible, and waits that mostly give up early.
LATE = Policy("late", "random", 200, True, 0.5, 2)


def run(launch: Launch, problem: Problem, seed: int = 0, policy: Policy | None = None) -> Problem:
    """The problem with the scores that the launch computes in the emulator."""
    memory = memory_of(launch)
    emulate_launch(launch, memory, seed, policy)
    words = torch.from_numpy(memory["scores"].data.view(np.float32).copy())
    scores = problem.scores
    computed = words.as_strided(scores.shape, scores.stride(), scores.storage_offset())
    return problem.replace(scores=computed)


# Calls that the warp-MMA kernel serves on GPUs that convert E2M1 themselves.
CONVERTING = {"sm_100a": [("mixed", 2)], "sm_120a": [("bf16", 3), ("nvfp4", 1), ("nvfp4", 8)]}


@pytest.mark.parametrize("architecture", CONVERTING)
def test_scores_of_later_kernels(architecture: str) -> None:
    generator = torch.Generator().manual_seed(10)
    capability = (int(architecture[3:5]), 0)
    with LaunchRecorder(Device(capability=capability, multiprocessors=2)) as recorder:
        for kind, rows in CONVERTING[architecture]:
            problem = make_problem(
                [65, 0, 129, 1], generator=generator, kind=kind, rows_per_group=rows, integers=True
            )
            (launch,) = recorder.record(launch_scores, problem)
            assert f".target {architecture}" in str(launch.ptx)
            for seed in (0, 5):
                assert_scores(run(launch, problem, seed), exact=True)


@pytest.fixture(scope="module")
def many_groups(hopper: LaunchRecorder) -> tuple[Problem, Launch]:
    """More groups than lanes, so that a CTA sums lengths together, and scales that lie apart."""
    generator = torch.Generator().manual_seed(1)
    problem = make_problem(
        [700, 0, 64, 1500, 200, *[3] * 36], generator=generator, integers=True, separate=True
    )
    (launch,) = hopper.record(launch_scores, problem)
    return problem, launch


@pytest.mark.parametrize("seed", range(len(POLICIES)))
def test_integer_scores_are_exact_on_every_schedule(
    many_groups: tuple[Problem, Launch], seed: int
) -> None:
    problem, launch = many_groups
    assert_scores(run(launch, problem, seed), exact=True)


TRY_WAIT = r"(mbarrier\.try_wait\.parity\.shared::cta\.b64\s+\w+, \[%r\d+\], )(%r\d+);"
# A pattern of the PTX, what it becomes, and what stops the kernel then.
BUGS: dict[str, tuple[str, str, Faults]] = {
    "no barrier of the CTA": (r"bar\.sync\s+0;", "", (DataRace, UnwrittenRead)),
    "wrong phase": (
        TRY_WAIT,
        r".reg .b32 flip; xor.b32 flip, \2, 1; \1flip;",
        (InFlightRead, UnwrittenRead, PhaseError),
    ),
    "no wait": (TRY_WAIT + r"\s*@!done bra AGAIN;", "", (InFlightRead, UnwrittenRead)),
    "no second try": (r"@!done bra AGAIN;", "", (InFlightRead, UnwrittenRead, PhaseError)),
    "expects too many bytes": (
        r"(expect_tx\.shared::cta\.b64 _, \[%r\d+\]), %r\d+;",
        r"\1, 4112;",
        (Deadlock, PhaseError),
    ),
    "expects no bytes": (
        r"(expect_tx\.shared::cta\.b64 _, \[%r\d+\]), %r\d+;",
        r"\1, 0;",
        (InFlightRead, UnwrittenRead, PhaseError, Deadlock),
    ),
    "no arrival of the small copies": (
        r"cp\.async\.mbarrier\.arrive\.noinc\.shared::cta\.b64 \[%r\d+\];",
        "",
        Deadlock,
    ),
    "arrival that counts itself": (
        r"cp\.async\.mbarrier\.arrive\.noinc",
        "cp.async.mbarrier.arrive",
        (Deadlock, PhaseError),
    ),
    "slot asked for while lanes still read it": (
        r"(vote\.sync\.all\.pred[^;]*;\s*not\.pred[^;]*;)\s*bar\.warp\.sync\s+-1;",
        r"\1",
        DataRace,
    ),
    "barriers initialized for one arrival more": (
        r"(mbarrier\.init\.shared::cta\.b64 \[%r\d+\]), (%r\d+);",
        r"{ .reg .b32 more; add.u32 more, \2, 1; \1, more; }",
        Deadlock,
    ),
    "barriers not initialized": (r"mbarrier\.init\.shared::cta\.b64[^;]*;", "", PhaseError),
}


def planted(launch: Launch, pattern: str, replacement: str) -> Launch:
    """The launch with a bug in its kernel."""
    ptx, count = re.subn(pattern, replacement, str(launch.ptx))
    assert count > 0
    return replace(launch, ptx=ptx)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_stop_the_kernel(many_groups: tuple[Problem, Launch], bug: str) -> None:
    problem, launch = many_groups
    pattern, replacement, error = BUGS[bug]
    with pytest.raises(error):
        run(planted(launch, pattern, replacement), problem, policy=LATE)


def test_a_missing_fence_is_refused_where_asked_for(many_groups: tuple[Problem, Launch]) -> None:
    _, launch = many_groups
    wrong = planted(launch, r"fence\.mbarrier_init\.release\.cluster;", "")
    with pytest.raises(MissingProxyFence):
        emulate_launch(wrong, memory_of(wrong), 0, strict=True)


WRONG_RESULTS = {
    "the page after the right one": (
        r"(cp\.async\.bulk\.shared::cluster[^\[]*\[%r\d+\], \[%rd\d+)\]",
        r"\1 + 4096]",
    ),
    "a byte of the table of values": (
        r"prmt\.b32 (%r\d+, %r\d+), 201852420,",
        r"prmt.b32 \1, 201852421,",
    ),
    "scales of the other key": (r"cvt\.f32\.f16 (%r\d+), low;", r"cvt.f32.f16 \1, high;"),
    "scores one entry on": (r"st\.global\.f32 \[(%rd\d+)\]", r"st.global.f32 [\1 + 4]"),
}


@pytest.mark.parametrize("bug", WRONG_RESULTS)
def test_planted_bugs_show_in_the_scores(many_groups: tuple[Problem, Launch], bug: str) -> None:
    problem, launch = many_groups
    wrong = planted(launch, *WRONG_RESULTS[bug])
    try:
        scores = run(wrong, problem)
    except EmulationError:
        return
    with pytest.raises(AssertionError):
        assert_scores(scores, exact=True)
