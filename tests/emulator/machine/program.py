"""A kernel and the functions that it calls, compiled to closures and laid out in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.errors import UnsupportedInstruction
from emulator.instructions.families import load_all
from emulator.instructions.registry import (
    EXTERNAL_FUNCTIONS,
    Closure,
    Decoder,
    Mask,
    compile_instruction,
)
from emulator.syntax.module import (
    Function,
    Group,
    Instruction,
    Module,
    Name,
    Not,
    Operand,
    Register,
    Variable,
)

from .address_spaces import MODULE_VARIABLES, PARAMETERS, SHARED_BASE
from .outcomes import RETURN, Scatter
from .registers import Uses
from .slots import Slots
from .special_registers import CHANGING_REGISTERS

if TYPE_CHECKING:
    from .execution import Warp

_FULL = b"\x01" * 32
_NONE = b"\x00" * 32
_NO_USES = Uses()


@dataclass
class Program:
    """A compiled kernel.

    Attributes
    ----------
    code : list of closures
    uses : list of Uses
        The registers of each closure.
    names : list of set of str
        Their names.
    sources : list of Instruction
        The instruction behind each closure.
    shared_bytes : int
        Where dynamic shared memory begins, from the start of the shared window.
    local_bytes : int
        Of all frames, per lane.
    module_variables : list of (Variable, int)
        Variables in global and constant memory with their addresses.
    """

    kernel: Function
    slots: Slots = field(default_factory=Slots)
    code: list[Closure] = field(default_factory=list)
    uses: list[Uses] = field(default_factory=list)
    names: list[frozenset[str]] = field(default_factory=list)
    sources: list[Instruction] = field(default_factory=list)

    def add(self, closure: Closure, source: Instruction, uses: Uses = _NO_USES) -> None:
        """Append a closure."""
        self.code.append(closure)
        self.sources.append(source)
        self.uses.append(uses)
        self.names.append(uses.names)

    shared_bytes: int = SHARED_BASE
    local_bytes: int = 0
    module_variables: list[tuple[Variable, int]] = field(default_factory=list)


def compile_kernel(module: Module, name: str) -> Program:
    """Compile a kernel and every function it can reach.

    Raises
    ------
    UnsupportedInstruction
        Something in it is not implemented, whether or not a launch would reach it.
    ValueError
        There is no such kernel.
    """
    load_all()
    if name not in module.functions or not module.functions[name].is_entry:
        names = ", ".join(kernel.name for kernel in module.kernels())
        raise ValueError(f"no kernel {name} in the module; it has {names or 'none'}")
    return _Linker(module, module.functions[name]).link()


def _aligned(offset: int, align: int) -> int:
    return -(-offset // align) * align


class _Linker:
    """Lays variables out and compiles functions one after another."""

    def __init__(self, module: Module, kernel: Function) -> None:
        self.module = module
        self.program = Program(kernel)
        self.entries: dict[str, int] = {}
        self.frames: dict[tuple[str, str], int] = {}
        self.addresses: dict[str, int] = {}

    def link(self) -> Program:
        program = self.program
        functions = self._reachable(program.kernel, [])
        self._lay_out_module()
        for function in functions:
            self._lay_out_function(function)
        self._lay_out_dynamic()
        linkers = []
        start = 0
        for function in functions:
            linker = FunctionLinker(self, function, start)
            linkers.append(linker)
            self.entries[function.name] = start
            start = linker.end
        for linker in linkers:
            linker.compile(program)
        return program

    def _reachable(self, function: Function, callers: list[str]) -> list[Function]:
        """The function and those that it calls, each once, callers first."""
        result = [function]
        for parsed in function.instructions:
            if not parsed.opcode.startswith("call"):
                continue
            called = next((o for o in parsed.operands if not isinstance(o, Group)), None)
            place = f"{parsed.text}, line {parsed.line}"
            if not isinstance(called, Name):
                raise UnsupportedInstruction(f"{place} (an indirect call)")
            if called.text in EXTERNAL_FUNCTIONS:
                continue
            callee = self.module.functions.get(called.text)
            if callee is None or not callee.instructions:
                raise UnsupportedInstruction(f"{place} (no body)")
            if callee.name in [*callers, function.name]:
                raise UnsupportedInstruction(f"{place} (recursion)")
            for found in self._reachable(callee, [*callers, function.name]):
                if found not in result:
                    result.append(found)
        return result

    def _lay_out_module(self) -> None:
        address = MODULE_VARIABLES
        for variable in self.module.variables.values():
            if variable.space == "shared":
                if variable.size:
                    self._place_shared(variable.name, variable)
            elif variable.external:
                raise UnsupportedInstruction(f".extern variable {variable.name}")
            else:
                address = _aligned(address, max(variable.align, 16))
                self.addresses[variable.name] = address
                self.program.module_variables.append((variable, address))
                address += variable.size

    def _place_shared(self, key: str, variable: Variable) -> None:
        start = _aligned(self.program.shared_bytes, variable.align)
        self.addresses[key] = start
        self.program.shared_bytes = start + variable.size

    def _lay_out_dynamic(self) -> None:
        """Every unsized shared array begins where the sized ones end."""
        unsized = [v for v in self.module.variables.values() if v.space == "shared" and not v.size]
        align = max([16, *(v.align for v in unsized)])
        self.program.shared_bytes = _aligned(self.program.shared_bytes, align)
        for variable in unsized:
            self.addresses[variable.name] = self.program.shared_bytes

    def _lay_out_function(self, function: Function) -> None:
        """Static frames: recursion is not supported."""
        program = self.program
        for variable in function.variables:
            if variable.space == "shared":
                self._place_shared(f"{function.name}/{variable.name}", variable)
            elif variable.space in ("global", "const"):
                raise UnsupportedInstruction(f"variable {variable.name} within a function")
        for space, variables in _frames(function).items():
            program.local_bytes = _aligned(program.local_bytes, 32)
            self.frames[function.name, space] = program.local_bytes
            size = max((v.offset + v.size for v in variables), default=0)
            program.local_bytes += size


def _frames(function: Function) -> dict[str, list[Variable]]:
    """Variables that lie in local memory: locals, and parameters of calls."""
    parameters = [v for v in function.variables if v.space == "param"]
    if not function.is_entry:
        parameters += function.parameters + function.returns
    return {"local": [v for v in function.variables if v.space == "local"], "param": parameters}


class FunctionLinker:
    """What compilers of one function's instructions may ask about names.

    Attributes
    ----------
    after_call : closure
        What runs where the call that is being compiled comes back to; `call` sets it.
    """

    def __init__(self, linker: _Linker, function: Function, start: int) -> None:
        self._linker = linker
        self._function = function
        self._positions = []
        position = start
        for parsed in function.instructions:
            self._positions.append(position)
            position += 2 if parsed.opcode.startswith("call") else 1
        self._positions.append(position)
        self.end = position + 1  # the end of the body returns
        self.after_call: Closure = _go_on
        self._kernel_parameters = set(function.parameters) if function.is_entry else set()

    def compile(self, program: Program) -> None:
        """Append the function's closures to the program."""
        for parsed in self._function.instructions:
            closure, uses = compile_instruction(parsed, program.slots, self)
            if parsed.guard is not None:
                op = Decoder(parsed, [], program.slots, self)
                closure, negated = _guard(closure, parsed.guard, op)
                uses = replace(uses, guard=(op.sources[0], negated))
            program.add(closure, parsed, uses)
            if parsed.opcode.startswith("call"):
                program.add(self.after_call, parsed)
                self.after_call = _go_on
        program.add(
            lambda warp, mask: RETURN, Instruction("ret", (), None, 0, "the end of the function")
        )

    def address(self, variable: Variable) -> int:
        """A variable's address within its state space."""
        linker = self._linker
        if self.is_kernel_parameter(variable):
            return PARAMETERS + variable.offset
        if variable.space in ("local", "param"):
            return linker.frames[self._function.name, variable.space] + variable.offset
        scoped = f"{self._function.name}/{variable.name}"
        return linker.addresses[scoped if scoped in linker.addresses else variable.name]

    def is_kernel_parameter(self, variable: Variable) -> bool:
        return variable in self._kernel_parameters

    def label(self, name: Name, op: Decoder) -> int:
        """The position in the code of a label."""
        index = self._function.find(name)
        if index is None:
            raise op.unsupported(f"no label {name.text}")
        return self._positions[index]

    def branch_targets(self, name: Name, op: Decoder) -> list[int]:
        """The positions of a `.branchtargets` list."""
        names = self._function.find_targets(name)
        if names is None:
            raise op.unsupported(f"no .branchtargets {name.text}")
        return [self.label(target, op) for target in names]

    def callee(self, name: Name, op: Decoder) -> tuple[int, FunctionLinker, Function]:
        """A function's position in the code, its names, and itself."""
        function = self._linker.module.functions.get(name.text)
        if function is None or name.text not in self._linker.entries:
            raise op.unsupported(f"no function {name.text}")
        start = self._linker.entries[name.text]
        return start, FunctionLinker(self._linker, function, start), function

    def changing_special(self, name: str) -> Callable[[Warp], int] | None:
        """How to read a special register that changes while a warp runs."""
        return CHANGING_REGISTERS.get(name)


