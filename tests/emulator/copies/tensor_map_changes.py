"""Tensor maps that a kernel makes: `tensormap.replace`, and the fences that publish them.

Sources: PTX ISA, "tensormap.replace", "tensormap.cp_fenceproxy", "membar / fence"; the fields lie
where `tensor_map_form` has them. The generic proxy writes a map, the tensormap proxy reads it: a
copy that uses one in between, before `fence.proxy.tensormap` acquires it, is a fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import UnwrittenRead
from emulator.instructions.memory_accesses import Resolver, note_access
from emulator.instructions.registry import Closure, Decoder, Mask, instruction
from emulator.machine.convergence import aligned
from emulator.machine.memory import GENERIC
from emulator.syntax.module import Immediate

from .tensor_map_form import FIELDS, MAP_BYTES, replace_field

if TYPE_CHECKING:
    from emulator.machine.execution import Warp


def _take_place(op: Decoder) -> Resolver:
    return Resolver(op.one_of("global", "shared::cta", default="generic").partition("::")[0])


@instruction("tensormap.replace.tile")
def compile_replace(op: Decoder) -> Closure:
    """Change a field of the map at an address."""
    field = op.one_of(*FIELDS)
    resolver = _take_place(op)
    op.one_of("b1024")
    dtype = np.dtype(
        op.one_of("b32", "b64").replace("b", "u").replace("32", "4").replace("64", "8")
    )
    indexed = FIELDS[field].indexed
    op.expect_operands(3 if indexed else 2)
    index = op.operands[1]
    if indexed and not isinstance(index, Immediate):
        raise op.unsupported("the number of the dimension is no constant")
    axis = index.value if indexed and isinstance(index, Immediate) else 0
    where, value = op.memory(0), op.source(1 + indexed, dtype.type)

    def run(warp: Warp, mask: Mask) -> None:
        addresses = where.evaluate(warp, mask)
        given = warp.slots[value][warp.lanes(mask)].tolist()
        for region, within, chosen in resolver.pieces(warp, addresses, mask):
            for index, start in enumerate(within.tolist()):
                form = region.range(start, MAP_BYTES).load()
                lane = index if chosen is None else int(chosen[index])
                for word, bits in replace_field(form, field, axis, given[lane]):
                    one = np.array([start + 4 * word], np.uint64)
                    region.store(one, np.array([[bits]], np.uint32))
                    if region is warp.cta.shared:
                        lanes = np.flatnonzero(warp.lanes(mask))[lane : lane + 1]
                        warp.cta.races.write(warp.index, one, 4, lanes)

    return run


@instruction("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release")
def compile_copy(op: Decoder) -> Closure:
    """The lanes of a warp copy a map from shared to global memory together, and release it."""
    for name in ("sync", "aligned"):
        op.one_of(name)
    op.one_of("cta", "cluster", "gpu", "sys")
    _expect_map(op, 3)
    target, source = op.memory(0), op.memory(1)

    def run(warp: Warp, mask: Mask) -> None:
        to, start = (int(each.evaluate(warp, mask)[0]) for each in (target, source))
        cta = warp.cta
        words = np.uint64(start) + np.arange(0, MAP_BYTES, 4, dtype=np.uint64)
        written = cta.shared.range(start, MAP_BYTES)
        values = cta.shared.load(words, np.uint32, 1, [])
        note_access(warp, words, 4, None, None, strong=False, writes=False)
        cta.clocks.synchronize(warp, warp.lanes(mask))  # they have copied it together
        if written.undefined[:64].any():
            raise UnwrittenRead("a tensor map that nothing has written is copied")
        region = cta.launch.memory.find(to)
        region.store(np.uint64(to) + words - np.uint64(start), values)

    return aligned(run)


@instruction("fence.proxy.tensormap::generic.acquire", "fence.proxy.tensormap::generic.release")
def compile_fence(op: Decoder) -> Closure:
    """Acquire a map that the generic proxy wrote; a release alone shows nowhere."""
    op.one_of("cta", "cluster", "gpu", "sys")
    if op.instruction.parts[3] == "release":
        op.expect_operands(0)
        return lambda warp, mask: None
    _expect_map(op, 2)
    where = op.memory(0)

    def run(warp: Warp, mask: Mask) -> None:
        for address in where.evaluate(warp, mask).tolist():
            region, start = warp.cta.launch.region_of(warp.cta, address)
            region.shadow[region.range(start, MAP_BYTES).where] &= 0xFF ^ GENERIC

    return run


def _expect_map(op: Decoder, operands: int) -> None:
    """Insist on a last operand that says how many bytes a map has."""
    op.expect_operands(operands)
    size = op.operands[-1]
    if not isinstance(size, Immediate) or size.value != MAP_BYTES:
        raise op.unsupported("the size")
