"""`tcgen05.commit` and `tcgen05.fence`.

Source: PTX ISA, "TensorCore 5th Generation Specialized Synchronization Operations" and
"... Async Synchronization Operations".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from emulator.copies.multicast import take_multicast
from emulator.instructions.mbarriers import MBarriers, barrier_operand
from emulator.instructions.registry import Closure, Decoder, Mask, instruction
from emulator.machine.async_operation import AsyncOperation
from emulator.machine.convergence import EACH_LANE

from .tensor_core import TensorCore, thread_of

if TYPE_CHECKING:
    from emulator.machine.execution import Warp


@instruction("tcgen05.commit")
def compile_commit(op: Decoder) -> Closure:
    """One arrival on an mbarrier when all prior MMAs and copies of the thread have completed."""
    op.one_of("cta_group::1")
    op.one_of("mbarrier::arrive::one")
    ranks = take_multicast(op, 1)
    where = barrier_operand(op, 0)
    op.one_of("b64")
    name = op.instruction.text

    def run(warp: Warp, mask: Mask) -> None:
        cta = warp.cta
        core = cta.extension(TensorCore)
        barriers = cta.extension(MBarriers)
        lanes = np.flatnonzero(warp.lanes(mask)).tolist()
        for lane, offset in zip(lanes, where.offsets(warp, mask), strict=True):
            ranks.check(warp, lane)
            thread = thread_of(warp, lane)
            core.order.fence_before(thread)
            barrier = barriers.at(offset)
            barrier.introduce(warp, EACH_LANE[lane])
            barrier.note_asynchronous_use("tcgen05.commit")
            operation = AsyncOperation(
                name, [], barrier.arrive, queue=core.queue(thread), source=core.source(thread)
            )
            cta.submit(operation, warp)
        cta.clocks.begin_epoch(warp)

    return run


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def compile_fence(op: Decoder) -> Closure:
    """Order the thread's operations with those of other threads."""
    op.expect_operands(0)
    before = op.instruction.parts[1] == "fence::before_thread_sync"

    def run(warp: Warp, mask: Mask) -> None:
        order = warp.cta.extension(TensorCore).order
        fence = order.fence_before if before else order.fence_after
        for lane in np.flatnonzero(warp.lanes(mask)).tolist():
            fence(thread_of(warp, lane))

    return run
