"""Atomic operations on memory ("atom", "red", PTX ISA 9.7.13.5 and 9.7.13.6).

Lanes of one instruction take their turns in a random order. Addition of f32 in global memory keeps
subnormal numbers, which a GPU's flushes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from emulator.machine.outcomes import YIELD, Signal
from emulator.numbers.float_rounding import FORMATS, FloatFormat, add_to_odd
from emulator.syntax.module import Sink
from emulator.syntax.ptx_types import TYPE_BITS, UNSIGNED, is_signed

from .floats import FloatChoice
from .memory_accesses import CACHE_HINTS, SCOPES, Resolver, space_of
from .registry import Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

# The new value from the old one and the operands, as unsigned bits of one lane.
Update = Callable[[int, int, int], int]

_OPERATIONS = ("and", "or", "xor", "cas", "exch", "add", "inc", "dec", "min", "max")


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def integer_update(name: str, type_name: str) -> Update:
    """The update of an operation on integers."""
    bits = TYPE_BITS[type_name]
    low = (1 << bits) - 1
    key = (lambda value: _signed(value, bits)) if is_signed(type_name) else int
    updates: dict[str, Update] = {
        "and": lambda old, b, c: old & b,
        "or": lambda old, b, c: old | b,
        "xor": lambda old, b, c: old ^ b,
        "exch": lambda old, b, c: b,
        "cas": lambda old, b, c: c if old == b else old,
        "add": lambda old, b, c: (old + b) & low,
        "inc": lambda old, b, c: 0 if old >= b else old + 1,
        "dec": lambda old, b, c: b if old == 0 or old > b else old - 1,
        "min": lambda old, b, c: min(old, b, key=key),
        "max": lambda old, b, c: max(old, b, key=key),
    }
    return updates[name]


def _float_update(name: str, float_format: FloatFormat) -> Update:
    dtype = UNSIGNED[float_format.bits]
    if name == "add":
        combine = add_to_odd if float_format.name != "f64" else np.add
    else:
        combine = FloatChoice(name, keeps_nan=False).choose

    def update(old: int, b: int, c: int) -> int:
        values = float_format.decode(np.array([old, b], dtype))
        result = combine(values[:1], values[1:])
        if float_format.name != "f64":
            result = float_format.round(result)
        return int(float_format.encode(result)[0])

    return update


def _check_type(op: Decoder, name: str, type_name: str) -> None:
    """Refuse combinations that the ISA does not have."""
    if TYPE_BITS[type_name] not in UNSIGNED:
        raise op.unsupported(f"atomics of .{type_name}")
    bitwise = name in ("and", "or", "xor", "cas", "exch")
    if bitwise != (type_name[0] == "b" and type_name not in ("bf16", "bf16x2")):
        raise op.unsupported(f".{name} of .{type_name}")
    if name in ("min", "max") and type_name in ("f32", "f64"):
        raise op.unsupported(f".{name} of .{type_name}")
    if name in ("inc", "dec") and type_name != "u32":
        raise op.unsupported(f".{name} of .{type_name}")


@instruction("atom", "red")
def compile_atomic(op: Decoder) -> Closure:
    returns = op.instruction.parts[0] == "atom"
    first = 1 if returns else 0
    space = space_of(op, first)
    op.ignore("relaxed", "acquire", "release", "acq_rel", *SCOPES, *CACHE_HINTS)
    name = op.one_of(*_OPERATIONS)
    count = int(op.one_of("v2", "v4", "v8", default="v1")[1:])
    noftz = op.flag("noftz")
    type_name = op.type()
    _check_type(op, name, type_name)
    element_type = type_name.removesuffix("x2")
    parts = count * (2 if type_name.endswith("x2") else 1)
    if element_type in FORMATS:
        update = _float_update(name, FORMATS[element_type])
        if noftz != (TYPE_BITS[element_type] == 16):
            raise op.unsupported(".noftz belongs to half precision")
    else:
        update = integer_update(name, type_name)
    operands = len(op.operands) - first
    if operands < (3 if name == "cas" else 2) or operands > 3:
        raise op.unsupported(f"{len(op.operands)} operands")
    return _atomic_closure(op, space, type_name, update, count, parts, name == "cas")


def _atomic_closure(
    op: Decoder,
    space: str,
    type_name: str,
    update: Update,
    count: int,
    parts: int,
    compares: bool,
) -> Closure:
    first = 1 if op.instruction.parts[0] == "atom" else 0
    memory, resolver = op.memory(first), Resolver(space)
    dtype = UNSIGNED[TYPE_BITS[type_name]]
    element = np.dtype(f"u{np.dtype(dtype).itemsize * count // parts}").type
    values = [op.source(e, dtype) for e in op.vector(first + 1)]
    swaps = op.source(first + 2, dtype) if compares else None
    results: list[int] = []
    if first and not isinstance(op.operands[0], Sink):
        results = [op.destination(e, dtype) for e in op.vector(0)]
    if len(values) != count or len(results) not in (0, count):
        raise op.unsupported("the vector has another size")

    def run(warp: Warp, mask: Mask) -> Signal | None:
        slots, lanes = warp.slots, np.flatnonzero(warp.lanes(mask))
        addresses = memory.evaluate(warp, mask)
        changed = False
        old = np.zeros((len(lanes), count), dtype)
        for index in warp.cta.generator.permutation(len(lanes)):
            one = np.zeros(32, bool)
            one[lanes[index]] = True
            ((region, within, _),) = resolver.pieces(warp, addresses[index : index + 1], one)
            old[index] = region.load(within, dtype, count)[0]
            given = np.array([slots[value][lanes[index]] for value in values], dtype)
            swap = 0 if swaps is None else int(slots[swaps][lanes[index]])
            new = [
                update(before, after, swap)
                for before, after in zip(
                    old[index].view(element).tolist(), given.view(element).tolist(), strict=True
                )
            ]
            if region is warp.cta.shared:
                warp.cta.clocks.synchronize_location(warp, one, int(within[0]))
            stored = np.array([new], element).view(dtype).reshape(1, count)
            region.store(within, stored)
            changed = changed or bool((stored != old[index]).any())
        for column, result in enumerate(results):
            slots[result][lanes] = old[:, column]
        if results and not changed:
            return YIELD  # it may be polling, as a spin lock does: somebody else must go on
        warp.cta.launch.events += 1
        return None

    return run
