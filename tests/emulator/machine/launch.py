"""Running a kernel: the emulator's front door."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from emulator.syntax.parser import parse_module

from .address_spaces import HIGHEST_GLOBAL, PARAMETER_BYTES, PARAMETERS
from .execution import Launch
from .memory import AddressSpace, Region
from .program import Program, compile_kernel
from .scheduler import Policy, Scheduler, policy_of

Dimensions = int | Sequence[int]


@dataclass(frozen=True)
class Report:
    """What a run did.

    Attributes
    ----------
    instructions : Counter
        Warp instructions by opcode.
    total : int
        All of them.
    warps : dict
        Instructions of each warp of a CTA, by the CTA's index.
    notes : Counter
        How often the kernel relied on what works but what the ISA does not promise (see
        `tensor_order`, and `bulk_copies.Arrival`).
    """

    instructions: Counter[str]
    total: int
    warps: dict[tuple[int, int, int], list[int]]
    notes: Counter[str]


def run_kernel(
    ptx: str,
    kernel: str,
    grid: Dimensions,
    block: Dimensions,
    parameters: bytes,
    memory: Sequence[Region] = (),
    shared_bytes: int = 0,
    seed: int = 0,
    policy: Policy | None = None,
    instruction_limit: int = 20_000_000,
    strict: bool = False,
) -> Report:
    """Run a kernel of a PTX module to its end.

    Parameters
    ----------
    ptx : str
        The module.
    kernel : str
        Name of the kernel.
    grid, block : int or up to three ints
        CTAs, and threads of a CTA, as x, y, z.
    parameters : bytes
        The kernel's parameters at their offsets, as a launch packs them.
    memory : sequence of Region
        Global memory; what the kernel writes is in them afterwards.
    shared_bytes : int
        Dynamic shared memory per CTA.
    seed : int
        Of the schedule, and of the garbage in registers; also chooses the policy.
    policy : Policy or None
        Instead of the seed's own.
    instruction_limit : int
        Warp instructions after which the kernel counts as hanging.
    strict : bool
        Whether what would be a note in the report is an error.

    Returns
    -------
    Report

    Raises
    ------
    EmulationError
        A fault of the kernel, or something not implemented.
    ValueError
        The launch does not fit the kernel.
    """
    program = _compiled(ptx, kernel)
    policy = policy or policy_of(seed)
    block3 = _dimensions(block)
    _check_block(program, block3)
    launch = Launch(
        program=program,
        memory=_global_memory(program, memory),
        parameters=_parameter_region(program, parameters),
        grid=_dimensions(grid),
        block=block3,
        dynamic_shared_bytes=shared_bytes,
        generator=np.random.default_rng(seed),
        spurious_failures=policy.spurious_failures,
        strict=strict,
        counts=[0] * len(program.code),
    )
    with np.errstate(all="ignore"):
        Scheduler(launch, policy, instruction_limit).run()
    return Report(
        launch.instruction_counts(), launch.instructions, launch.warp_instructions, launch.notes
    )


@lru_cache(maxsize=64)
def _compiled(ptx: str, kernel: str) -> Program:
    return compile_kernel(parse_module(ptx), kernel)


def _dimensions(size: Dimensions) -> tuple[int, int, int]:
    values = [size] if isinstance(size, int) else list(size)
    x, y, z = values + [1] * (3 - len(values))
    return x, y, z


def _check_block(program: Program, block: tuple[int, int, int]) -> None:
    directives = program.kernel.directives
    required = directives.get("reqntid")
    if required is not None and _dimensions(required) != block:
        raise ValueError(f"the kernel needs a block of {required}, got {block}")
    most = directives.get("maxntid")
    if most is not None and np.prod(block) > np.prod(most):
        raise ValueError(f"the kernel takes blocks of up to {most}, got {block}")
    cluster = directives.get("reqnctapercluster")
    if cluster is not None and np.prod(cluster) != 1:
        raise ValueError(f"clusters of {cluster} CTAs are not implemented")


def _global_memory(program: Program, regions: Sequence[Region]) -> AddressSpace:
    memory = AddressSpace("global", regions)
    for region in regions:
        if region.end > HIGHEST_GLOBAL:
            raise ValueError(f"region {region.name} ends above {HIGHEST_GLOBAL:#x}")
        if region.base < PARAMETERS + PARAMETER_BYTES and region.end > PARAMETERS:
            raise ValueError(f"region {region.name} lies where parameters do, at {PARAMETERS:#x}")
    for variable, address in program.module_variables:
        content = variable.initial if variable.initial is not None else variable.size
        memory.add(Region(variable.name, address, content))
    return memory


def _parameter_region(program: Program, parameters: bytes) -> Region:
    declared = program.kernel.parameters
    size = max((p.offset + p.size for p in declared), default=0)
    if len(parameters) != size:
        raise ValueError(f"the kernel has {size} bytes of parameters, got {len(parameters)}")
    return Region("kernel parameters", PARAMETERS, parameters)
