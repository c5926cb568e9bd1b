"""Kernels of a few instructions for tests: every lane applies them to operands of its own."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from emulator.machine.launch import run_kernel
from emulator.machine.memory import Region
from emulator.machine.scheduler import Policy

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"
FIRST_ADDRESS = 0x7F10_0000_0000
SPACING = 1 << 20


def run_lanes(
    body: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[type],
    *,
    block: int = 32,
    seed: int = 0,
    policy: Policy | None = None,
    module: str = "",
) -> list[np.ndarray]:
    """Run instructions on operands of every thread.

    Parameters
    ----------
    body : str
        Reads %a0, %a1, ... and writes %d0, %d1, ...; may declare more. %t is the thread.
    inputs : sequence of numpy arrays [block]
        Of 2, 4 or 8 bytes an element.
    outputs : sequence of numpy types
        Of the results.
    module : str
        Text before the kernel: functions and variables.

    Returns
    -------
    list of numpy arrays [block]
    """
    count = len(inputs) + len(outputs)
    bases = [FIRST_ADDRESS + SPACING * index for index in range(count)]
    results: list[np.ndarray] = [np.zeros(block, dtype) for dtype in outputs]
    regions = [
        Region(f"array {index}", base, array)
        for index, (base, array) in enumerate(zip(bases, [*inputs, *results], strict=True))
    ]
    run_kernel(
        lane_kernel(body, inputs, outputs, module),
        "k",
        1,
        block,
        struct.pack(f"<{count}Q", *bases),
        regions,
        seed=seed,
        policy=policy,
    )
    return [
        region.data.view(dtype)
        for region, dtype in zip(regions[len(inputs) :], outputs, strict=True)
    ]


def lane_kernel(
    body: str, inputs: Sequence[np.ndarray], outputs: Sequence[type], module: str = ""
) -> str:
    """The module that `run_lanes` runs, with its one kernel `k`."""
    names = [f"p{index}" for index in range(len(inputs) + len(outputs))]
    registers, loads, stores = "", "", ""
    sizes = [array.dtype.itemsize for array in inputs] + [np.dtype(d).itemsize for d in outputs]
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        is_input = index < len(inputs)
        register = f"%a{index}" if is_input else f"%d{index - len(inputs)}"
        registers += f".reg .b{8 * size} {register};\n"
        at = f"ld.param.b64 %at, [{name}];\nmad.wide.u32 %at, %t, {size}, %at;\n"
        if is_input:
            loads += f"{at}ld.global.b{8 * size} {register}, [%at];\n"
        else:
            stores += f"{at}st.global.b{8 * size} [%at], {register};\n"
    return f"""{HEADER}{module}
.visible .entry k({", ".join(f".param .b64 {name}" for name in names)})
{{
.reg .b32 %t; .reg .b64 %at;
{registers}
mov.u32 %t, %tid.x;
{loads}
{{
{body}
}}
{stores}
ret;
}}
"""
