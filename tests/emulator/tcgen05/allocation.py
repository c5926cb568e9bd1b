"""`tcgen05.alloc`, `tcgen05.dealloc`, `tcgen05.relinquish_alloc_permit`.

Source: PTX ISA, "Tensor Memory Allocation and Management Instructions". An allocation starts at any
free multiple of 32 columns, as the seed decides: another CTA of the SM may hold the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.errors import TensorMemoryMisuse
from emulator.instructions.mbarriers import barrier_operand
from emulator.instructions.registry import Closure, Decoder, Mask, instruction
from emulator.machine.convergence import aligned
from emulator.machine.outcomes import Wait

from .tensor_core import TensorCore, check_whole_warp
from .tensor_memory import ALL_LANES, Footprint

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

_ONE_LANE = np.zeros(1, np.int64)


def _uniform(warp: Warp, slot: int, what: str) -> int:
    """The value that all lanes of a warp must agree on.

    Raises
    ------
    TensorMemoryMisuse
        They do not.
    """
    values = warp.slots[slot]
    first = int(values[0])
    if (values != first).any():
        raise TensorMemoryMisuse(f"the lanes of the warp disagree on {what}")
    return first


def _take_common(op: Decoder, operands: int) -> None:
    """Modifiers and number of operands of all three instructions."""
    op.expect_operands(operands)
    op.one_of("cta_group::1")
    op.one_of("sync")
    op.one_of("aligned")


@instruction("tcgen05.alloc")
def compile_alloc(op: Decoder) -> Closure:
    """Write the address of an allocation to shared memory; wait while there is no room."""
    _take_common(op, 2)
    where = barrier_operand(op, 0)  # the address of a word in shared memory, as mbarriers have it
    op.one_of("b32")
    count = op.source(1, np.uint32)

    def run(warp: Warp, mask: Mask) -> Any:
        check_whole_warp(warp, mask)
        memory = warp.cta.extension(TensorCore).memory
        columns = _uniform(warp, count, "the number of columns")
        offsets = set(where.offsets(warp, mask))
        if len(offsets) != 1:
            raise TensorMemoryMisuse("the lanes of the warp disagree on the destination")
        address = memory.allocate(columns)
        if address is None:
            return Wait(
                lambda: memory.has_room(columns), True, f"waits for {columns} columns of room"
            )
        place = np.array([offsets.pop()], np.uint64)
        warp.cta.shared.store(place, np.array([[address]], np.uint32))
        races = warp.cta.races
        races.write(warp.index, place, 4, _ONE_LANE)
        races.clocks.synchronize(warp, warp.lanes(mask))  # every lane of the warp has it
        return None

    return aligned(run)


@instruction("tcgen05.dealloc")
def compile_dealloc(op: Decoder) -> Closure:
    """Give an allocation back; nothing in flight may use it."""
    _take_common(op, 2)
    op.one_of("b32")
    start, count = op.source(0, np.uint32), op.source(1, np.uint32)

    def run(warp: Warp, mask: Mask) -> None:
        check_whole_warp(warp, mask)
        core = warp.cta.extension(TensorCore)
        address = _uniform(warp, start, "the address")
        columns = _uniform(warp, count, "the number of columns")
        core.memory.release(address, columns)
        core.release(warp, Footprint(ALL_LANES, address, address + columns))
        warp.cta.launch.events += 1

    return aligned(run)


@instruction("tcgen05.relinquish_alloc_permit")
def compile_relinquish(op: Decoder) -> Closure:
    """From now on the CTA must not allocate."""
    _take_common(op, 0)

    def run(warp: Warp, mask: Mask) -> None:
        check_whole_warp(warp, mask)
        warp.cta.extension(TensorCore).memory.relinquish()

    return aligned(run)
