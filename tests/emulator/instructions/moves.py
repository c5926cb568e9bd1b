"""Moves between registers ("mov", "cvta", "mapa", "isspacep", PTX ISA 9.7.9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from emulator.machine.address_spaces import (
    LOCAL_WINDOW,
    PARAMETER_BYTES,
    PARAMETERS,
    SHARED_WINDOW,
    WINDOW_BYTES,
)
from emulator.machine.registers import Place
from emulator.syntax.module import Name, Operand, Vector
from emulator.syntax.ptx_types import TYPE_BITS, UNSIGNED, bits_type

from .elementwise import apply_function, apply_ufunc, copy_slot, write
from .registry import Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp


@instruction("mov")
def compile_mov(op: Decoder) -> Closure:
    op.expect_operands(2)
    type_name = op.type()
    result, source = op.operands
    if type_name == "b128":
        return _move_halves(op)
    if isinstance(source, Vector):
        return _pack(op, type_name, result, source.elements)
    if isinstance(result, Vector):
        return _unpack(op, type_name, result.elements, source)
    if isinstance(source, Name):
        raise op.unsupported("the address of a function or label")
    dtype = bits_type(type_name)
    return copy_slot(op.destination(result, dtype), op.source(source, dtype))


def _move_halves(op: Decoder) -> Closure:
    """128 bits: two moves, with temporaries between, as results may be sources."""
    sources, results = op.vector(1), op.vector(0)
    if len(sources) != 2 or len(results) != 2:
        raise op.unsupported("parts that are not halves")
    between = [op.slots.temporary(np.uint64) for _ in sources]
    moves = [copy_slot(t, op.source(s, np.uint64)) for t, s in zip(between, sources, strict=True)]
    moves += [
        copy_slot(op.destination(t, np.uint64), s) for t, s in zip(results, between, strict=True)
    ]

    def carry(
        warp: Warp, places: Sequence[Place], given: list[np.ndarray], targets: int
    ) -> list[np.ndarray]:
        return given

    def run(warp: Warp, mask: Mask) -> None:
        for move in moves:
            move(warp, mask)

    op.carry = carry
    return run


def _part_type(op: Decoder, type_name: str, parts: int) -> type:
    bits = TYPE_BITS[type_name] // parts
    if bits not in UNSIGNED or TYPE_BITS[type_name] > 64:
        raise op.unsupported(f"{parts} parts of .{type_name}")
    return UNSIGNED[bits]


def _pack(op: Decoder, type_name: str, result: Operand, elements: tuple[Operand, ...]) -> Closure:
    part = _part_type(op, type_name, len(elements))
    sources = [op.source(e, part) for e in elements]
    whole = bits_type(type_name)
    target = op.destination(result, whole)
    count = len(sources)

    def run(warp: Warp, mask: Mask) -> None:
        slots = warp.slots
        parts: np.ndarray = np.empty((32, count), part)
        for column, source in enumerate(sources):
            parts[:, column] = slots[source]
        write(warp, target, mask, parts.view(whole)[:, 0])

    return run


def _unpack(op: Decoder, type_name: str, elements: tuple[Operand, ...], source: Operand) -> Closure:
    count = len(elements)
    part = _part_type(op, type_name, count)
    results = [op.destination(e, part) for e in elements]
    value = op.source(source, bits_type(type_name))

    def run(warp: Warp, mask: Mask) -> None:
        # A copy: the source may be one of the results.
        parts = warp.slots[value].copy().view(part).reshape(32, count)
        for column, result in enumerate(results):
            write(warp, result, mask, parts[:, column])

    return run


_WINDOWS = {"shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW, "shared::cluster": SHARED_WINDOW}
_WINDOWS |= {"local": LOCAL_WINDOW, "global": 0, "const": 0, "param": 0, "param::entry": 0}


@instruction("cvta")
def compile_cvta(op: Decoder) -> Closure:
    op.expect_operands(2)
    to_space = op.flag("to")
    window = _WINDOWS[op.one_of(*_WINDOWS)]
    dtype = bits_type(op.type())
    if dtype is not np.uint64:
        raise op.unsupported("32-bit generic addresses")
    shift = op.slots.constant(window, dtype)
    return apply_ufunc(
        np.subtract if to_space else np.add, op.destination(0, dtype), op.source(1, dtype), shift
    )


@instruction("isspacep")
def compile_isspacep(op: Decoder) -> Closure:
    op.expect_operands(2)
    space = op.one_of(*_WINDOWS)
    if space == "const":
        raise op.unsupported("constants and globals share their addresses")
    low, size = _WINDOWS[space], WINDOW_BYTES
    if not low:
        low, size = PARAMETERS, PARAMETER_BYTES

    def inside(address: np.ndarray) -> np.ndarray:
        within = address - np.uint64(low) < np.uint64(size)
        return (address < np.uint64(LOCAL_WINDOW)) & ~within if space == "global" else within

    return apply_function(inside, op.destination(0, np.bool_), op.source(1, np.uint64))


@instruction("mapa")
def compile_mapa(op: Decoder) -> Closure:
    """An address in a CTA of the cluster; there is only one CTA, rank 0."""
    op.expect_operands(3)
    op.ignore("shared::cluster")
    dtype = bits_type(op.type())
    result, source = op.destination(0, dtype), op.source(1, dtype)
    rank = op.source(2, np.uint32)

    def run(warp: Warp, mask: Mask) -> None:
        if warp.slots[rank][warp.lanes(mask)].any():
            raise op.unsupported("a CTA rank above 0 in a cluster of one CTA")
        write(warp, result, mask, warp.slots[source])

    return run


@instruction("getctarank")
def compile_getctarank(op: Decoder) -> Closure:
    op.expect_operands(2)
    op.ignore("shared::cluster")
    source_type = bits_type(op.type())
    op.source(1, source_type)
    return copy_slot(op.destination(0, np.uint32), op.slots.constant(0, np.uint32))
