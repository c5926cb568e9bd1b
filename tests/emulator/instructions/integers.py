"""Integer arithmetic ("Integer Arithmetic" and "Extended-Precision", PTX ISA 9.7.1 and 9.7.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from emulator.syntax.ptx_types import TYPE_BITS, integer_type, is_signed

from .elementwise import apply_function, apply_ufunc, write
from .registry import Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

Arrays = Callable[..., np.ndarray]

# The condition code of extended-precision arithmetic, one bit per lane.
_CARRY = "%carry"


def compile_elementwise(op: Decoder, function: Arrays, type_name: str, operands: int) -> Closure:
    """`d = function(a, b, ...)` on integers of a type, all operands of that type."""
    op.expect_operands(operands)
    dtype = integer_type(type_name)
    sources = [op.source(index, dtype) for index in range(1, operands)]
    result = op.destination(0, dtype)
    if isinstance(function, np.ufunc):
        return apply_ufunc(function, result, *sources)
    return apply_function(function, result, *sources)


def halves_of(function: Arrays, dtype: type) -> Arrays:
    """A function of 16-bit integers, applied to both halves of 32-bit words."""

    def run(*words: np.ndarray) -> np.ndarray:
        return function(*[word.view(dtype) for word in words]).view(np.uint32)

    return run


def integer_or_pair(op: Decoder, function: Arrays, type_name: str, operands: int) -> Closure:
    """An elementwise instruction on integers, or on pairs of 16-bit integers."""
    if not type_name.endswith("x2"):
        return compile_elementwise(op, function, type_name, operands)
    dtype = np.int16 if is_signed(type_name) else np.uint16
    return compile_elementwise(op, halves_of(function, dtype), "b32", operands)


def saturating(function: Arrays) -> Arrays:
    """A function of s32, computed in s64 and clamped ("add", modifier `.sat`)."""

    def run(*operands: np.ndarray) -> np.ndarray:
        wide = function(*[operand.astype(np.int64) for operand in operands])
        return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(np.int32)

    return run


def compile_add_sub(op: Decoder, type_name: str, ufunc: np.ufunc) -> Closure:
    """`add` and `sub` of integers."""
    if op.flag("sat"):
        if type_name != "s32":
            raise op.unsupported(".sat is for s32")
        return compile_elementwise(op, saturating(ufunc), type_name, 3)
    return integer_or_pair(op, ufunc, type_name, 3)


def multiply_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of a product of two integers of one type."""
    dtype = a.dtype
    bits = dtype.itemsize * 8
    if bits < 64:
        wide = np.dtype(f"{dtype.kind}{dtype.itemsize * 2}")
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(dtype)
    high = _unsigned_high(a.view(np.uint64), b.view(np.uint64))
    if dtype.kind == "i":
        # A negative factor x stands for x + 2^64.
        high = high - np.where(a < 0, b, 0).view(np.uint64) - np.where(b < 0, a, 0).view(np.uint64)
    return high.view(dtype)


def _unsigned_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper 64 bits of products of uint64."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    middle = a_high * b_low + (a_low * b_low >> half)
    other = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> half) + (other >> half)


def _wide_type(op: Decoder, type_name: str) -> type:
    """The type of a product of full width."""
    bits = TYPE_BITS[type_name] * 2
    if bits > 64:
        raise op.unsupported("no wider type")
    return np.dtype(f"{'i' if is_signed(type_name) else 'u'}{bits // 8}").type


def compile_mul(op: Decoder, type_name: str) -> Closure:
    """`mul` of integers."""
    mode = op.one_of("hi", "lo", "wide")
    op.expect_operands(3)
    if mode == "lo":
        return compile_elementwise(op, np.multiply, type_name, 3)
    if mode == "hi":
        return compile_elementwise(op, multiply_high, type_name, 3)
    dtype, wide = integer_type(type_name), _wide_type(op, type_name)
    first, second = op.source(1, dtype), op.source(2, dtype)
    result = op.destination(0, wide)

    def run(warp: Warp, mask: Mask) -> None:
        slots = warp.slots
        if mask is None:
            np.multiply(slots[first], slots[second], slots[result], dtype=wide)
        else:
            np.multiply(slots[first], slots[second], slots[result], dtype=wide, where=mask)

    return run


