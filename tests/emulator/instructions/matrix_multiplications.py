"""`mma.sync` ("mma", PTX ISA 9.7.14.5).

All shapes place their elements by one rule. With e elements in a register, lane `4 * g + t` holds

* of A in register r the elements `(r // s) * 4 * e + t * e + i` of row `g + 8 * (r % s)`, where s
  is 2 for 16 rows and 1 for 8;
* of B in register r the elements `r * 4 * e + t * e + i` of column g;
* of C and D elements `2 * t` and `2 * t + 1` of row g, then of row g + 8.

Block-scaled kinds, which SM120 has, take scale factors of row `g + 8 * h` of A from lane
`4 * g + 2 * p + h`, and of column g of B from lane `4 * g + q`; p and q are operands. Their sums
and those of FP64 are of exact products, in float64.
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
from emulator.numbers.float_rounding import F16, F32, F64, add_to_odd
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
    "f64": ["m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"],
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
    "f64": 64,
}
# Formats of kinds: an element of fewer than 8 bits lies in a byte, from a bit on.
_SMALL: dict[str, tuple[number_formats.SmallFloat, int]] = {
    "e4m3": (number_formats.E4M3, 0),
    "e5m2": (number_formats.E5M2, 0),
    "e2m3": (number_formats.E2M3, 0),
    "e3m2": (number_formats.E3M2, 0),
    "e2m1": (number_formats.E2M1, 2),
}
# Scale factors of a row by qualifier, the default first; none without block scaling.
_KINDS: dict[str, dict[str, int]] = {
    "kind::f8f6f4": {},
    "kind::mxf8f6f4": {"scale_vec::1X": 1},
    "kind::mxf4": {"scale_vec::2X": 2},
    "kind::mxf4nvf4": {"scale_vec::4X": 4, "scale_vec::2X": 2},
}
_SCALES = {"ue8m0": number_formats.UE8M0, "ue4m3": number_formats.UE4M3}
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
    def elements(self) -> int:
        """Of a register, which has 32 bits or those of its element."""
        return max(32 // self.bits, 1)

    @property
    def a_registers(self) -> int:
        return self.m * self.k // (32 * self.elements)

    @property
    def b_registers(self) -> int:
        return self.n * self.k // (32 * self.elements)


@lru_cache
def a_places(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every element of A: int [registers, lanes, elements]."""
    elements = shape.elements
    step = 2 if shape.m == 16 else 1
    register = np.arange(shape.a_registers)[:, None, None]
    element = np.arange(elements)
    rows = _GROUP[:, None] + 8 * (register % step) + 0 * element
    columns = (register // step) * 4 * elements + _THREAD[:, None] * elements + element
    return rows, columns


@lru_cache
def b_places(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every element of B: int [registers, lanes, elements]."""
    elements = shape.elements
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
    """Codes in registers: uint [..., elements of a register], lowest first."""
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

    def double_result(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """D from bits of A and B and the values of C, all float64."""
        return a.view(np.float64) @ b.view(np.float64) + c

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
    m, n, k = _take_shape(op)
    op.one_of("row")
    op.one_of("col")
    kind = op.one_of(*_KINDS, default="")
    if kind:
        return _compile_kind(op, kind, (m, n, k))
    op.expect_operands(4)
    saturate = op.flag("satfinite")
    types = [name for name in op.modifiers if name in ("f32", "s32", *_BITS)]
    for name in types:
        op.modifiers.remove(name)
    if len(types) != 4:
        raise op.unsupported("four types are needed")
    d_type, a_type, b_type, c_type = types
    if f"m{m}n{n}k{k}" not in _SHAPES.get(a_type, ()) or _BITS[a_type] != _BITS.get(b_type):
        raise op.unsupported(f".m{m}n{n}k{k} of .{a_type} and .{b_type}")
    if a_type in ("f16", "bf16", "tf32", "f64") and a_type != b_type:
        raise op.unsupported("operands of two types")
    operation = Multiplication(Shape(m, n, k, _BITS[a_type]), a_type, b_type)
    sources = _Registers(op, operation.shape)
    if d_type == c_type == "s32" and a_type[0] in "su":
        result = partial(operation.integer_result, saturate=saturate)
        return aligned(_closure(op, operation, sources, np.int32, 1, _same, result, _same))
    if a_type[0] in "su" or saturate or c_type != d_type or (a_type == "f64") != (d_type == "f64"):
        raise op.unsupported()
    if a_type == "f64":
        result = operation.double_result
        op.one_of("rn", default="rn")
        return aligned(
            _closure(op, operation, sources, np.uint64, 1, F64.decode, result, F64.encode)
        )
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


class _Scales:
    """Scale factors of A and B: where they are, and what they are."""

    def __init__(self, op: Decoder, scale_format: number_formats.SmallFloat, count: int) -> None:
        self._format, self._count = scale_format, count
        # Register; first byte and thread of it.
        self._operands = [
            (
                op.source(*op.vector(at), np.uint32),
                *(op.source(each, np.uint16) for each in op.vector(at + 1)),
            )
            for at in (4, 6)
        ]

    def rows(self, warp: Warp, words: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Codes of the rows of A and of the columns of B, in registers [lanes]."""
        row = np.arange(16)
        lanes = 4 * (row % 8) + row // 8, 4 * np.arange(8)
        found = []
        for matrix, (_, byte, thread) in enumerate(self._operands):
            first, number = int(warp.slots[byte][0]), int(warp.slots[thread][0])
            codes = np.ascontiguousarray(words[matrix], np.uint32).view(np.uint8).reshape(32, 4)
            chosen = lanes[matrix] + (2 - matrix) * number
            found.append(codes[chosen, first : first + self._count])
        return found

    def values(self, warp: Warp) -> list[np.ndarray]:
        """Factors of the rows of A and of the columns of B, float64 [rows, factors]."""
        codes = self.rows(warp, [warp.slots[slot] for slot, *_ in self._operands])
        return [self._format.decode(each & (len(self._format.table) - 1)) for each in codes]


def _compile_kind(op: Decoder, kind: str, size: tuple[int, int, int]) -> Closure:
    """Multiplications of formats of 4 to 8 bits, with or without block scaling."""
    vectors = _KINDS[kind]
    scaled = op.flag("block_scale")
    if scaled != bool(vectors):
        raise op.unsupported(f"{kind} {'with' if scaled else 'without'} .block_scale")
    op.expect_operands(8 if scaled else 4)
    count = vectors[op.one_of(*vectors, default=next(iter(vectors)))] if scaled else 0
    packed = kind.startswith("kind::mxf4")
    d_type, a_type, b_type, c_type = (op.one_of("f32", "f16", *_SMALL) for _ in range(4))
    scale_type = op.one_of(*_SCALES) if scaled else ""
    known = {a_type, b_type} <= ({"e2m1"} if packed else {*_SMALL}) and c_type == d_type
    if size != (16, 8, 64 if packed else 32) or not known or d_type not in ("f32", "f16"):
        raise op.unsupported()
    if (scale_type == "ue4m3" and count != 4) or (scaled and d_type == "f16"):
        raise op.unsupported(f".{scale_type} and results of .{d_type}")
    operation = Multiplication(Shape(*size, 4 if packed else 8), a_type, b_type)
    sources = _Registers(op, operation.shape)

    def values(codes: np.ndarray, type_name: str) -> np.ndarray:
        small, shift = _SMALL[type_name]
        return small.decode(codes >> (0 if packed else shift) & (len(small.table) - 1))

    def result(
        a: np.ndarray, b: np.ndarray, c: np.ndarray, factors: Sequence[np.ndarray] = ()
    ) -> np.ndarray:
        left, right = values(a, a_type), values(b, b_type)
        if factors:
            left = left * np.repeat(factors[0], size[2] // count, 1)
            right = right * np.repeat(factors[1], size[2] // count, 1).T
        return left @ right + c

    if d_type == "f16":
        return aligned(
            _closure(op, operation, sources, np.uint32, 2, _halves_of, result, _registers_of)
        )
    registers = partial(_closure, op, operation, sources, np.uint32, 1, F32.decode, result)
    scales = (lambda: _Scales(op, _SCALES[scale_type], count)) if scaled else None
    return aligned(registers(F32.encode, scales))


class _Registers:
    """Slots of the operands A and B."""

    def __init__(self, op: Decoder, shape: Shape) -> None:
        dtype = np.uint64 if shape.bits == 64 else np.uint32
        self._a = [op.source(e, dtype) for e in op.vector(1)]
        self._b = [op.source(e, dtype) for e in op.vector(2)]
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
    result: Callable[..., np.ndarray],
    encode: Callable[[np.ndarray], np.ndarray],
    take_scales: Callable[[], _Scales] | None = None,
) -> Closure:
    """Multiply with accumulators of `dtype` that hold `elements` each.

    `decode` takes the registers of C to elements, `encode` the elements of D to registers.
    """
    shape = operation.shape
    count = len(op.sources)
    c, d = _accumulators(op, dtype, shape.m * shape.n // (32 * elements))
    end = len(op.sources)
    scales = take_scales() if take_scales is not None else None

    def carry(
        warp: Warp, places: Sequence[Place], given: list[np.ndarray], targets: int
    ) -> list[np.ndarray]:
        """Undefined rows of A, columns of B and elements of C make such elements of D."""
        words = np.array(given[:end], np.uint64 if shape.bits == 64 else np.uint32)
        left, right = operation.matrices(
            words[: shape.a_registers], words[shape.a_registers : count]
        )
        parts = words[count:] if elements == 1 else _parts_of(words[count:])
        flags = operation.collect(parts) != 0
        flags = flags | (left != 0).any(1)[:, None] | (right != 0).any(0)
        if scales is not None:
            rows, columns = scales.rows(warp, (given[end], given[end + 3]))
            flags |= (rows != 0).any(1)[:, None] | (columns != 0).any(1)
        spread = operation.spread(flags)
        spread = spread.reshape(-1, elements, 32).any(1)
        return [np.where(each, ~np.uint64(0), np.uint64(0)) for each in spread]

    op.carry = carry

    def run(warp: Warp, mask: Mask) -> None:
        require_full_warp(op, mask)
        slots = warp.slots
        a_codes, b_codes = operation.matrices(*sources.load(warp))
        added = operation.collect(decode(np.array([slots[i] for i in c])))
        factors = () if scales is None else (scales.values(warp),)
        registers = encode(operation.spread(result(a_codes, b_codes, added, *factors)))
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
