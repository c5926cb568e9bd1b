"""Control flow ("Control Flow Instructions", PTX ISA 9.7.12) and what ends or delays lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.errors import Trapped
from emulator.machine.outcomes import EXIT, RETURN, YIELD, Call, Scatter
from emulator.syntax.module import Address, Group, Immediate, Name, Operand, Symbol, Variable

from .elementwise import write
from .registry import EXTERNAL_FUNCTIONS, PRINT, Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp


def nothing(warp: Warp, mask: Mask) -> None:
    """The closure of an instruction without effect."""


@instruction("bra")
def compile_bra(op: Decoder) -> Closure:
    op.expect_operands(1)
    op.ignore("uni")
    target = op.label(0)
    return lambda warp, mask: target


@instruction("brx.idx")
def compile_brx(op: Decoder) -> Closure:
    op.expect_operands(2)
    op.ignore("uni")
    name = op.operands[1]
    if not isinstance(name, Name):
        raise op.unsupported("the targets are no list")
    targets = op.linker.branch_targets(name, op)
    index = op.source(0, np.uint32)

    def run(warp: Warp, mask: Mask) -> Any:
        chosen = warp.slots[index]
        lanes = warp.lanes(mask)
        return Scatter(
            [(lanes & (chosen == value), targets[value]) for value in np.unique(chosen[lanes])]
        )

    return run


@instruction("ret")
def compile_ret(op: Decoder) -> Closure:
    op.expect_operands(0)
    op.ignore("uni")
    return lambda warp, mask: RETURN


@instruction("exit")
def compile_exit(op: Decoder) -> Closure:
    op.expect_operands(0)
    return lambda warp, mask: EXIT


@instruction("trap")
def compile_trap(op: Decoder) -> Closure:
    op.expect_operands(0)

    def run(warp: Warp, mask: Mask) -> None:
        raise Trapped("the kernel trapped")

    return run


@instruction("nanosleep")
def compile_nanosleep(op: Decoder) -> Closure:
    op.expect_operands(1)
    if op.type() != "u32":
        raise op.unsupported()
    return lambda warp, mask: YIELD


@instruction("setmaxnreg")
def compile_setmaxnreg(op: Decoder) -> Closure:
    """Registers are not counted here."""
    op.expect_operands(1)
    op.one_of("inc", "dec")
    for name in ("sync", "aligned", "u32"):
        op.one_of(name)
    return nothing


@instruction("griddepcontrol")
def compile_griddepcontrol(op: Decoder) -> Closure:
    """A launch has no grids before or after it."""
    op.expect_operands(0)
    op.one_of("launch_dependents", "wait")
    return nothing


@instruction("pmevent", "prefetch", "prefetchu", "applypriority", "discard")
def compile_without_effect(op: Decoder) -> Closure:
    """Hints; `discard` only allows memory to lose its contents."""
    if op.instruction.parts[0] == "discard":
        raise op.unsupported("it makes memory undefined")
    op.ignore(*op.modifiers)
    return nothing


_POLICY = np.uint64(0x5EED_CAC4_E901_1C1E)  # its bits are opaque


@instruction("createpolicy.fractional", "createpolicy.range", "createpolicy.cvt")
def compile_createpolicy(op: Decoder) -> Closure:
    """A cache policy, which only hints ("Data Movement and Conversion: createpolicy")."""
    op.expect_operands(*{"fractional": (1, 2), "range": (4,), "cvt": (2,)}[op.instruction.parts[1]])
    op.ignore("global", "L2", *(f"L2::evict_{name}" for name in _PRIORITIES))
    op.one_of("b64")
    for given in op.operands[1:]:
        op.source(given.base if isinstance(given, Address) else given, _type_of(given))
    target = op.destination(0, np.uint64)
    values = np.full(32, _POLICY)

    def run(warp: Warp, mask: Mask) -> None:
        write(warp, target, mask, values)

    return run


_PRIORITIES = ("last", "normal", "first", "unchanged")


def _type_of(operand: Operand) -> type:
    """Of an operand of `createpolicy`: an address, a fraction or a size."""
    if isinstance(operand, Address):
        return np.uint64
    is_float = isinstance(operand, Immediate) and operand.float_bits
    return np.float32 if is_float else np.uint32


@instruction("call")
def compile_call(op: Decoder) -> Closure:
    """Copies arguments into the callee's parameters, and results back after it."""
    op.ignore("uni")
    results, name, arguments = _call_operands(op)
    if name.text in EXTERNAL_FUNCTIONS:
        return nothing if name.text == PRINT else _fail_assertion
    target, callee_linker, callee = op.linker.callee(name, op)
    if len(arguments) != len(callee.parameters) or len(results) != len(callee.returns):
        raise op.unsupported("the arguments do not fit the function")
    copies = [
        (op.linker.address(a), callee_linker.address(p), p.size)
        for a, p in zip(arguments, callee.parameters, strict=True)
    ]
    copies_back = [
        (callee_linker.address(p), op.linker.address(r), p.size)
        for r, p in zip(results, callee.returns, strict=True)
    ]

    def run(warp: Warp, mask: Mask) -> Call:
        _copy_local(warp, mask, copies)
        return Call(target)

    def after(warp: Warp, mask: Mask) -> None:
        _copy_local(warp, mask, copies_back)

    op.linker.after_call = after
    return run


def _fail_assertion(warp: Warp, mask: Mask) -> None:
    raise Trapped("an assertion of the kernel failed")


def _call_operands(op: Decoder) -> tuple[list[Variable], Name, list[Variable]]:
    """The variables for results, the function, and the variables of arguments."""
    operands = list(op.operands)
    results: list[Variable] = []
    if operands and isinstance(operands[0], Group):
        results = _variables(op, operands.pop(0))
    name = operands.pop(0) if operands else None
    if not isinstance(name, Name):
        raise op.unsupported("an indirect call")
    arguments = _variables(op, operands.pop(0)) if operands else []
    if operands:
        raise op.unsupported("an indirect call")
    return results, name, arguments


def _variables(op: Decoder, group: Any) -> list[Variable]:
    if not isinstance(group, Group) or not all(isinstance(e, Symbol) for e in group.elements):
        raise op.unsupported("arguments that are no .param variables")
    return [e.variable for e in group.elements if isinstance(e, Symbol)]


def _copy_local(warp: Warp, mask: Mask, copies: list[tuple[int, int, int]]) -> None:
    """Copy bytes of each active lane's local memory: pairs of addresses, and sizes."""
    lanes = np.flatnonzero(warp.lanes(mask))
    storage = warp.local.storage.reshape(32, -1)
    shadow = warp.local.shadow.reshape(32, -1)
    for source, target, size in copies:
        for array in (storage, shadow):
            array[lanes, target : target + size] = array[lanes, source : source + size]