def _go_on(warp: Warp, mask: Mask) -> None:
    """Where a call without results comes back to."""


def _guard(closure: Closure, guard: Operand, op: Decoder) -> tuple[Closure, bool]:
    """The closure under `@p` or `@!p`, and whether it is the second."""
    negated = isinstance(guard, Not)
    register = guard.operand if isinstance(guard, Not) else guard
    if not isinstance(register, Register):
        raise op.unsupported("the guard is no predicate")
    slot = op.source(register, np.bool_)

    def run(warp: Warp, mask: Mask) -> Any:
        active = warp.slots[slot]
        if negated:
            active = ~active
        if mask is not None:
            active = active & mask
            pattern = active.tobytes()
            if pattern == mask.tobytes():
                return closure(warp, mask)
        else:
            pattern = active.tobytes()
            if pattern == _FULL:
                return closure(warp, None)
            if not negated:
                active = active.copy()
        if pattern == _NONE:
            return None
        warp.guarded = active
        outcome = closure(warp, active)
        warp.guarded = None
        if outcome is None:
            return None
        rest = ~active if mask is None else mask & ~active
        if isinstance(outcome, Scatter):
            return Scatter([*outcome.parts, (rest, None)])
        return Scatter([(active, outcome), (rest, None)])

    return run, negated
