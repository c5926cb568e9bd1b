"""Which random mutants of our kernels are caught: ``python mutants.py sm100|sm90 COUNT [SEED]``.

A mutant lacks one instruction of synchronization, does not wait at one mbarrier, or has another
constant in one instruction of integer arithmetic. It is caught where a run of one of 8 schedules
faults, or gives wrong scores. Many survivors are equivalent: they change what nothing reads, wait
for what another wait implies, or lie where the problem does not lead.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from emulated.tcgen05_calls import RecordedCall

SYNCHRONIZES = re.compile(
    r"^\s*(@!?%p\d+ )?"
    r"(fence|tcgen05\.(fence|wait|commit)|mbarrier\.arrive|bar|barrier|cp\.async\.(mb|bulk\.wait))"
)
WAITS = re.compile(r"^(\s*)mbarrier\.(?:try|test)_wait\S*\s+(%?\w+),.*;")
COMPUTES = re.compile(r"^\s*(add|and|or|xor|shl|shr|mad)\.\S+\s.*, (\d+);$")
KINDS = {"without": SYNCHRONIZES, "unwaited": WAITS, "with": COMPUTES}


def _mutated(kind: str, line: str) -> list[str]:
    """What stands in a mutant in place of a line."""
    if kind == "without":
        return []
    if kind == "unwaited":
        return [WAITS.sub(r"\1setp.eq.u32 \2, 0, 0;", line)]
    return [re.sub(r", (\d+);$", lambda found: f", {int(found[1]) ^ 1};", line)]


def mutants(ptx: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Texts of as many mutants, and what differs; a third of each kind where there are so many."""
    lines, chooser = ptx.splitlines(), random.Random(seed)
    made: list[tuple[str, str]] = []
    for left, (kind, pattern) in zip((3, 2, 1), KINDS.items(), strict=True):
        places = [index for index, line in enumerate(lines) if pattern.match(line)]
        for index in chooser.sample(places, min((count - len(made)) // left, len(places))):
            text = [*lines[:index], *_mutated(kind, lines[index]), *lines[index + 1 :]]
            made.append(("\n".join(text), f"{kind} {lines[index].strip()}"))
    return made


@dataclass(frozen=True)
class Subject:
    """A kernel: what of the device it is for, and a problem that leads through most of it."""

    capability: tuple[int, int]
    multiprocessors: int
    lengths: tuple[int, ...]
    separate: bool


SUBJECTS = {
    "sm100": Subject((10, 0), 2, (1000, 130, 0, 1, 500, 64, 129), separate=False),
    "sm90": Subject((9, 0), 1, (2500, 130, 0, 1, 700), separate=True),
}


def record_subject(name: str) -> RecordedCall:
    """The launch of the unchanged kernel."""
    from emulated.recorded_calls import launch_scores
    from emulated.tcgen05_calls import RecordedCall, record_call
    from emulator.host.launch_recorder import LaunchRecorder
    from emulator.host.recorded_launch import Device
    from support.problems import make_problem

    subject = SUBJECTS[name]
    problem = make_problem(
        subject.lengths,
        generator=torch.Generator().manual_seed(1),
        rows_per_group=2,
        integers=True,
        separate=subject.separate,
    )
    with LaunchRecorder(Device(subject.capability, subject.multiprocessors)) as recorder:
        if subject.capability >= (10, 0):
            return record_call(recorder, problem, ctas=2)
        (launch,) = recorder.record(launch_scores, problem)
        return RecordedCall(problem, launch)


def fault_of(call: RecordedCall, ptx: str) -> str:
    """What gives a mutant away, and on which schedule; nothing where it survives."""
    from emulator.errors import EmulationError
    from support.problems import assert_scores

    for schedule in range(8):
        try:
            assert_scores(call.run(schedule, ptx=ptx)[0], exact=True)
        except (EmulationError, AssertionError, ValueError) as error:
            return f"{type(error).__name__} on schedule {schedule}"
    return ""


def shares(name: str, count: int, seed: int) -> dict[str, tuple[int, int]]:
    """How many mutants of each kind are caught, and how many there are; prints each."""
    call = record_subject(name)
    assert call.launch.ptx is not None
    found = dict.fromkeys(KINDS, (0, 0))
    for text, what in mutants(call.launch.ptx, count, seed):
        fault = fault_of(call, text)
        print(f"{fault or 'SURVIVES'}: {what}", flush=True)
        kind = what.split()[0]
        found[kind] = found[kind][0] + bool(fault), found[kind][1] + 1
    return found


if __name__ == "__main__":
    subject, count, *seed = sys.argv[1:]
    print(shares(subject, int(count), int(seed[0]) if seed else 0))
