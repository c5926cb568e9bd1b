"""Logic, shifts and bit fields ("Logic and Shift Instructions" and others, PTX ISA 9.7.8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from emulator.machine.registers import carry_by, carry_flips
from emulator.syntax.module import Immediate, Pair
from emulator.syntax.ptx_types import TYPE_BITS, bits_type, integer_type, is_signed

from .elementwise import apply_function, apply_ufunc, write
from .registry import Closure, Decoder, Mask, instruction

if TYPE_CHECKING:
    from emulator.machine.execution import Warp

Arrays = Callable[..., np.ndarray]


_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


@instruction(*_LOGIC)
def compile_logic(op: Decoder) -> Closure:
    ufunc = _LOGIC[op.instruction.parts[0]]
    op.expect_operands(ufunc.nin + 1)
    dtype = bits_type(op.type())
    sources = [op.source(index, dtype) for index in range(1, ufunc.nin + 1)]
    return apply_ufunc(ufunc, op.destination(0, dtype), *sources)


@instruction("cnot")
def compile_cnot(op: Decoder) -> Closure:
    op.expect_operands(2)
    dtype = bits_type(op.type())
    return apply_function(lambda a: a == 0, op.destination(0, dtype), op.source(1, dtype))


@instruction("lop3")
def compile_lop3(op: Decoder) -> Closure:
    """Bit i of the result is bit `4a + 2b + c` of the table.

    With `.and` or `.or` a predicate says too whether the result is not 0, combined with another.
    """
    combine = {"and": np.logical_and, "or": np.logical_or}.get(op.one_of("and", "or", default=""))
    op.expect_operands(5 if combine is None else 6)
    op.one_of("b32")
    table = op.operands[4]
    if not isinstance(table, Immediate):
        raise op.unsupported("the table is no constant")
    function = _TABLES.get(table.value) or _look_up(table.value)
    sources = [op.source(index, np.uint32) for index in (1, 2, 3)]
    if combine is None:
        op.carry = carry_flips(function)
        return apply_function(function, op.destination(0, np.uint32), *sources)
    target = op.operands[0]
    if not isinstance(target, Pair):
        raise op.unsupported("two results are needed")
    other = op.source(5, np.bool_)
    result, predicate = (
        op.destination(target.first, np.uint32),
        op.destination(target.second, np.bool_),
    )

    def run(warp: Warp, mask: Mask) -> None:
        values = function(*(warp.slots[source] for source in sources))
        truth = combine(values != 0, warp.slots[other])
        write(warp, result, mask, values)
        write(warp, predicate, mask, truth)

    return run


# Functions that compilers use most.
_TABLES: dict[int, Arrays] = {
    0xC0: lambda a, b, c: a & b,
    0xFC: lambda a, b, c: a | b,
    0x3C: lambda a, b, c: a ^ b,
    0x96: lambda a, b, c: a ^ b ^ c,
    0xEA: lambda a, b, c: (a & b) | c,
    0xF8: lambda a, b, c: a | (b & c),
    0x80: lambda a, b, c: a & b & c,
    0xFE: lambda a, b, c: a | b | c,
}


def _look_up(table: int) -> Arrays:
    """The function of a table: the terms of the cases that are true, combined."""
    cases = [case for case in range(8) if table >> case & 1]

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        result = np.zeros_like(a)
        for case in cases:
            term = a if case & 4 else ~a
            term = term & (b if case & 2 else ~b)
            result |= term & (c if case & 1 else ~c)
        return result

    return function


@instruction("shl", "shr")
def compile_shift(op: Decoder) -> Closure:
    """Amounts above the width act like the width."""
    op.expect_operands(3)
    dtype = integer_type(op.type())
    left = op.instruction.parts[0] == "shl"
    ufunc = np.left_shift if left else np.right_shift
    value, result = op.source(1, dtype), op.destination(0, dtype)
    bits = np.dtype(dtype).itemsize * 8
    amount, amounts = op.operands[2], op.source(2, np.uint32)
    if isinstance(amount, Immediate):
        count = min(amount.value & 0xFFFFFFFF, bits - 1 if is_signed_type(dtype) else bits)
        if count == bits:
            return apply_function(np.zeros_like, result, value)
        return apply_ufunc(ufunc, result, value, op.slots.constant(count, dtype))
    most = np.uint32(bits - 1)

    def shift(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        shifted = ufunc(a, np.minimum(b, most).astype(dtype))
        return shifted if dtype_is_signed and not left else np.where(b > most, 0, shifted)

    dtype_is_signed = is_signed_type(dtype)
    return apply_function(shift, result, value, amounts)


def is_signed_type(dtype: type) -> bool:
    """Whether a numpy type is of signed integers."""
    return np.dtype(dtype).kind == "i"


@instruction("shf")
def compile_funnel_shift(op: Decoder) -> Closure:
    op.expect_operands(4)
    left = op.one_of("l", "r") == "l"
    clamps = op.one_of("clamp", "wrap") == "clamp"
    op.one_of("b32")
    word = np.uint64(32)

    def shift(low: np.ndarray, high: np.ndarray, count: np.ndarray) -> np.ndarray:
        amount = np.minimum(count, 32) if clamps else count & np.uint32(31)
        amount = amount.astype(np.uint64)
        both = (high.astype(np.uint64) << word) | low
        return (both << amount >> word if left else both >> amount).astype(np.uint32)

    sources = [op.source(index, np.uint32) for index in (1, 2, 3)]
    op.carry = carry_by(shift, 2)
    return apply_function(shift, op.destination(0, np.uint32), *sources)


@instruction("popc", "clz", "bfind")
def compile_count(op: Decoder) -> Closure:
    op.expect_operands(2)
    name = op.instruction.parts[0]
    shift_amount = op.flag("shiftamt")
    type_name = op.type()
    dtype = integer_type(type_name)
    bits = TYPE_BITS[type_name]

    def find(a: np.ndarray) -> np.ndarray:
        flipped = np.where(a < 0, ~a, a) if is_signed(type_name) else a
        position = bit_length(flipped.astype(np.uint64)) - 1
        found = bits - 1 - position if shift_amount else position
        return np.where(position < 0, -1, found)

    functions: dict[str, Arrays] = {
        "popc": np.bitwise_count,
        "clz": lambda a: bits - bit_length(a.astype(np.uint64)),
        "bfind": find,
    }
    function = functions[name]
    return apply_function(
        lambda a: function(a).astype(np.uint32), op.destination(0, np.uint32), op.source(1, dtype)
    )


def bit_length(values: np.ndarray) -> np.ndarray:
    """Bits of uint64 values without leading zeros, int64."""
    spread = values.copy()
    for shift in (1, 2, 4, 8, 16, 32):
        spread |= spread >> np.uint64(shift)
    return np.bitwise_count(spread).astype(np.int64)


@instruction("brev")
def compile_brev(op: Decoder) -> Closure:
    op.expect_operands(2)
    dtype = bits_type(op.type())

    def reverse(a: np.ndarray) -> np.ndarray:
        width = a.dtype.itemsize
        bits = np.unpackbits(a.copy().view(np.uint8).reshape(-1, width), axis=1, bitorder="little")
        return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(a.dtype)[:, 0]

    return apply_function(reverse, op.destination(0, dtype), op.source(1, dtype))


@instruction("fns")
def compile_fns(op: Decoder) -> Closure:
    """The n-th set bit from a position on."""
    op.expect_operands(4)
    op.one_of("b32")

    def find_one(mask: int, base: int, offset: int) -> int:
        if base > 31:
            return 0xFFFFFFFF  # "undefined"; what an H200 gives
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        positions = range(base, 32) if offset > 0 else range(base, -1, -1)
        hits = [position for position in positions if mask >> position & 1]
        return hits[abs(offset) - 1] if len(hits) >= abs(offset) else 0xFFFFFFFF

    def find(mask: np.ndarray, base: np.ndarray, offset: np.ndarray) -> np.ndarray:
        rows = zip(mask.tolist(), base.tolist(), offset.tolist(), strict=True)
        return np.array([find_one(*row) for row in rows], np.uint32)

    sources = op.source(1, np.uint32), op.source(2, np.uint32), op.source(3, np.int32)
    return apply_function(find, op.destination(0, np.uint32), *sources)


def _low_bits(count: np.ndarray, bits: int) -> np.ndarray:
    """uint64 masks of the `count` lowest of `bits` bits."""
    count = np.minimum(count, bits).astype(np.uint64)
    ones = np.uint64((1 << 64) - 1)
    return np.where(count == 0, np.uint64(0), ones >> (np.uint64(64) - np.maximum(count, 1)))


@instruction("bfe")
def compile_bfe(op: Decoder) -> Closure:
    op.expect_operands(4)
    type_name = op.type()
    bits = TYPE_BITS[type_name]
    unsigned = np.dtype(f"u{bits // 8}").type
    signed = is_signed(type_name)

    def extract(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        position, count = start & np.uint32(255), length & np.uint32(255)
        value = a.astype(np.uint64)
        inside = position < bits
        shifted = np.where(inside, value >> np.minimum(position, bits - 1).astype(np.uint64), 0)
        field = shifted & _low_bits(count, bits)
        if signed:
            top = np.minimum(position.astype(np.int64) + count - 1, bits - 1)
            sign = (value >> np.maximum(top, 0).astype(np.uint64)) & np.uint64(1)
            kept = np.minimum(count, np.where(inside, bits - position.astype(np.int64), 0))
            fill = ~_low_bits(kept.astype(np.uint32), bits)
            field = np.where((sign == 1) & (count > 0), field | fill, field)
        return field.astype(unsigned)

    sources = op.source(1, unsigned), op.source(2, np.uint32), op.source(3, np.uint32)
    op.carry = carry_by(extract, 1)
    return apply_function(extract, op.destination(0, unsigned), *sources)


@instruction("bfi")
def compile_bfi(op: Decoder) -> Closure:
    op.expect_operands(5)
    dtype = bits_type(op.type())
    bits = np.dtype(dtype).itemsize * 8

    def insert(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        position, count = start & np.uint32(255), length & np.uint32(255)
        shift = np.minimum(position, bits - 1).astype(np.uint64)
        field = np.where(position < bits, _low_bits(count, bits) << shift, np.uint64(0))
        inserted = (a.astype(np.uint64) << shift) & field
        return (b & ~field.astype(dtype)) | inserted.astype(dtype)

    sources = op.source(1, dtype), op.source(2, dtype), op.source(3, np.uint32)
    op.carry = carry_by(insert, 2)
    return apply_function(insert, op.destination(0, dtype), *sources, op.source(4, np.uint32))


@instruction("bmsk")
def compile_bmsk(op: Decoder) -> Closure:
    op.expect_operands(3)
    clamps = op.one_of("clamp", "wrap") == "clamp"
    op.one_of("b32")

    def make(start: np.ndarray, width: np.ndarray) -> np.ndarray:
        position, count = start & np.uint32(31), width & np.uint32(31)
        if clamps:
            count = np.minimum(width, 32)
        mask = _low_bits(count, 32) << position.astype(np.uint64)
        return np.where(clamps & (start >= 32), 0, mask).astype(np.uint32)

    return apply_function(
        make, op.destination(0, np.uint32), op.source(1, np.uint32), op.source(2, np.uint32)
    )


@instruction("szext")
def compile_szext(op: Decoder) -> Closure:
    op.expect_operands(3)
    clamps = op.one_of("clamp", "wrap") == "clamp"
    signed = is_signed(op.type())

    def extend(a: np.ndarray, width: np.ndarray) -> np.ndarray:
        count = width & np.uint32(31)
        kept = _low_bits(count, 32).astype(np.uint32)
        value = a & kept
        if signed:
            sign = (a >> ((count - np.uint32(1)) & np.uint32(31))) & np.uint32(1)
            value = np.where((sign == 1) & (count > 0), value | ~kept, value)
        return np.where(clamps & (width >= 32), a, value)

    return apply_function(
        extend, op.destination(0, np.uint32), op.source(1, np.uint32), op.source(2, np.uint32)
    )


@instruction("prmt")
def compile_prmt(op: Decoder) -> Closure:
    """Picks four of the eight bytes of `{b, a}`, or replicates a sign ("prmt", 9.7.9.7)."""
    op.expect_operands(4)
    modes = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    mode = op.one_of(*modes, default="default")
    op.one_of("b32")
    low, high = op.source(1, np.uint32), op.source(2, np.uint32)
    result = op.destination(0, np.uint32)
    selector = op.operands[3]
    if mode == "default" and isinstance(selector, Immediate):
        op.carry = carry_by(_picker(selector.value), 2)
        return apply_function(_picker(selector.value), result, low, high)
    permute = _permute_by_selector if mode == "default" else _permute_by_mode(mode)
    op.carry = carry_by(permute, 2)
    return apply_function(permute, result, low, high, op.source(selector, np.uint32))


_FIRST_BYTES = np.arange(0, 256, 8)[:, None]  # of each lane's eight
_NIBBLES = np.arange(0, 16, 4, dtype=np.uint32)
_SIGNS = np.uint32(0x8888)


def _eight_bytes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The bytes of `{b, a}` of all lanes, one after another."""
    both = np.empty((32, 2), np.uint32)
    both[:, 0] = a
    both[:, 1] = b
    return both.view(np.uint8).reshape(-1)


