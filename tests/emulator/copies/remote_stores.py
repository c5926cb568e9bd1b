"""`st.async` and `red.async`, to the own CTA's shared memory, and `st.bulk`.

Source: PTX ISA, "st.async", "red.async", "st.bulk". In a cluster of one CTA every address of
`.shared::cluster` is the CTA's own. Each lane's store completes by itself, on an mbarrier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import Misaligned, UnwrittenRead
from emulator.instructions.atomics import Update, integer_update
from emulator.instructions.mbarriers import BarrierOperand, shared_offsets
from emulator.instructions.memory_accesses import note_access, space_of, vector_width
from emulator.instructions.registry import Closure, Decoder, Mask, instruction
from emulator.machine.async_operation import AsyncOperation
from emulator.machine.convergence import EACH_LANE
from emulator.machine.registers import UNDEFINED, origin_of, undefined_bits
from emulator.syntax.ptx_types import TYPE_BITS, UNSIGNED

if TYPE_CHECKING:
    from emulator.machine.execution import Warp
    from emulator.machine.memory import Bytes


@instruction("st.async")
def compile_store(op: Decoder) -> Closure:
    op.ignore("weak")
    return _compile(op, vector_width(op), lambda type_name: None)


@instruction("red.async")
def compile_reduction(op: Decoder) -> Closure:
    op.ignore("relaxed", "cluster")
    name = op.one_of("inc", "dec", "min", "max", "add", "and", "or", "xor")
    return _compile(op, 1, lambda type_name: integer_update(name, type_name))


def _compile(op: Decoder, count: int, update_of: Callable[[str], Update | None]) -> Closure:
    """Stores of vectors, or what combines a value with what is there."""
    op.expect_operands(3)
    op.one_of("mbarrier::complete_tx::bytes")
    op.ignore("shared::cluster")
    type_name = op.type()
    dtype, update = UNSIGNED[TYPE_BITS[type_name]], update_of(type_name)
    size = count * np.dtype(dtype).itemsize
    target, barriers = op.memory(0), BarrierOperand("shared", op.memory(2))
    places = [op.carried_source(each, dtype) for each in op.vector(1)]
    if len(places) != count:
        raise op.unsupported("the vector has another size")
    name = op.instruction.text

    def start(warp: Warp, lane: int, where: Bytes, value: bytes) -> None:
        def move() -> None:
            content = value
            if update is not None:
                old = where.load().view(dtype)[0]
                given = int.from_bytes(value, "little")
                content = update(int(old), given, 0).to_bytes(size, "little")
            where.store(np.frombuffer(content, np.uint8))

        # Reductions of one place may be in flight together, each atomic for itself.
        marked = [where] if update is None else []
        (barrier,) = barriers.barriers(warp, EACH_LANE[lane])
        done: Callable[[], None] = lambda: barrier.complete_transactions(size)  # noqa: E731
        warp.cta.submit(
            AsyncOperation(
                name, [move], done, writes=marked, source=barrier.source, async_proxy=False
            ),
            warp,
        )
        if update is None:
            warp.cta.races.begin_async_write(warp, where.where, EACH_LANE[lane])

    def run(warp: Warp, mask: Mask) -> None:
        lanes = np.flatnonzero(warp.lanes(mask)).tolist()
        for lane, address in zip(lanes, target.evaluate(warp, mask).tolist(), strict=True):
            if address % size:
                raise Misaligned(f"address {address:#x} is no multiple of {size}")
            if any(undefined_bits(warp, each)[lane] for each in places):
                raise UnwrittenRead(f"what is stored depends on {UNDEFINED}" + origin_of(warp))
            values = np.array([warp.slots[each.slot][lane] for each in places], dtype)
            start(warp, lane, warp.cta.shared.range(address, size), values.tobytes())
        warp.cta.clocks.begin_epoch(warp)

    return run


@instruction("st.bulk")
def compile_bulk(op: Decoder) -> Closure:
    """Zeros; the one value that the ISA allows."""
    op.expect_operands(3)
    op.ignore("weak")
    space = space_of(op)
    where, sizes, value = op.memory(0), op.source(1, np.uint64), op.source(2, np.uint64)

    def run(warp: Warp, mask: Mask) -> None:
        lanes = np.flatnonzero(warp.lanes(mask)).tolist()
        offsets = shared_offsets(space, where.evaluate(warp, mask))
        for lane, start in zip(lanes, offsets, strict=True):
            size = int(warp.slots[sizes][lane])
            if warp.slots[value][lane] or size % 8:
                raise op.unsupported("a value that is not 0, or a size that is no multiple of 8")
            words = np.arange(start, start + size, 8, dtype=np.uint64)
            for word in words[:, None]:
                warp.cta.shared.store(word, np.zeros((1, 1), np.uint64))
                note_access(warp, word, 8, EACH_LANE[lane], None, strong=False, writes=True)

    return run
