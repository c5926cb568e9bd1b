"""Running a probe in the emulator, as `probes.gpu` runs it on a GPU."""

from __future__ import annotations

import numpy as np

from emulator.copies.tensor_map_form import pack
from emulator.machine.launch import run_kernel
from emulator.machine.memory import Region

from .probe import UNWRITTEN_BYTE, Probe

_FIRST_ADDRESS = 0x7F20_0000_0000
_SPACING = 1 << 20  # between regions, so that nothing reaches from one into the next
_MAP_ALIGNMENT = 64


def emulate(probe: Probe, seed: int) -> np.ndarray:
    """The output of a probe in the emulator, uint8 ``[output_bytes]``."""
    output = np.full(probe.output_bytes, UNWRITTEN_BYTE, dtype=np.uint8)
    regions = [
        Region(f"in{index}" if index < len(probe.inputs) else "out", address, content)
        for index, content in enumerate((*probe.inputs, output))
        for address in [_FIRST_ADDRESS + _SPACING * index]
    ]
    parameters = b"".join(region.base.to_bytes(8, "little") for region in regions)
    for tensor_map in probe.placed_maps([region.base for region in regions]):
        parameters += bytes(-len(parameters) % _MAP_ALIGNMENT) + pack(tensor_map)
    run_kernel(
        probe.ptx,
        "probe",
        probe.grid,
        probe.block,
        parameters,
        regions,
        probe.shared_bytes,
        seed,
    )
    return regions[-1].data
