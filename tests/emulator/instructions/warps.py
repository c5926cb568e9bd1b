"""Instructions between the lanes of a warp: shfl, vote, match, redux, elect, activemask.

Sources: PTX ISA 9.7.9.6 (shfl.sync) and 9.7.13.8 to 9.7.13.14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.errors import UnwrittenRead
from emulator.machine.convergence import bits_of, lanes_of, synchronized
from emulator.machine.registers import UNDEFINED, Place, undefined_bits
from emulator.numbers.float_rounding import F32
from emulator.syntax.module import Immediate, Operand, Pair, Sink
from emulator.syntax.ptx_types import TYPE_BITS, bits_type, is_signed

from .elementwise import write
from .floats import FloatChoice
from .registry import Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

_LANES = np.arange(32)


def _result_pair(op: Decoder) -> tuple[Operand, Operand]:
    """The destinations of `d|p`; what is absent is a sink."""
    target = op.operands[0]
    return (target.first, target.second) if isinstance(target, Pair) else (target, Sink())


def shuffle_sources(
    mode: str, lane_operand: np.ndarray, control: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Which lane each lane reads, and whether that one is in range ("shfl.sync", semantics)."""
    offset = lane_operand.astype(np.int64) & 31
    clamp = control.astype(np.int64) & 31
    segment = (control.astype(np.int64) >> 8) & 31
    lowest = _LANES & segment
    highest = lowest | (clamp & ~segment)
    if mode == "up":
        source = _LANES - offset
        in_range = source >= highest
    else:
        source = {
            "down": _LANES + offset,
            "bfly": _LANES ^ offset,
            "idx": lowest | (offset & ~segment),
        }[mode]
        in_range = source <= highest
    return np.where(in_range, source, _LANES), in_range


@instruction("shfl.sync")
def compile_shfl(op: Decoder) -> Closure:
    op.expect_operands(5)
    mode = op.one_of("up", "down", "bfly", "idx")
    op.one_of("b32")
    carried, members = op.carried_source(op.operands[1], np.uint32), op.source(4, np.uint32)
    value = carried.slot
    first, second = _result_pair(op)
    result, in_range = op.destination(first, np.uint32), op.destination(second, np.bool_)
    lane, control = op.source(2, np.uint32), op.source(3, np.uint32)

    def carry(
        warp: Warp, sources: Sequence[Place], given: list[np.ndarray], targets: int
    ) -> list[np.ndarray]:
        """Undefined bits of a lane go where its value goes."""
        others = [bits for each, bits in zip(sources, given, strict=True) if each is not carried]
        chosen, _ = shuffle_sources(mode, warp.slots[lane], warp.slots[control])
        if any(bits.any() for bits in others):
            raise UnwrittenRead(f"a shuffle whose lanes depend on {UNDEFINED}")
        return [undefined_bits(warp, carried)[chosen]]

    op.carry = carry
    if isinstance(op.operands[2], Immediate) and isinstance(op.operands[3], Immediate):
        closure = _constant_shuffle(op, mode, value, result, in_range)
    else:
        closure = _variable_shuffle(op, mode, value, result, in_range)
    return synchronized(closure, members)


def _constant_shuffle(op: Decoder, mode: str, value: int, result: int, in_range: int) -> Closure:
    """A shuffle of which every lane's source is known."""
    lane, control = op.operands[2], op.operands[3]
    assert isinstance(lane, Immediate)
    assert isinstance(control, Immediate)
    sources, valid = shuffle_sources(
        mode, np.full(32, lane.value & 31), np.full(32, control.value & 0x1F1F)
    )

    def run(warp: Warp, mask: Mask) -> None:
        slots = warp.slots
        if mask is None:
            slots[result][:] = slots[value].take(sources)
            slots[in_range][:] = valid
        else:
            _shuffle_some(warp, mask, value, sources, result)
            write(warp, in_range, mask, valid)

    return run


def _variable_shuffle(op: Decoder, mode: str, value: int, result: int, in_range: int) -> Closure:
    lane, control = op.source(2, np.uint32), op.source(3, np.uint32)

    def run(warp: Warp, mask: Mask) -> None:
        slots = warp.slots
        sources, valid = shuffle_sources(mode, slots[lane], slots[control])
        if mask is None:
            slots[result][:] = slots[value].take(sources)
        else:
            _shuffle_some(warp, mask, value, sources, result)
        write(warp, in_range, mask, valid)

    return run


def _shuffle_some(
    warp: Warp, mask: np.ndarray, value: int, sources: np.ndarray, result: int
) -> None:
    """A shuffle of some lanes. What lanes read from others is undefined: garbage."""
    garbage = warp.cta.generator.integers(0, 1 << 32, 32, np.uint32)
    values = np.where(mask, warp.slots[value], garbage)
    write(warp, result, mask, values[sources])