def compile_mad(op: Decoder, type_name: str) -> Closure:
    """`mad` of integers."""
    mode = op.one_of("hi", "lo", "wide")
    op.expect_operands(4)
    if mode == "lo":
        return compile_elementwise(op, lambda a, b, c: a * b + c, type_name, 4)
    if mode == "hi":
        return _mad_high(op, type_name)
    dtype, wide = integer_type(type_name), _wide_type(op, type_name)
    sources = op.source(1, dtype), op.source(2, dtype), op.source(3, wide)

    def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return np.multiply(a, b, dtype=wide) + c

    return apply_function(multiply_add, op.destination(0, wide), *sources)


def _mad_high(op: Decoder, type_name: str) -> Closure:
    def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return multiply_high(a, b) + c

    def saturated(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        wide = multiply_high(a, b).astype(np.int64) + c
        return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(np.int32)

    if op.flag("sat"):
        if type_name != "s32":
            raise op.unsupported(".sat is for s32")
        return compile_elementwise(op, saturated, type_name, 4)
    return compile_elementwise(op, multiply_add, type_name, 4)


@instruction("mul24", "mad24")
def compile_24_bit(op: Decoder) -> Closure:
    """Products of the low 24 bits: bits 0 to 31, or 16 to 47, of 48."""
    high = op.one_of("lo", "hi") == "hi"
    saturates = op.flag("sat")
    type_name = op.type()
    if type_name not in ("u32", "s32") or saturates:
        raise op.unsupported()
    dtype = integer_type(type_name)
    shift = dtype(8)

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = ((value << shift >> shift).astype(np.int64) for value in (a, b))
        return (a * b >> (16 if high else 0)).astype(dtype)

    if op.instruction.parts[0] == "mul24":
        return compile_elementwise(op, product, type_name, 3)
    return compile_elementwise(op, lambda a, b, c: product(a, b) + c, type_name, 4)


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Quotients rounded toward zero; all ones for a divisor of zero."""
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a.dtype.type(0), a // np.where(b == 0, a.dtype.type(1), b))
    safe = np.where(b == 0, a.dtype.type(1), b)
    quotient = a // safe
    # numpy rounds toward negative infinity.
    quotient += (quotient * safe != a) & ((a < 0) != (safe < 0))
    return np.where(b == 0, a.dtype.type(-1), quotient)


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a - b * (a / b)`; the dividend for a divisor of zero."""
    return np.where(b == 0, a, a - b * divide(a, b))


def compile_div(op: Decoder, type_name: str) -> Closure:
    """`div` of integers."""
    return compile_elementwise(op, divide, type_name, 3)


@instruction("rem")
def compile_rem(op: Decoder) -> Closure:
    return compile_elementwise(op, remainder, op.type(), 3)


@instruction("sad")
def compile_sad(op: Decoder) -> Closure:
    def sum_of_difference(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return c + np.where(a < b, b - a, a - b)

    return compile_elementwise(op, sum_of_difference, op.type(), 4)


def compile_min_max(op: Decoder, type_name: str, ufunc: np.ufunc) -> Closure:
    """`min` and `max` of integers, where `.relu` also clamps to 0 from below."""
    if not op.flag("relu"):
        return integer_or_pair(op, ufunc, type_name, 3)
    if not is_signed(type_name):
        raise op.unsupported(".relu is for signed types")
    return integer_or_pair(op, lambda a, b: np.maximum(ufunc(a, b), 0), type_name, 3)


@instruction("dp4a", "dp2a")
def compile_dot_product(op: Decoder) -> Closure:
    """Four products of bytes, or two of 16-bit and 8-bit values, added to an integer."""
    op.expect_operands(4)
    pairs = op.instruction.parts[0] == "dp2a"
    first_byte = 2 if pairs and op.one_of("lo", "hi") == "hi" else 0
    a_signed, b_signed = is_signed(op.type()), is_signed(op.type())
    count = 2 if pairs else 4
    a_type = np.dtype(f"{'i' if a_signed else 'u'}{4 // count}")
    b_type = np.dtype("i1" if b_signed else "u1")

    def dot(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        left = a.view(a_type).reshape(-1, count).astype(np.int64)
        right = b.view(b_type).reshape(-1, 4)[:, first_byte : first_byte + count]
        return ((left * right).sum(1) + c).astype(np.uint32)

    sources = [op.source(index, np.uint32) for index in (1, 2, 3)]
    return apply_function(dot, op.destination(0, np.uint32), *sources)


# Extended precision: a carry bit per lane goes from one instruction to the next.


def _add_with_carry(a: np.ndarray, b: np.ndarray, carry: np.ndarray) -> tuple[np.ndarray, ...]:
    partial = a + b
    total = partial + carry
    return total, (partial < a) | (total < partial)


def _subtract_with_borrow(
    a: np.ndarray, b: np.ndarray, borrow: np.ndarray
) -> tuple[np.ndarray, ...]:
    partial = a - b
    return partial - borrow, (a < b) | (partial < borrow)


def _compile_extended(
    op: Decoder, function: Callable[..., tuple[np.ndarray, ...]], takes_carry: bool
) -> Closure:
    """An addition or subtraction that reads or writes the carry bit."""
    op.expect_operands(3)
    gives_carry = op.flag("cc")
    dtype = np.dtype(f"u{TYPE_BITS[op.type()] // 8}").type
    first, second = op.source(1, dtype), op.source(2, dtype)
    result = op.destination(0, dtype)
    carry = op.slots.shared(_CARRY, np.bool_)
    none = np.zeros(32, dtype)

    def run(warp: Warp, mask: Mask) -> None:
        slots = warp.slots
        before = slots[carry].astype(dtype) if takes_carry else none
        value, after = function(slots[first], slots[second], before)
        write(warp, result, mask, value)
        if gives_carry:
            write(warp, carry, mask, after)

    return run


@instruction("add.cc", "addc")
def compile_add_extended(op: Decoder) -> Closure:
    return _extended(op, _add_with_carry, "addc")


@instruction("sub.cc", "subc")
def compile_sub_extended(op: Decoder) -> Closure:
    return _extended(op, _subtract_with_borrow, "subc")


def _extended(
    op: Decoder, function: Callable[..., tuple[np.ndarray, ...]], with_carry: str
) -> Closure:
    takes_carry = op.instruction.parts[0] == with_carry
    if not takes_carry:
        op.modifiers.append("cc")  # part of the name that was registered
    return _compile_extended(op, function, takes_carry)


@instruction("mad.lo.cc", "mad.hi.cc", "madc")
def compile_mad_extended(op: Decoder) -> Closure:
    op.expect_operands(4)
    takes_carry = op.instruction.parts[0] == "madc"
    high = "hi" in op.instruction.parts
    if takes_carry:
        op.one_of("hi", "lo")
    gives_carry = op.flag("cc") or not takes_carry
    dtype = integer_type(op.type())
    unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}").type
    sources = [op.source(index, dtype) for index in (1, 2, 3)]
    result = op.destination(0, unsigned)
    carry = op.slots.shared(_CARRY, np.bool_)
    none = np.zeros(32, unsigned)

    def run(warp: Warp, mask: Mask) -> None:
        slots = warp.slots
        a, b, c = (slots[source] for source in sources)
        product = (multiply_high(a, b) if high else a * b).view(unsigned)
        before = slots[carry].astype(unsigned) if takes_carry else none
        value, after = _add_with_carry(product, c.view(unsigned), before)
        write(warp, result, mask, value)
        if gives_carry:
            write(warp, carry, mask, after)

    return run
