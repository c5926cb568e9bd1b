"""`mma.sync` ("mma", PTX ISA 9.7.14.5).

All shapes place their elements by one rule. With e elements in a 32-bit register, lane `4 * g + t`
holds

* of A in register r the elements `(r // s) * 4 * e + t * e + i` of row `g + 8 * (r % s)`, where s
  is 2 for 16 rows and 1 for 8;
* of B in register r the elements `r * 4 * e + t * e + i` of column g;
* of C and D elements `2 * t` and `2 * t + 1` of row g, then of row g + 8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from emulator.machine.convergence import aligned, require_full_warp
from emulator.machine.registers import Place
from emulator.numbers import number_formats
from emulator.numbers.float_rounding import F16, F32, add_to_odd
from emulator.numbers.number_formats import Format
from emulator.numbers.tensor_core_sums import HOPPER, accumulate
from emulator.syntax.ptx_types import UNSIGNED

from .registry import Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

_GROUP, _THREAD = np.arange(32) >> 2, np.arange(32) & 3

# Shapes (m, n, k) by operand type, where the accumulators are 32-bit.
_SHAPES = {
    "f16": ["m16n8k8", "m16n8k16"],
    "bf16": ["m16n8k8", "m16n8k16"],
    "tf32": ["m16n8k4", "m16n8k8"],
    "e4m3": ["m16n8k16", "m16n8k32"],
    "e5m2": ["m16n8k16", "m16n8k32"],
    "s8": ["m8n8k16", "m16n8k16", "m16n8k32"],
    "u8": ["m8n8k16", "m16n8k16", "m16n8k32"],
    "s4": ["m8n8k32", "m16n8k32", "m16n8k64"],
    "u4": ["m8n8k32", "m16n8k32", "m16n8k64"],
}
_BITS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "e4m3": 8,
    "e5m2": 8,
    "s8": 8,
    "u8": 8,
    "s4": 4,
    "u4": 4,
}
# Formats, and the exponent of the smallest normal number of the format that is multiplied.
_FLOATS: dict[str, tuple[Format, int]] = {
    "f16": (number_formats.F16, -14),
    "bf16": (number_formats.BF16, -126),
    "tf32": (number_formats.TF32, -126),
    "e4m3": (number_formats.E4M3, -14),
    "e5m2": (number_formats.E5M2, -14),
}


@dataclass(frozen=True)
class Shape:
    """Rows, columns and inner size of a multiplication, and bits of an element of A and B."""

    m: int
    n: int
    k: int
    bits: int

    @property
    def a_registers(self) -> int:
        return self.m * self.k * self.bits // 1024

    @property
    def b_registers(self) -> int:
        return self.n * self.k * self.bits // 1024


@lru_cache
def a_places(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every element of A: int [registers, lanes, elements]."""
    elements = 32 // shape.bits
    step = 2 if shape.m == 16 else 1
    register = np.arange(shape.a_registers)[:, None, None]
    element = np.arange(elements)
    rows = _GROUP[:, None] + 8 * (register % step) + 0 * element
    columns = (register // step) * 4 * elements + _THREAD[:, None] * elements + element
    return rows, columns


@lru_cache
def b_places(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every element of B: int [registers, lanes, elements]."""
    elements = 32 // shape.bits
    register = np.arange(shape.b_registers)[:, None, None]
    element = np.arange(elements)
    rows = register * 4 * elements + _THREAD[:, None] * elements + element
    return rows, _GROUP[:, None] + 0 * rows


@lru_cache
def c_places(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every element of C and D: int [elements, lanes]."""
    index = np.arange(shape.m * shape.n // 32)[:, None]
    return _GROUP + 8 * (index // 2), 2 * _THREAD + index % 2


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes in 32-bit registers: uint [..., 32 // bits], lowest first."""
    if bits >= 8:
        return np.ascontiguousarray(words)[..., None].view(UNSIGNED[bits])
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((words[..., None] >> shifts) & np.uint32((1 << bits) - 1)).astype(np.uint8)


def _integers(codes: np.ndarray, type_name: str) -> np.ndarray:
    """Values of integer codes, int64."""
    bits = _BITS[type_name]
    values = codes.astype(np.int64)
    return values - ((values >> (bits - 1)) << bits) if type_name[0] == "s" else values


class Multiplication:
    """A decoded `mma`: how to read its registers and what to compute."""

    def __init__(self, shape: Shape, a_type: str, b_type: str) -> None:
        self.shape = shape
        self.a_type, self.b_type = a_type, b_type
        self._a, self._b, self._c = a_places(shape), b_places(shape), c_places(shape)

    def matrices(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A [m, k] and B [k, n] as codes, from registers [registers, lanes]."""
        shape = self.shape
        a_codes, b_codes = unpack(a, shape.bits), unpack(b, shape.bits)
        left = np.empty((shape.m, shape.k), a_codes.dtype)
        right = np.empty((shape.k, shape.n), b_codes.dtype)
        left[self._a] = a_codes
        right[self._b] = b_codes
        return left, right

    def spread(self, matrix: np.ndarray) -> np.ndarray:
        """Elements of D [m, n] by register and lane."""
        return matrix[self._c]

    def collect(self, elements: np.ndarray) -> np.ndarray:
        """C [m, n] from elements by register and lane."""
        matrix = np.empty((self.shape.m, self.shape.n), elements.dtype)
        matrix[self._c] = elements
        return matrix

    def float_result(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """D from codes of A and B and the values of C, all float64."""
        (a_format, minimum), (b_format, _) = _FLOATS[self.a_type], _FLOATS[self.b_type]
        left, right = a_format.decode(a), b_format.decode(b)
        rule = HOPPER[self.a_type]
        if self.shape.bits > 8:
            return accumulate(left, right, c, minimum, rule)
        # SM90 converts FP8 to FP16, the lower halves of registers first, and adds C in the end.
        columns = np.arange(self.shape.k)
        order = np.concatenate((columns[columns % 4 < 2], columns[columns % 4 >= 2]))
        products = accumulate(left[:, order], right[order], np.zeros_like(c), minimum, rule)
        return F32.round(add_to_odd(products, c))

    def integer_result(
        self, a: np.ndarray, b: np.ndarray, c: np.ndarray, saturate: bool
    ) -> np.ndarray:
        """D, int32: sums wrap around, or are clamped."""
        left, right = _integers(a, self.a_type), _integers(b, self.b_type)
        total = (left.astype(np.float64) @ right.astype(np.float64)).astype(np.int64) + c
        if saturate:
            total = np.clip(total, -(1 << 31), (1 << 31) - 1)
        return total.astype(np.int32)


def _take_shape(op: Decoder) -> tuple[int, int, int]:
    for name in op.modifiers:
        match = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", name)
        if match:
            op.modifiers.remove(name)
            m, n, k = (int(part) for part in match.groups())
            return m, n, k
    raise op.unsupported("a shape is needed")


@instruction("mma.sync.aligned")
def compile_mma(op: Decoder) -> Closure:
    op.expect_operands(4)
    if "block_scale" in op.modifiers or "sp" in op.instruction.parts:
        raise op.unsupported()
    m, n, k = _take_shape(op)
    op.one_of("row")
    op.one_of("col")
    saturate = op.flag("satfinite")
    types = [name for name in op.modifiers if name in ("f32", "s32", *_BITS)]
    for name in types:
        op.modifiers.remove(name)
    if len(types) != 4:
        raise op.unsupported("four types are needed")
    d_type, a_type, b_type, c_type = types
    if f"m{m}n{n}k{k}" not in _SHAPES.get(a_type, ()) or _BITS[a_type] != _BITS.get(b_type):
        raise op.unsupported(f".m{m}n{n}k{k} of .{a_type} and .{b_type}")
    if a_type in ("f16", "bf16", "tf32") and a_type != b_type:
        raise op.unsupported("operands of two types")
    operation = Multiplication(Shape(m, n, k, _BITS[a_type]), a_type, b_type)
    sources = _Registers(op, operation.shape)
    if d_type == c_type == "s32" and a_type not in _FLOATS:
        result = partial(operation.integer_result, saturate=saturate)
        return aligned(_closure(op, operation, sources, np.int32, 1, _same, result, _same))
    if a_type not in _FLOATS or saturate or c_type != d_type:
        raise op.unsupported()
    result = operation.float_result
    if d_type == "f32":
        return aligned(
            _closure(op, operation, sources, np.uint32, 1, F32.decode, result, F32.encode)
        )
    if d_type == "f16" and a_type in ("f16", "e4m3", "e5m2"):
        return aligned(
            _closure(op, operation, sources, np.uint32, 2, _halves_of, result, _registers_of)
        )
    raise op.unsupported()


class _Registers:
    """Slots of the operands A and B."""

    def __init__(self, op: Decoder, shape: Shape) -> None:
        self._a = [op.source(e, np.uint32) for e in op.vector(1)]
        self._b = [op.source(e, np.uint32) for e in op.vector(2)]
        if (len(self._a), len(self._b)) != (shape.a_registers, shape.b_registers):
            raise op.unsupported("the vectors have other sizes")

    def load(self, warp: Warp) -> tuple[np.ndarray, np.ndarray]:
        """The registers of A and of B, [registers, lanes]."""
        slots = warp.slots
        return np.array([slots[i] for i in self._a]), np.array([slots[i] for i in self._b])


def _accumulators(op: Decoder, dtype: type, count: int) -> tuple[list[int], list[int]]:
    """Slots of C and of D."""
    c = [op.source(e, dtype) for e in op.vector(3)]
    d = [op.destination(e, dtype) for e in op.vector(0)]
    if not len(c) == len(d) == count:
        raise op.unsupported("the vectors have other sizes")
    return c, d


def _closure(
    op: Decoder,
    operation: Multiplication,
    sources: _Registers,
    dtype: type,
    elements: int,
    decode: Callable[[np.ndarray], np.ndarray],
    result: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    encode: Callable[[np.ndarray], np.ndarray],
) -> Closure:
    """Multiply with accumulators of `dtype` that hold `elements` each.

    `decode` takes the registers of C to elements, `encode` the elements of D to registers.
    """
    shape = operation.shape
    count = len(op.sources)
    c, d = _accumulators(op, dtype, shape.m * shape.n // (32 * elements))

    def carry(
        warp: Warp, places: Sequence[Place], given: list[np.ndarray], targets: int
    ) -> list[np.ndarray]:
        """Undefined rows of A, columns of B and elements of C make such elements of D."""
        words = np.array(given, np.uint32)
        left, right = operation.matrices(
            words[: shape.a_registers], words[shape.a_registers : count]
        )
        parts = words[count:] if elements == 1 else _parts_of(words[count:])
        flags = operation.collect(parts) != 0
        flags = flags | (left != 0).any(1)[:, None] | (right != 0).any(0)
        spread = operation.spread(flags)
        spread = spread.reshape(-1, elements, 32).any(1)
        return [np.where(each, np.uint64(0xFFFF_FFFF), np.uint64(0)) for each in spread]

    op.carry = carry

    def run(warp: Warp, mask: Mask) -> None:
        require_full_warp(op, mask)
        slots = warp.slots
        a_codes, b_codes = operation.matrices(*sources.load(warp))
        added = operation.collect(decode(np.array([slots[i] for i in c])))
        registers = encode(operation.spread(result(a_codes, b_codes, added)))
        for target, register in zip(d, registers, strict=True):
            slots[target][:] = register

    return run


def _same(registers: np.ndarray) -> np.ndarray:
    return registers


def _parts_of(registers: np.ndarray) -> np.ndarray:
    """Two halves of each register, [2 registers, lanes]."""
    halves = registers.view(np.uint16).reshape(-1, 32, 2).transpose(0, 2, 1).reshape(-1, 32)
    return np.ascontiguousarray(halves)


def _halves_of(registers: np.ndarray) -> np.ndarray:
    """Two FP16 elements of each register, [2 registers, lanes]."""
    return F16.decode(_parts_of(registers))


def _registers_of(values: np.ndarray) -> np.ndarray:
    """The registers of FP16 elements."""
    bits = F16.encode(F16.round(values)).reshape(-1, 2, 32)
    return bits[:, 0] | bits[:, 1].astype(np.uint32) << np.uint32(16)
