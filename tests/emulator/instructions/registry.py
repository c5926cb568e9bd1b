"""Which function compiles which instruction, and what such a function sees.

A compiler is registered for a dotted prefix of opcodes; the longest matching prefix wins:

    @instruction("add")
    def compile_add(op: Decoder) -> Closure:
        type_name = op.type()
        ...
        return closure

It takes the instruction's modifiers from the `Decoder` one by one. Whatever is left when it returns
stops the emulator: a modifier is never ignored silently. The closure is called as `closure(warp,
mask)` with `mask` either None (all 32 lanes) or bool [32] with at least one lane set, and returns
an outcome (see `outcomes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from emulator.errors import UnsupportedInstruction
from emulator.machine.registers import CARRIES, Carry, Place, Uses, carry_all
from emulator.machine.slots import Slots
from emulator.syntax.module import (
    Address,
    Immediate,
    Instruction,
    Name,
    Not,
    Operand,
    Register,
    Sink,
    SpecialRegister,
    Symbol,
    Vector,
)
from emulator.syntax.ptx_types import TYPE_BITS, is_signed

if TYPE_CHECKING:
    from emulator.machine.execution import Warp
    from emulator.machine.program import FunctionLinker

Mask = np.ndarray | None
Dtype = type  # of numpy
Closure = Callable[["Warp", Mask], Any]
Compiler = Callable[["Decoder"], Closure]

# What `printf` (which says nothing here) and `assert` of CUDA call; no module holds their bodies.
PRINT = "vprintf"
EXTERNAL_FUNCTIONS = (PRINT, "__assertfail")

_COMPILERS: dict[str, Compiler] = {}


def instruction(*prefixes: str) -> Callable[[Compiler], Compiler]:
    """Register a compiler for opcodes that begin with one of some dotted prefixes."""

    def register(compiler: Compiler) -> Compiler:
        for prefix in prefixes:
            if prefix in _COMPILERS:
                raise ValueError(f"{prefix} is registered twice")
            _COMPILERS[prefix] = compiler
        return compiler

    return register


# Modules of instructions that compute each lane's results from its own operands.
_OF_LANES = ("integers", "arithmetic", "bits", "comparisons", "conversions", "packed_conversions")
_OF_LANES += ("floats", "moves")


def _carry_of(parsed: Instruction, compiler: Compiler) -> Carry | None:
    """How undefined bits pass through an instruction."""
    if compiler.__module__.rpartition(".")[2] not in _OF_LANES:
        return None
    name = parsed.parts[0]
    exact = not (name == "shr" and any(is_signed(part) for part in parsed.parts[1:]))
    return CARRIES.get(name, carry_all) if exact else carry_all


def compile_instruction(
    parsed: Instruction, slots: Slots, linker: FunctionLinker
) -> tuple[Closure, Uses]:
    """The closure of an instruction and the registers that it uses, its guard left aside.

    Raises
    ------
    UnsupportedInstruction
        Its name, a modifier or an operand is not implemented.
    """
    parts = parsed.parts
    for length in range(len(parts), 0, -1):
        compiler = _COMPILERS.get(".".join(parts[:length]))
        if compiler is not None:
            op = Decoder(parsed, parts[length:], slots, linker)
            closure = compiler(op)
            op.finish()
            uses = Uses(
                tuple(op.sources),
                tuple(op.targets),
                op.carry or _carry_of(parsed, compiler),
                frozenset(op.carried),
            )
            return op.with_refreshed_slots(closure), uses
    raise UnsupportedInstruction(f"{parsed.text}, line {parsed.line}")


class MemoryOperand(NamedTuple):
    """An address operand: slot of the base (uint64 lanes) and a constant offset, in bytes."""

    base: int
    offset: int

    def evaluate(self, warp: Warp, mask: Mask) -> np.ndarray:
        """The addresses of the active lanes, uint64."""
        base = warp.slots[self.base]
        if mask is not None:
            base = base[mask]
        return base + np.uint64(self.offset & _MASK64) if self.offset else base.astype(np.uint64)


_MASK64 = (1 << 64) - 1


def _place(operand: Operand, slot: int, dtype: Dtype) -> Place:
    register = operand.name if isinstance(operand, Register) else None
    return Place(register, slot, 1 if dtype is np.bool_ else np.dtype(dtype).itemsize * 8)


class Decoder:
    """One instruction while it is compiled: its modifiers, operands and slots.

    Attributes
    ----------
    instruction : Instruction
    operands : tuple of Operand
    modifiers : list of str
        Those that nothing has taken yet.
    sources, targets, carry, carried
        Of `Uses`. What carries undefined registers on sets one of the last two.
    """

    def __init__(
        self, parsed: Instruction, modifiers: list[str], slots: Slots, linker: FunctionLinker
    ) -> None:
        self.instruction = parsed
        self.operands = parsed.operands
        self.modifiers = list(modifiers)
        self.slots = slots
        self.linker = linker
        self.sources: list[Place] = []
        self.targets: list[Place] = []
        self.carry: Carry | None = None
        self.carried: list[str] = []
        self._refreshed: list[tuple[int, Callable[[Warp], Any]]] = []

    # Modifiers

    def unsupported(self, why: str = "") -> UnsupportedInstruction:
        """The error that names this instruction."""
        reason = f" ({why})" if why else ""
        return UnsupportedInstruction(
            f"{self.instruction.text}{reason}, line {self.instruction.line}"
        )

    def finish(self) -> None:
        """Insist that every modifier was taken."""
        if self.modifiers:
            raise self.unsupported(f".{self.modifiers[0]} is not implemented")

    def flag(self, name: str) -> bool:
        """Take a modifier if it is there."""
        if name in self.modifiers:
            self.modifiers.remove(name)
            return True
        return False

    def one_of(self, *names: str, default: str | None = None) -> str:
        """Take one of some modifiers, or give the default; without one, it must be there."""
        for name in self.modifiers:
            if name in names:
                self.modifiers.remove(name)
                return name
        if default is None:
            raise self.unsupported(f"one of .{', .'.join(names)} is needed")
        return default

    def ignore(self, *names: str) -> None:
        """Take modifiers that change nothing an emulator could see, such as cache hints."""
        self.modifiers = [name for name in self.modifiers if name not in names]

    def element_type(self, count: int) -> tuple[str, int]:
        """Take the type of a vector of elements; 128 bits are two elements of 64."""
        name = self.type()
        return ("b64", 2 * count) if name == "b128" else (name, count)

    def type(self) -> str:
        """Take the first modifier that names a type."""
        for name in self.modifiers:
            if name in TYPE_BITS:
                self.modifiers.remove(name)
                return name
        raise self.unsupported("a type is needed")

    # Operands

    def expect_operands(self, *counts: int) -> int:
        """How many operands there are, which must be one of some numbers."""
        if len(self.operands) not in counts:
            raise self.unsupported(f"{len(self.operands)} operands")
        return len(self.operands)

    def source(self, operand: int | Operand, dtype: Dtype) -> int:
        """The slot of a source operand: an array of 32 lanes of `dtype`.

        A register wider than `dtype` gives its low part. An address of a variable is a constant.
        """
        operand = self.operands[operand] if isinstance(operand, int) else operand
        slot = self._source(operand, dtype)
        if not isinstance(operand, Not):
            self.sources.append(_place(operand, slot, dtype))
        return slot

    def carried_source(self, operand: Operand, dtype: Dtype) -> Place:
        """A source that may be undefined: the closure asks `undefined_bits` of it."""
        self.source(operand, dtype)
        place = self.sources[-1]
        self.carried += [place.register] if place.register is not None else []
        return place

    def _source(self, operand: Operand, dtype: Dtype) -> int:
        if isinstance(operand, Register):
            return self._register(operand, dtype)
        if isinstance(operand, Immediate):
            return self.slots.constant(self._immediate(operand, dtype), dtype)
        if isinstance(operand, Symbol):
            address = self.linker.address(operand.variable) + operand.offset
            return self.slots.constant(address, dtype)
        if isinstance(operand, SpecialRegister):
            return self._special(operand.name, dtype)
        if isinstance(operand, Not) and dtype is np.bool_:
            return self._negated(operand)
        raise self.unsupported(f"a source operand that is {type(operand).__name__}")

    def destination(self, operand: int | Operand, dtype: Dtype) -> int:
        """The slot of a destination register; for `_`, one that nobody reads."""
        operand = self.operands[operand] if isinstance(operand, int) else operand
        if isinstance(operand, Sink):
            return self.slots.sink(dtype)
        if not isinstance(operand, Register):
            raise self.unsupported(f"a destination that is {type(operand).__name__}")
        slot = self._register(operand, dtype)
        self.targets.append(_place(operand, slot, dtype))
        return slot

    def extended_destination(self, operand: int | Operand, type_name: str) -> int:
        """The slot of a destination that may be wider than the instruction's type.

        Values written to it are sign- or zero-extended to the whole register ("Operand Size
        Exceeding Instruction-Type Size", PTX ISA 9.4.1).
        """
        operand = self.operands[operand] if isinstance(operand, int) else operand
        bits = TYPE_BITS[type_name]
        if isinstance(operand, Register):
            if TYPE_BITS[operand.type] < bits:
                raise self.unsupported("the destination is too narrow")
            bits = TYPE_BITS[operand.type]
        return self.destination(
            operand, np.dtype(f"{'i' if type_name[0] == 's' else 'u'}{bits // 8}").type
        )

    def memory(self, operand: int | Operand) -> MemoryOperand:
        """An address operand `[base + offset]`."""
        operand = self.operands[operand] if isinstance(operand, int) else operand
        if not isinstance(operand, Address) or operand.extra:
            raise self.unsupported("an address is needed")
        base = operand.base
        if isinstance(base, Register) and TYPE_BITS[base.type] == 32:
            # A 32-bit register holds a non-negative address of a small space.
            narrow = self.source(base, np.uint32)
            wide = self.slots.temporary(np.uint64)
            self._refreshed.append((wide, lambda warp: warp.slots[narrow]))
            return MemoryOperand(wide, operand.offset)
        return MemoryOperand(self.source(base, np.uint64), operand.offset)

    def vector(self, operand: int | Operand) -> tuple[Operand, ...]:
        """The elements of `{...}`, the halves of a register of 128 bits, or the operand alone."""
        operand = self.operands[operand] if isinstance(operand, int) else operand
        if isinstance(operand, Register) and operand.type == "b128":
            return tuple(Register(f"{operand.name}/{half}", "b64") for half in ("low", "high"))
        return operand.elements if isinstance(operand, Vector) else (operand,)

    def label(self, operand: int | Operand) -> int:
        """The instruction index of a label."""
        operand = self.operands[operand] if isinstance(operand, int) else operand
        if not isinstance(operand, Name):
            raise self.unsupported("a label is needed")
        return self.linker.label(operand, self)

    def _register(self, register: Register, dtype: Dtype) -> int:
        if (register.type == "pred") != (dtype is np.bool_):
            raise self.unsupported(f"{register.name} is .{register.type}")
        if np.dtype(dtype).itemsize * 8 > max(TYPE_BITS[register.type], 8):
            raise self.unsupported(f"{register.name} is only .{register.type}")
        return self.slots.register(register, dtype)

    def _immediate(self, operand: Immediate, dtype: Dtype) -> int | float:
        """A constant in a type: floats convert, integers wrap around."""
        if issubclass(dtype, np.floating):
            if not operand.float_bits:
                raise self.unsupported("an integer constant for a float")
            stored = np.array(operand.value, f"u{operand.float_bits // 8}")
            return float(stored.view(f"f{operand.float_bits // 8}"))
        if operand.float_bits and operand.float_bits != np.dtype(dtype).itemsize * 8:
            if operand.float_bits == 64 and np.dtype(dtype).itemsize == 4:
                value = np.array(operand.value, np.uint64).view(np.float64)
                return int(value.astype(np.float32).view(np.uint32))
            raise self.unsupported("a float constant of another width")
        return operand.value

    def _special(self, name: str, dtype: Dtype) -> int:
        refresh = self.linker.changing_special(name)
        if refresh is None:
            return self.slots.special(name, dtype, self)
        slot = self.slots.temporary(dtype)
        self._refreshed.append((slot, refresh))
        return slot

    def _negated(self, operand: Not) -> int:
        source = self.source(operand.operand, np.bool_)
        slot = self.slots.temporary(np.bool_)
        self._refreshed.append((slot, lambda warp: ~warp.slots[source]))
        return slot

    def with_refreshed_slots(self, closure: Closure) -> Closure:
        """The closure, after computing the slots that change without an instruction."""
        refreshed = self._refreshed
        if not refreshed:
            return closure

        def run(warp: Warp, mask: Mask) -> Any:
            for slot, compute in refreshed:
                warp.slots[slot][...] = compute(warp)
            return closure(warp, mask)

        if len(refreshed) > 1:
            return run
        only_slot, only_compute = refreshed[0]

        def run_one(warp: Warp, mask: Mask) -> Any:
            warp.slots[only_slot][...] = only_compute(warp)
            return closure(warp, mask)

        return run_one
