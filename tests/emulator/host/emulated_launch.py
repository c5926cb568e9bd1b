"""Running a recorded launch in the emulator, on the memory that was recorded with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from emulator.errors import EmulationError, OutOfBounds, UnsupportedInstruction
from emulator.machine.launch import Report, run_kernel
from emulator.machine.memory import Region
from emulator.machine.scheduler import Policy

from .recorded_launch import Launch


def memory_of(launch: Launch) -> dict[str, Region]:
    """A launch's device memory, by name, at the addresses that its kernel uses."""
    return {each.name: Region(each.name, each.address, each.content) for each in launch.memory}


def emulate_launch(
    launch: Launch,
    memory: dict[str, Region],
    seed: int,
    policy: Policy | None = None,
    *,
    strict: bool = False,
) -> Report:
    """Run a recorded launch.

    Parameters
    ----------
    launch : Launch
    memory : dict
        From `memory_of`; the kernel's outputs are in it afterwards. Launches that follow each other
        share it.
    seed : int
        Of the schedule.
    policy : Policy, optional
        Instead of the seed's own.
    strict : bool
        Whether to refuse what works but what the ISA does not promise.

    Raises
    ------
    UnsupportedInstruction
        The launch is of clusters.
    ValueError
        Nothing kept the PTX of the kernel.
    EmulationError
        A fault of the kernel.
    """
    if launch.ptx is None:
        raise ValueError(f"there is no PTX of {launch.kernel}")
    if launch.cluster != (1, 1, 1):
        raise UnsupportedInstruction(f"a launch in clusters of {launch.cluster} CTAs")
    return run_kernel(
        launch.ptx,
        launch.kernel,
        launch.grid,
        launch.block,
        launch.parameters,
        list(memory.values()),
        launch.shared_bytes,
        seed,
        policy,
        strict=strict,
    )


@dataclass
class RunReport:
    """What came of a launch on several schedules; as text, a page to read.

    Attributes
    ----------
    kernel : str
    seeds : list of int
        Of the schedules that it ran on; the last one may have ended in a fault.
    fault : EmulationError or None
        The first one.
    notes : Counter
        What the kernel relies on though the ISA does not promise it, and how often.
    differing : set of str
        Regions that did not end up the same on every schedule.
    instructions : int
        Warp instructions of all schedules.
    memory : dict
        Every region of device memory by name, uint8, after the last schedule.
    """

    kernel: str
    seeds: list[int] = field(default_factory=list)
    fault: EmulationError | None = None
    notes: Counter[str] = field(default_factory=Counter)
    differing: set[str] = field(default_factory=set)
    instructions: int = 0
    memory: dict[str, np.ndarray] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {len(self.seeds)} schedules, {self.instructions} instructions"]
        if self.fault is not None:
            lines.append(
                f"fault on seed {self.seeds[-1]}: {type(self.fault).__name__}: {self.fault}"
            )
            lines += getattr(self.fault, "__notes__", [])
        lines += [f"differs between schedules: {name}" for name in sorted(self.differing)]
        lines += [f"note, {count} times: {what}" for what, count in sorted(self.notes.items())]
        return "\n".join(lines)


def run(launch: Launch, seeds: Iterable[int] = range(8), *, strict: bool = False) -> RunReport:
    """Run a recorded launch on several schedules, each on the memory that was recorded with it.

    Parameters
    ----------
    launch : Launch
    seeds : iterable of int
        Of the schedules: 8 that follow each other have one of each policy.
    strict : bool
        Whether what would be a note is a fault.

    Raises
    ------
    ValueError
        Nothing kept the PTX of the kernel.
    """
    report = RunReport(launch.kernel)
    for seed in seeds:
        memory = memory_of(launch)
        report.seeds.append(seed)
        try:
            done = emulate_launch(launch, memory, seed, strict=strict)
        except EmulationError as error:
            report.fault = error
            if isinstance(error, OutOfBounds) and "no region" in str(error):
                error.add_note("Session.add_tensor declares what a kernel may touch")
            break
        report.instructions += done.total
        report.notes += done.notes
        for name, region in memory.items():
            if not np.array_equal(report.memory.get(name, region.data), region.data):
                report.differing.add(name)
            report.memory[name] = region.data
    return report
