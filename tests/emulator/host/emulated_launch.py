"""Running a recorded launch in the emulator, on the memory that was recorded with it."""

from __future__ import annotations

from emulator.errors import UnsupportedInstruction
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