@instruction("vote.sync")
def compile_vote(op: Decoder) -> Closure:
    op.expect_operands(3)
    mode = op.one_of("all", "any", "uni", "ballot")
    ballot = mode == "ballot"
    op.one_of("b32" if ballot else "pred")
    source, members = op.source(1, np.bool_), op.source(2, np.uint32)
    result = op.destination(0, np.uint32 if ballot else np.bool_)

    def run(warp: Warp, mask: Mask) -> None:
        votes = warp.slots[source]
        lanes = warp.lanes(mask)
        if ballot:
            answer: Any = bits_of(votes if mask is None else votes & mask)
        else:
            chosen = votes[lanes]
            answer = {
                "all": chosen.all(),
                "any": chosen.any(),
                "uni": chosen.all() or not chosen.any(),
            }[mode]
        warp.slots[result][lanes] = answer

    return synchronized(run, members)


@instruction("match.any.sync", "match.all.sync")
def compile_match(op: Decoder) -> Closure:
    op.expect_operands(3)
    all_same = op.instruction.parts[1] == "all"
    dtype = bits_type(op.one_of("b32", "b64"))
    source, members = op.source(1, dtype), op.source(2, np.uint32)
    first, second = _result_pair(op)
    if not all_same and not isinstance(second, Sink):
        raise op.unsupported("match.any has no predicate")
    result, predicate = op.destination(first, np.uint32), op.destination(second, np.bool_)

    def run(warp: Warp, mask: Mask) -> None:
        slots, lanes = warp.slots, warp.lanes(mask)
        values = slots[source]
        if all_same:
            same = bool((values[lanes] == values[lanes][0]).all())
            slots[result][lanes] = bits_of(lanes) if same else 0
            slots[predicate][lanes] = same
            return
        for value in np.unique(values[lanes]):
            group = lanes & (values == value)
            slots[result][group] = bits_of(group)

    return synchronized(run, members)


@instruction("redux.sync")
def compile_redux(op: Decoder) -> Closure:
    op.expect_operands(3)
    name = op.one_of("add", "min", "max", "and", "or", "xor")
    absolute, keeps_nan = op.flag("abs"), op.flag("NaN")
    type_name = op.one_of("u32", "s32", "b32", "f32")
    members = op.source(2, np.uint32)
    if type_name == "f32":
        if name not in ("min", "max"):
            raise op.unsupported()
        reduce = _reduce_floats(FloatChoice(name, keeps_nan), absolute)
        dtype: np.dtype = np.dtype("u4")
    elif absolute or keeps_nan or (name in ("and", "or", "xor")) != (type_name == "b32"):
        raise op.unsupported()
    else:
        reduce = _INTEGER_REDUCTIONS[name].reduce
        dtype = np.dtype("i4" if is_signed(type_name) else "u4")
    source, result = op.source(1, dtype.type), op.destination(0, dtype.type)

    def run(warp: Warp, mask: Mask) -> None:
        lanes = warp.lanes(mask)
        warp.slots[result][lanes] = reduce(warp.slots[source][lanes], dtype=dtype)

    return synchronized(run, members)


_INTEGER_REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _reduce_floats(choice: FloatChoice, absolute: bool) -> Callable[..., np.ndarray]:
    def reduce(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
        values = F32.decode(bits)
        values = np.abs(values) if absolute else values
        result = values[:1]
        for index in range(1, len(values)):
            result = choice.choose(result, values[index : index + 1])
        return F32.encode(result)

    return reduce


@instruction("elect.sync")
def compile_elect(op: Decoder) -> Closure:
    """The ISA leaves the leader open, but the same for the same mask: the lowest lane."""
    op.expect_operands(2)
    members = op.source(1, np.uint32)
    first, second = _result_pair(op)
    leader, elected = op.destination(first, np.uint32), op.destination(second, np.bool_)

    def run(warp: Warp, mask: Mask) -> None:
        lanes = warp.lanes(mask)
        named = lanes_of(int(warp.slots[members][lanes][0])) & lanes
        lowest = int(np.flatnonzero(named)[0])
        warp.slots[leader][lanes] = lowest
        warp.slots[elected][lanes] = lowest == _LANES[lanes]

    return synchronized(run, members)


@instruction("activemask")
def compile_activemask(op: Decoder) -> Closure:
    op.expect_operands(1)
    if TYPE_BITS[op.type()] != 32:
        raise op.unsupported()
    result = op.destination(0, np.uint32)

    def run(warp: Warp, mask: Mask) -> None:
        lanes = warp.lanes(mask)
        warp.slots[result][lanes] = bits_of(lanes)

    return run
