"""What PTX text says, as data: modules, functions, variables, instructions and operands.

`ptx_parser.parse_module` makes these from text. Names of registers are unique within a function:
a register of a nested scope that hides an outer one has a number appended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Register:
    """A declared register and its type, such as ``b32`` or ``pred``."""

    name: str
    type: str


@dataclass(frozen=True)
class SpecialRegister:
    """A predefined register, such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A constant: an integer, or the bits of a float of `float_bits` (0 for integers)."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Variable:
    """A declared variable, of any state space, or a parameter.

    Attributes
    ----------
    space : str
        ``global``, ``const``, ``shared``, ``local`` or ``param``.
    size, align : int
        Bytes; the size of an unsized (dynamic shared) array is 0.
    offset : int
        Bytes from the start of its parameter list or frame; -1 for module variables.
    initial : bytes or None
        What it holds at the start, where an initialiser says so.
    """

    name: str
    space: str
    size: int
    align: int
    offset: int = -1
    initial: bytes | None = None
    external: bool = False


@dataclass(frozen=True)
class Symbol:
    """The address of a variable plus an offset in bytes."""

    variable: Variable
    offset: int = 0


@dataclass(frozen=True)
class Name:
    """A name that is neither a register nor a variable: a label or a function."""

    text: str
    scopes: tuple[int, ...]


@dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``"""

    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """``[base + offset]``, and for tensors ``[base, {x, y}, ...]``."""

    base: Operand
    offset: int = 0
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Sink:
    """``_``: a result that is thrown away."""


@dataclass(frozen=True)
class Not:
    """``!p``: a negated predicate."""

    operand: Operand


@dataclass(frozen=True)
class Pair:
    """``p|q``: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Part:
    """``%r1.b2``: a part of a register, as the video instructions select it."""

    register: Operand
    selector: str


@dataclass(frozen=True)
class Group:
    """``(a, b)``: an argument list of a call."""

    elements: tuple[Operand, ...]


Operand = (
    Register
    | SpecialRegister
    | Immediate
    | Symbol
    | Name
    | Vector
    | Address
    | Sink
    | Not
    | Pair
    | Part
    | Group
)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes
    ----------
    opcode : str
        The whole dotted name, such as ``ld.global.v4.b32``.
    guard : Register, Not or None
        The predicate of ``@p`` or ``@!p``.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Operand | None
    line: int
    text: str

    @property
    def parts(self) -> list[str]:
        """The opcode's parts between dots."""
        return self.opcode.split(".")


@dataclass
class Function:
    """A kernel (``.entry``) or a device function (``.func``).

    `labels` maps a scope and a name to the index of the instruction that follows the label;
    `targets` does the same for ``.branchtargets`` lists of names.
    """

    name: str
    is_entry: bool
    returns: list[Variable] = field(default_factory=list)
    parameters: list[Variable] = field(default_factory=list)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[tuple[int, str], int] = field(default_factory=dict)
    targets: dict[tuple[int, str], tuple[Name, ...]] = field(default_factory=dict)

    def find(self, name: Name) -> int | None:
        """The instruction index of a label that is visible from a name, innermost scope first."""
        for scope in reversed(name.scopes):
            index = self.labels.get((scope, name.text))
            if index is not None:
                return index
        return None

    def find_targets(self, name: Name) -> tuple[Name, ...] | None:
        """The ``.branchtargets`` list of a name."""
        for scope in reversed(name.scopes):
            names = self.targets.get((scope, name.text))
            if names is not None:
                return names
        return None


@dataclass
class Module:
    """A translation unit."""

    version: str = ""
    target: str = ""
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)

    def kernels(self) -> Iterator[Function]:
        """Its kernels in order."""
        return (f for f in self.functions.values() if f.is_entry)
