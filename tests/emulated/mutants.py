"""Which random mutants of our kernels are caught: ``python mutants.py COUNT [SEED]``.

A mutant lacks one instruction of synchronization, does not wait at one mbarrier, or has another
constant in one instruction of integer arithmetic. It is caught where a run of one of 8 schedules
faults, or gives wrong scores.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

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


def main() -> None:
    """Print what becomes of each mutant, and the shares."""
    import torch

    from emulated.tcgen05_calls import record_call
    from emulator.errors import EmulationError
    from emulator.host.launch_recorder import LaunchRecorder
    from emulator.host.recorded_launch import Device
    from support.problems import assert_scores, make_problem

    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    problem = make_problem(
        [1000, 130, 0, 1, 500, 64, 129],
        generator=torch.Generator().manual_seed(1),
        rows_per_group=2,
        integers=True,
    )
    with LaunchRecorder(Device(capability=(10, 0), multiprocessors=2)) as recorder:
        call = record_call(recorder, problem, ctas=2)
    assert call.launch.ptx is not None
    outcomes: Counter[tuple[str, bool]] = Counter()
    for text, what in mutants(call.launch.ptx, count, seed):
        result = ""
        for schedule in range(8):
            try:
                assert_scores(call.run(schedule, ptx=text)[0], exact=True)
            except (EmulationError, AssertionError, ValueError) as error:
                result = f"{type(error).__name__} on schedule {schedule}"
                break
        outcomes[what.split()[0], bool(result)] += 1
        print(f"{result or 'SURVIVES'}: {what}", flush=True)
    for kind in ("without", "with"):
        caught = outcomes[kind, True]
        print(f"{kind}: {caught} of {caught + outcomes[kind, False]} caught")


if __name__ == "__main__":
    main()