def _replicate_signs(chosen: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Bytes that are replaced by copies of their sign where `signs` says so."""
    return np.where(signs, (chosen >= 0x80) * np.uint8(0xFF), chosen)


def _picker(selector: int) -> Arrays:
    """The permutation by a constant selector."""
    picks = np.array([selector >> (4 * place) & 0xF for place in range(4)])
    order = _FIRST_BYTES + (picks & 7)
    signs = (picks & 8) != 0

    def pick(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _eight_bytes(a, b).take(order).view(np.uint32)[:, 0]

    def pick_signs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        chosen = _eight_bytes(a, b).take(order)
        return _replicate_signs(chosen, signs).view(np.uint32)[:, 0]

    return pick_signs if signs.any() else pick


def _permute_by_selector(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    picks = selector[:, None] >> _NIBBLES
    chosen = _eight_bytes(a, b).take((picks & np.uint32(7)) + _FIRST_BYTES)
    if any((selector & _SIGNS).tobytes()):
        chosen = _replicate_signs(chosen, (picks & np.uint32(8)) != 0)
    return chosen.view(np.uint32)[:, 0]


def _permute_by_mode(mode: str) -> Arrays:
    """A permutation by the two low bits of the selector: bytes of the result, lowest first."""
    tables = {
        "f4e": [[n, n + 1, n + 2, n + 3] for n in range(4)],
        "b4e": [[n, (n - 1) % 8, (n - 2) % 8, (n - 3) % 8] for n in range(4)],
        "rc8": [[n] * 4 for n in range(4)],
        "ecl": [[max(n, place) for place in range(4)] for n in range(4)],
        "ecr": [[min(n, place) for place in range(4)] for n in range(4)],
        "rc16": [[0, 1, 0, 1], [2, 3, 2, 3]] * 2,
    }
    table = np.array(tables[mode])

    def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        picks = table[selector & np.uint32(3)] + _FIRST_BYTES
        return _eight_bytes(a, b).take(picks).view(np.uint32)[:, 0]

    return permute
