"""`tcgen05.ld`, `tcgen05.st` and `tcgen05.wait`: between tensor memory and registers.

Source: PTX ISA, "Tensor Memory and Register Load/Store Instructions". The transfers are
asynchronous; what that allows a kernel to see is modelled by what it must not do before the wait:
a load's cells must not change and a store's cells must not be touched (see `tensor_order`). The
registers of a load may be used at once: true register dependencies are respected.

Not implemented, and refused by name: `.red`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import TensorMemoryMisuse
from emulator.instructions.memory_accesses import stored_undefined, undefined_noter
from emulator.instructions.registry import Closure, Decoder, Mask, MemoryOperand, instruction
from emulator.machine.convergence import aligned
from emulator.machine.registers import PendingLoad
from emulator.syntax.module import Immediate, Operand, Register

from .tensor_core import WARP, TensorCore, check_whole_warp
from .tensor_memory import LANES, WORD, Footprint, split_address
from .tensor_memory_shapes import SHAPES, RegisterCells, register_cells

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

_LOW_HALF = np.arange(2)
_WHOLE = np.arange(4)


@dataclass(frozen=True)
class _Transfer:
    """A load or store, but for its registers.

    Attributes
    ----------
    cells : RegisterCells
        Relative to the address.
    half_split : int
        Columns between the two halves of `16x32bx2`.
    address : MemoryOperand
        In tensor memory.
    """

    cells: RegisterCells
    half_split: int
    address: MemoryOperand

    def locate(self, warp: Warp) -> tuple[int, int]:
        """Lane and column where the transfer of a warp begins.

        Raises
        ------
        TensorMemoryMisuse
            The lanes disagree, or the address is outside the warp's quarter of the lanes.
        """
        addresses = self.address.evaluate(warp, None)
        if (addresses != addresses[0]).any():
            raise TensorMemoryMisuse("the lanes of the warp disagree on the address")
        lane, column = split_address(int(addresses[0]) & 0xFFFFFFFF)
        quarter = warp.index % (LANES // WARP) * WARP
        if lane not in range(quarter, quarter + WARP, self.cells.lane_count):
            raise TensorMemoryMisuse(
                f"warp {warp.index} can access lanes {quarter} to {quarter + WARP - 1} in steps of "
                f"{self.cells.lane_count}, not from lane {lane}"
            )
        return lane, column

    def footprints(self, lane: int, column: int) -> list[Footprint]:
        """The cells that it touches."""
        lanes = ((1 << self.cells.lane_count) - 1) << lane
        columns = self.cells.columns
        if not self.half_split:
            return [Footprint(lanes, column, column + int(columns.max()) + 1)]
        first = columns[0]  # threads 0 and 16 begin the two halves
        starts = (column, column + self.half_split)
        width = int(first.max()) + 1
        return [Footprint(lanes, start, start + width) for start in starts]


def _take_shape(
    op: Decoder, packing: str, address: int | Operand, split: Operand | None
) -> _Transfer:
    """Take shape, repetition and packing."""
    op.one_of("sync")
    op.one_of("aligned")
    shape = op.one_of(*SHAPES)
    largest = SHAPES[shape][2]
    repeats = int(op.one_of(*(f"x{1 << i}" for i in range(8)))[1:])
    if repeats > largest:
        raise op.unsupported(f".{shape} repeats at most {largest} times")
    half_split = 0
    if split is not None:
        if shape != "16x32bx2" or not isinstance(split, Immediate):
            raise op.unsupported("immHalfSplitoff")
        half_split = split.value
    elif shape == "16x32bx2":
        raise op.unsupported("immHalfSplitoff is needed")
    packed = op.flag(packing)
    op.one_of("b32")
    cells = register_cells(shape, repeats, half_split, packed)
    return _Transfer(cells, half_split, op.memory(address))


def _check_registers(op: Decoder, given: int, cells: RegisterCells) -> None:
    """Insist on as many registers as the shape has."""
    if given != cells.columns.shape[1]:
        raise op.unsupported(f"{given} registers, the shape has {cells.columns.shape[1]}")


def _bytes_of(transfer: _Transfer, lane: int, column: int) -> tuple[np.ndarray, np.ndarray]:
    """Lanes and byte offsets `[32, registers, bytes]` of a register's bytes, in order."""
    cells = transfer.cells
    used = _LOW_HALF if cells.columns.shape[2] == 2 else _WHOLE
    offsets = (cells.columns + column)[..., None] * WORD + used
    lanes = np.broadcast_to((cells.lanes + lane)[..., None], offsets.shape)
    shape = (*offsets.shape[:2], -1)
    return lanes.reshape(shape), offsets.reshape(shape)


@instruction("tcgen05.ld")
def compile_ld(op: Decoder) -> Closure:
    """Load registers from the warp's quarter of tensor memory."""
    count = op.expect_operands(2, 3)
    transfer = _take_shape(op, "pack::16b", 1, op.operands[2] if count == 3 else None)
    registers = [op.destination(register, np.uint32) for register in op.vector(0)]
    _check_registers(op, len(registers), transfer.cells)
    note_undefined = undefined_noter(op, op.vector(0))
    names = [e.name if isinstance(e, Register) else None for e in op.vector(0)]

    def run(warp: Warp, mask: Mask) -> None:
        check_whole_warp(warp, mask)
        lane, column = transfer.locate(warp)
        core = warp.cta.extension(TensorCore)
        load = PendingLoad([name for name in names if name is not None], warp.loads)
        core.begin_transfer(warp, "ld", transfer.footprints(lane, column), load)
        data, undefined = core.memory.read(*_bytes_of(transfer, lane, column))
        words = np.ascontiguousarray(data).view(np.uint32)[..., 0]
        for index, register in enumerate(registers):
            warp.slots[register][...] = words[:, index]
        if undefined is not None:
            bits = np.ascontiguousarray(undefined * np.uint8(0xFF)).view(np.uint32)[..., 0]
            note_undefined(warp, None, bits)

    return aligned(run)


@instruction("tcgen05.st")
def compile_st(op: Decoder) -> Closure:
    """Store registers to the warp's quarter of tensor memory.

    With `.unpack::16b` the upper halves of the cells are left as they are.
    """
    count = op.expect_operands(2, 3)
    transfer = _take_shape(op, "unpack::16b", 0, op.operands[1] if count == 3 else None)
    places = [op.carried_source(register, np.uint32) for register in op.vector(count - 1)]
    _check_registers(op, len(places), transfer.cells)

    def run(warp: Warp, mask: Mask) -> None:
        check_whole_warp(warp, mask)
        lane, column = transfer.locate(warp)
        core = warp.cta.extension(TensorCore)
        core.begin_transfer(warp, "st", transfer.footprints(lane, column))
        words = np.stack([warp.slots[each.slot] for each in places], axis=1)
        data = words[..., None].view(np.uint8)
        bits = stored_undefined(warp, places, None, np.uint32)
        undefined = None if bits is None else bits[..., None].view(np.uint8) != 0
        core.memory.write(*_bytes_of(transfer, lane, column), data, undefined)

    return aligned(run)


@instruction("tcgen05.wait::ld", "tcgen05.wait::st")
def compile_wait(op: Decoder) -> Closure:
    """All loads, or all stores, of the warp have completed."""
    op.expect_operands(0)
    op.one_of("sync")
    op.one_of("aligned")
    kind = op.instruction.parts[1].removeprefix("wait::")

    def run(warp: Warp, mask: Mask) -> None:
        check_whole_warp(warp, mask)
        warp.cta.extension(TensorCore).finish_transfers(warp, kind)

    return aligned(run)
