"""`clusterlaunchcontrol`: a CTA takes over the work of one that has not begun (PTX ISA 9.7.13.17).

A response is opaque to kernels. Here its words are the index of the CTA that will not run, x, y
and z, and whether there was one left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from emulator.machine.async_operation import AsyncOperation

from .elementwise import copy_slot
from .mbarriers import BarrierOperand, shared_offsets
from .registry import Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp
    from emulator.machine.memory import Bytes

_BYTES = 16


@instruction("clusterlaunchcontrol.try_cancel.async")
def compile_try_cancel(op: Decoder) -> Closure:
    op.expect_operands(2)
    op.ignore("multicast::cluster::all")  # of a cluster of one CTA
    space = op.one_of("shared::cta", default="generic").partition("::")[0]
    op.one_of("mbarrier::complete_tx::bytes")
    op.one_of("b128")
    where, barriers = op.memory(0), BarrierOperand(space, op.memory(1))
    name = op.instruction.text

    def respond(warp: Warp, target: Bytes) -> None:
        waiting = warp.cta.launch.waiting
        response = (*waiting.pop(), 1) if waiting else (0, 0, 0, 0)
        target.store(np.array(response, np.uint32).view(np.uint8))

    def run(warp: Warp, mask: Mask) -> None:
        offsets = shared_offsets(space, where.evaluate(warp, mask))
        for offset, barrier in zip(offsets, barriers.barriers(warp, mask), strict=True):
            barrier.note_asynchronous_use("clusterlaunchcontrol.try_cancel")
            target = warp.cta.shared.range(offset, _BYTES)
            operation = AsyncOperation(
                name,
                [lambda target=target: respond(warp, target)],
                lambda barrier=barrier: barrier.complete_transactions(_BYTES),
                writes=[target],
                source=barrier.source,
            )
            warp.cta.submit(operation, warp)
        warp.cta.clocks.begin_epoch(warp)

    return run


@instruction("clusterlaunchcontrol.query_cancel.is_canceled")
def compile_is_canceled(op: Decoder) -> Closure:
    op.expect_operands(2)
    op.one_of("pred")
    op.one_of("b128")
    _, high = (op.source(each, np.uint64) for each in op.vector(1))
    result = op.destination(0, np.bool_)

    def run(warp: Warp, mask: Mask) -> None:
        lanes = warp.lanes(mask)
        warp.slots[result][lanes] = (warp.slots[high] >> np.uint64(32) != 0)[lanes]

    return run


@instruction(
    "clusterlaunchcontrol.query_cancel.get_first_ctaid",
    *(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}" for axis in "xyz"),
)
def compile_first_cta(op: Decoder) -> Closure:
    """One axis of the index, or all in a vector."""
    op.expect_operands(2)
    op.ignore("v4")
    op.one_of("b32")
    op.one_of("b128")
    words = [op.slots.temporary(np.uint32) for _ in range(3)]
    halves = [op.source(each, np.uint64) for each in op.vector(1)]
    axis = op.instruction.parts[2].partition("::")[2]
    chosen = words if not axis else [words["xyz".index(axis)]]
    targets = op.vector(0)[: len(chosen)]
    copies = [
        copy_slot(op.destination(target, np.uint32), word)
        for target, word in zip(targets, chosen, strict=True)
    ]

    def run(warp: Warp, mask: Mask) -> None:
        low, high = (warp.slots[half] for half in halves)
        for word, values in zip(words, (low, low >> np.uint64(32), high), strict=True):
            warp.slots[word][:] = values.astype(np.uint32)
        for copy in copies:
            copy(warp, mask)

    return run
