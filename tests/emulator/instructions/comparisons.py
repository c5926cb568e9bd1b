"""Comparison and selection ("setp", "set", "selp", "slct", PTX ISA 9.7.6 and 9.7.7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from emulator.machine.registers import Carry, Place
from emulator.numbers.float_rounding import F32
from emulator.syntax.module import Not, Pair
from emulator.syntax.ptx_types import TYPE_BITS, UNSIGNED, bits_type, integer_type

from .elementwise import apply_function, apply_ufunc, write
from .floats import Kind, is_float, take_kind
from .registry import Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

Compare = Callable[[np.ndarray, np.ndarray], np.ndarray]

_INTEGER: dict[str, np.ufunc] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    # Unsigned comparisons by their old names.
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _either_nan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isnan(a) | np.isnan(b)


# Ordered comparisons are false where a NaN is, those with `u` true ("Floating-Point Comparisons").
_FLOAT: dict[str, Compare] = {
    "eq": np.equal,
    "ne": lambda a, b: (a != b) & ~_either_nan(a, b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: (a == b) | _either_nan(a, b),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~_either_nan(a, b),
    "nan": _either_nan,
}
_COMBINE: dict[str, np.ufunc] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def _take_comparison(op: Decoder) -> tuple[Compare, Kind | None, type]:
    """Take the comparison, `.ftz` and the type of what is compared (the last type)."""
    name = op.one_of(*_FLOAT, *_INTEGER)
    if is_float(op):
        kind = take_kind(op)
        function = _FLOAT.get(name)
        if function is None:
            raise op.unsupported(f".{name} of floats")
        return function, kind, kind.dtype
    type_name = op.type()
    if name not in _INTEGER:
        raise op.unsupported(f".{name} of integers")
    if name in ("lo", "ls", "hi", "hs"):
        return _INTEGER[name], None, UNSIGNED[TYPE_BITS[type_name]]
    return _INTEGER[name], None, integer_type(type_name)


def _on_registers(compare: Compare, kind: Kind | None) -> Compare:
    """The comparison of registers as bits: bool [32], or [32, 2] for pairs."""
    if kind is None:
        return compare
    if kind.count == 1:
        return lambda a, b: compare(kind.values(a), kind.values(b))
    return lambda a, b: compare(kind.values(a), kind.values(b)).reshape(32, 2)


@instruction("setp")
def compile_setp(op: Decoder) -> Closure:
    combine = _COMBINE.get(op.one_of("and", "or", "xor", default="none"))
    compare, kind, dtype = _take_comparison(op)
    op.expect_operands(3 if combine is None else 4)
    target = op.operands[0]
    if combine is None and not isinstance(target, Pair) and (kind is None or kind.count == 1):
        return _simple_setp(op, compare, kind, dtype)
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    results = [op.destination(r, np.bool_) for r in (first, second) if r is not None]
    on_registers = _on_registers(compare, kind)
    a, b = op.source(1, dtype), op.source(2, dtype)
    other = None if combine is None else op.source(3, np.bool_)
    halves = kind is not None and kind.count == 2
    if not halves:
        op.carry = _carry_combined(on_registers, combine, isinstance(op.operands[-1], Not))

    def run(warp: Warp, mask: Mask) -> None:
        slots = warp.slots
        truth = on_registers(slots[a], slots[b])
        # For pairs the second predicate is of the upper halves, else of the negated comparison.
        answers = [truth[:, 0], truth[:, 1]] if halves else [truth, ~truth]
        if combine is not None and other is not None:
            answers = [combine(answer, slots[other]) for answer in answers]
        for result, answer in zip(results, answers, strict=False):
            write(warp, result, mask, answer)

    return run


def _carry_combined(compare: Compare, combine: np.ufunc | None, negated: bool) -> Carry:
    """A comparison, or the predicate it is combined with, may decide by itself."""
    decides = {np.logical_and: False, np.logical_or: True}.get(combine)

    def carry(
        warp: Warp, sources: Sequence[Place], given: list[np.ndarray], targets: int
    ) -> list[np.ndarray]:
        first, second = (warp.slots[each.slot] for each in sources[:2])
        truth, compared = compare(first, second), (given[0] | given[1]) != 0
        results = []
        for answer in (truth, ~truth)[:targets]:
            unknown = compared
            if combine is not None:
                other, undefined = warp.slots[sources[2].slot] ^ negated, given[2] != 0
                unknown = compared | undefined
                if decides is not None:
                    unknown &= ~(~compared & (answer == decides))
                    unknown &= ~(~undefined & (other == decides))
            results.append(unknown.astype(np.uint64))
        return results

    return carry


def _simple_setp(op: Decoder, compare: Compare, kind: Kind | None, dtype: type) -> Closure:
    result = op.destination(0, np.bool_)
    if kind is not None and kind.format is F32 and not kind.ftz:
        dtype, kind = np.float32, None
    sources = op.source(1, dtype), op.source(2, dtype)
    if kind is None and isinstance(compare, np.ufunc):
        return apply_ufunc(compare, result, *sources)
    return apply_function(_on_registers(compare, kind), result, *sources)


# What true is as a result of `set`; false is 0.
_TRUE = {
    **dict.fromkeys(("u32", "s32"), 0xFFFFFFFF),
    **dict.fromkeys(("u16", "s16"), 0xFFFF),
    "f32": 0x3F800000,
    "f16": 0x3C00,
    "bf16": 0x3F80,
    "f16x2": 0x3C00,
    "bf16x2": 0x3F80,
}


@instruction("set")
def compile_set(op: Decoder) -> Closure:
    """Comparisons with an integer (all ones or 0) or a float (1 or 0) as result."""
    combine = _COMBINE.get(op.one_of("and", "or", "xor", default="none"))
    types = [name for name in op.modifiers if name in TYPE_BITS]
    if len(types) != 2:
        raise op.unsupported("two types are needed")
    op.modifiers.remove(types[0])
    compare, kind, dtype = _take_comparison(op)
    op.expect_operands(3 if combine is None else 4)
    halves = kind is not None and kind.count == 2
    if types[0] not in _TRUE or halves != types[0].endswith("x2"):
        raise op.unsupported(f"results of .{types[0]}")
    result_type = bits_type(types[0])
    element = np.uint16 if halves else result_type
    on_registers = _on_registers(compare, kind)
    sources = [op.source(1, dtype), op.source(2, dtype)]
    if combine is not None:
        sources.append(op.source(3, np.bool_))

    def function(a: np.ndarray, b: np.ndarray, *other: np.ndarray) -> np.ndarray:
        truth = on_registers(a, b)
        if combine is not None:
            truth = combine(truth, other[0][:, None] if halves else other[0])
        return np.where(truth, element(_TRUE[types[0]]), element(0)).view(result_type).reshape(32)

    return apply_function(function, op.destination(0, result_type), *sources)


@instruction("selp")
def compile_selp(op: Decoder) -> Closure:
    op.expect_operands(4)
    dtype = bits_type(op.type())
    first, second = op.source(1, dtype), op.source(2, dtype)
    chooses = op.source(3, np.bool_)
    result = op.destination(0, dtype)

    def run(warp: Warp, mask: Mask) -> None:
        slots = warp.slots
        values = np.where(slots[chooses], slots[first], slots[second])
        if mask is None:
            slots[result][:] = values
        else:
            np.copyto(slots[result], values, where=mask)

    return run


@instruction("slct")
def compile_slct(op: Decoder) -> Closure:
    """The first value where the third operand is not negative."""
    op.expect_operands(4)
    ftz = op.flag("ftz")
    dtype = bits_type(op.type())
    condition = op.one_of("s32", "f32")
    if ftz and condition != "f32":
        raise op.unsupported(".ftz without a float")
    tested = np.int32 if condition == "s32" else np.float32

    # -0 counts as 0, so does what `.ftz` flushes; NaN is not greater or equal.
    def select(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        c = np.where(np.abs(c) < 2.0**-126, 0.0, c) if ftz else c
        return np.where(c >= 0, a, b)

    sources = op.source(1, dtype), op.source(2, dtype), op.source(3, tested)
    return apply_function(select, op.destination(0, dtype), *sources)
