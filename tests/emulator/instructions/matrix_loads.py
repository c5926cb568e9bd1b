"""Matrices between shared memory and registers ("ldmatrix", "stmatrix", "movmatrix", 9.7.14.5).

A warp holds an 8x8 matrix of 16-bit elements as one 32-bit register: lane `4 * r + c` has elements
`2 * c` and `2 * c + 1` of row `r`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from emulator.machine.convergence import aligned, require_full_warp
from emulator.machine.outcomes import Wait

from .memory_accesses import (
    Resolver,
    note_access,
    space_of,
    stored_undefined,
    undefined_noter,
)
from .registry import Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

_ROWS = 8


def _take_shape(op: Decoder) -> tuple[int, bool]:
    """Take everything but the space: the number of 8x8 matrices, and whether transposed."""
    op.one_of("sync")
    op.one_of("aligned")
    shape = op.one_of("m8n8", "m16n16", "m8n16", "m16n8")
    count = int(op.one_of("x1", "x2", "x4")[1:])
    transposed = op.flag("trans")
    element = op.one_of("b16", "b8", "b8x16")
    if shape != "m8n8" or element != "b16":
        raise op.unsupported(f".{shape}.{element}")
    return count, transposed


@instruction("ldmatrix")
def compile_ldmatrix(op: Decoder) -> Closure:
    op.expect_operands(2)
    count, transposed = _take_shape(op)
    resolver = Resolver(space_of(op, 1))
    address = op.memory(1)
    elements = op.vector(0)
    if len(elements) != count:
        raise op.unsupported("the vector has another size")
    results = [op.destination(e, np.uint32) for e in elements]
    note_undefined = undefined_noter(op, elements)

    def run(warp: Warp, mask: Mask) -> Wait | None:
        require_full_warp(op, mask)
        # The lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
        addresses = address.evaluate(warp, None)[: _ROWS * count]
        ((region, within, _),) = resolver.pieces(warp, addresses, _lanes(_ROWS * count))
        undefined: list[np.ndarray] = []
        matrices = region.load(within, np.uint16, _ROWS, undefined)
        if undefined:
            note_undefined(warp, None, _registers_of(undefined[0], transposed).T)
        note_access(warp, within, 16, _lanes(_ROWS * count), None, strong=False, writes=False)
        for result, words in zip(results, _registers_of(matrices, transposed), strict=True):
            warp.slots[result][:] = words
        return None

    return aligned(run)


@instruction("stmatrix")
def compile_stmatrix(op: Decoder) -> Closure:
    op.expect_operands(2)
    count, transposed = _take_shape(op)
    resolver = Resolver(space_of(op, 0))
    address = op.memory(0)
    elements = op.vector(1)
    if len(elements) != count:
        raise op.unsupported("the vector has another size")
    places = [op.carried_source(e, np.uint32) for e in elements]

    def run(warp: Warp, mask: Mask) -> None:
        require_full_warp(op, mask)
        addresses = address.evaluate(warp, None)[: _ROWS * count]
        ((region, within, _),) = resolver.pieces(warp, addresses, _lanes(_ROWS * count))
        bits = stored_undefined(warp, places, None, np.uint32)
        undefined = None if bits is None else _matrices_of(bits.T, transposed)
        words = np.stack([warp.slots[each.slot] for each in places])
        region.store(within, _matrices_of(words, transposed), undefined)
        note_access(warp, within, 16, _lanes(_ROWS * count), None, strong=False, writes=True)

    return aligned(run)


def _registers_of(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """Registers, uint32 [matrices, 32], of the rows of matrices, uint16 [8 x matrices, 8]."""
    matrices = rows.reshape(-1, _ROWS, _ROWS)
    matrices = matrices.transpose(0, 2, 1) if transposed else matrices
    return np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, 32)


def _matrices_of(registers: np.ndarray, transposed: bool) -> np.ndarray:
    """The inverse."""
    words = np.ascontiguousarray(registers)
    matrices = words.view(np.uint16).reshape(-1, _ROWS, _ROWS)
    matrices = matrices.transpose(0, 2, 1) if transposed else matrices
    return np.ascontiguousarray(matrices).reshape(-1, _ROWS)


def _lanes(count: int) -> np.ndarray:
    """The first lanes."""
    return np.arange(32) < count


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
