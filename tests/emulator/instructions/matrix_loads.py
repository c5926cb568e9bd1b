"""Matrices between shared memory and registers ("ldmatrix", "stmatrix", "movmatrix", 9.7.14.5).

A warp holds an 8x8 matrix of 16-bit elements, or an 8x16 one of bytes, as one 32-bit register:
lane `4 * r + c` has four bytes of row `r`, from byte `4 * c` on. A 16x16 matrix of bytes is two of
these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emulator.machine.convergence import aligned, require_full_warp
from emulator.machine.outcomes import Wait
from emulator.tcgen05.matrix_operands import unpack_nibbles, unpack_six_bit

from .memory_accesses import (
    Resolver,
    note_access,
    space_of,
    store_to_shared,
    stored_undefined,
    undefined_noter,
)
from .registry import Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

_ROWS = 8


@dataclass(frozen=True)
class _Shape:
    """Matrices of an instruction: how many, rows and registers of each, and how they are stored.

    Attributes
    ----------
    expand : function or None
        Makes 16 bytes of each row, uint8 [rows, 16], where elements of 4 or 6 bits lie in it.
    """

    count: int
    transposed: bool
    rows: int = _ROWS
    bytewise: bool = False
    expand: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def registers(self) -> int:
        return self.count * self.rows // _ROWS

    @property
    def lanes(self) -> np.ndarray:
        """Those that give the addresses of rows."""
        return np.arange(32) < self.rows * self.count


_EXPANSIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "b4x16_p64": lambda rows: unpack_nibbles(rows[:, :8]),
    "b6x16_p32": lambda rows: unpack_six_bit(rows[:, :12]),
}


def _take_shape(op: Decoder) -> _Shape:
    """Take everything but the space."""
    op.one_of("sync")
    op.one_of("aligned")
    shape = op.one_of("m8n8", "m16n16", "m8n16", "m16n8")
    count = int(op.one_of("x1", "x2", "x4")[1:])
    transposed = op.flag("trans")
    element = op.one_of("b16", "b8", "b8x16")
    if (shape, element) == ("m8n8", "b16"):
        return _Shape(count, transposed)
    stored = op.one_of(*_EXPANSIONS) if element == "b8x16" else ""
    large = shape == "m16n16"
    if op.instruction.parts[0] != "ldmatrix" or shape == "m16n8" or transposed != large:
        raise op.unsupported(f".{shape}.{element}")
    if (count == 4 and large) or (element == "b8" and not large):
        raise op.unsupported(f".{shape}.{element}")
    return _Shape(count, transposed, 16 if large else _ROWS, True, _EXPANSIONS.get(stored))


@instruction("ldmatrix")
def compile_ldmatrix(op: Decoder) -> Closure:
    op.expect_operands(2)
    shape = _take_shape(op)
    resolver = Resolver(space_of(op, 1))
    address = op.memory(1)
    elements = op.vector(0)
    if len(elements) != shape.registers:
        raise op.unsupported("the vector has another size")
    results = [op.destination(e, np.uint32) for e in elements]
    note_undefined = undefined_noter(op, elements)
    lanes = shape.lanes

    def run(warp: Warp, mask: Mask) -> Wait | None:
        require_full_warp(op, mask)
        # The lanes r i to r i + r - 1 give the addresses of the r rows of matrix i.
        addresses = address.evaluate(warp, None)[lanes]
        ((region, within, _),) = resolver.pieces(warp, addresses, lanes)
        undefined: list[np.ndarray] = []
        matrices = region.load(within, np.uint16, _ROWS, undefined)
        if undefined:
            note_undefined(warp, None, _registers_of(undefined[0], shape).T)
        note_access(warp, within, 16, lanes, None, strong=False, writes=False)
        for result, words in zip(results, _registers_of(matrices, shape), strict=True):
            warp.slots[result][:] = words
        return None

    return aligned(run)


@instruction("stmatrix")
def compile_stmatrix(op: Decoder) -> Closure:
    op.expect_operands(2)
    shape = _take_shape(op)
    resolver = Resolver(space_of(op, 0))
    address = op.memory(0)
    elements = op.vector(1)
    lanes = shape.lanes
    if len(elements) != shape.count:
        raise op.unsupported("the vector has another size")
    places = [op.carried_source(e, np.uint32) for e in elements]

    def run(warp: Warp, mask: Mask) -> None:
        require_full_warp(op, mask)
        addresses = address.evaluate(warp, None)[lanes]
        ((_, within, _),) = resolver.pieces(warp, addresses, lanes)
        bits = stored_undefined(warp, places, None, np.uint32)
        undefined = None if bits is None else _matrices_of(bits.T, shape.transposed)
        words = np.stack([warp.slots[each.slot] for each in places])
        rows = _matrices_of(words, shape.transposed)
        store_to_shared(warp, within, rows, undefined, lanes)

    return aligned(run)


def _registers_of(rows: np.ndarray, shape: _Shape) -> np.ndarray:
    """Registers, uint32 [registers, 32], of the rows of matrices, 16 bytes each."""
    if shape.bytewise:
        rows = rows.view(np.uint8).reshape(-1, 16)
        rows = rows if shape.expand is None else shape.expand(rows)
    matrices = rows.reshape(-1, shape.rows, rows.shape[1])
    matrices = matrices.transpose(0, 2, 1) if shape.transposed else matrices
    return np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, 32)


def _matrices_of(registers: np.ndarray, transposed: bool) -> np.ndarray:
    """The inverse."""
    words = np.ascontiguousarray(registers)
    matrices = words.view(np.uint16).reshape(-1, _ROWS, _ROWS)
    matrices = matrices.transpose(0, 2, 1) if transposed else matrices
    return np.ascontiguousarray(matrices).reshape(-1, _ROWS)


@instruction("movmatrix")
def compile_movmatrix(op: Decoder) -> Closure:
    """Transposes a matrix in registers."""
    op.expect_operands(2)
    for name in ("sync", "aligned", "m8n8", "trans", "b16"):
        op.one_of(name)
    result, source = op.destination(0, np.uint32), op.source(1, np.uint32)

    def run(warp: Warp, mask: Mask) -> None:
        require_full_warp(op, mask)
        matrix = warp.slots[source].copy().view(np.uint16).reshape(_ROWS, _ROWS)
        warp.slots[result][:] = np.ascontiguousarray(matrix.T).view(np.uint32).reshape(32)

    return aligned(run)
