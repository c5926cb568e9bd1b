"""Integer instructions do what the PTX ISA's semantics say, here in Python integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from emulator.errors import UnsupportedInstruction
from emulator.programs.lane_programs import run_lanes

LOW = {bits: (1 << bits) - 1 for bits in (8, 16, 32, 64)}
EDGES = [0, 1, 2, 31, 32, 33, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def signed(value: int, bits: int = 32) -> int:
    value &= LOW[bits]
    return value - (1 << bits) if value >> (bits - 1) else value


def operands(bits: int, count: int, seed: int = 7) -> list[np.ndarray]:
    """Random and extreme operands, 64 of each."""
    generator = np.random.default_rng(seed)
    arrays = []
    for _ in range(count):
        values = generator.integers(0, 1 << bits, 64, np.uint64, endpoint=False)
        if bits == 64:
            values = generator.integers(0, LOW[64], 64, np.uint64, endpoint=True)
        chosen = generator.permutation(64)[:20]
        values[chosen] = [generator.choice(EDGES) for _ in chosen]
        arrays.append((values & np.uint64(LOW[bits])).astype(f"u{bits // 8}"))
    return arrays


def bit_field(a: int, start: int, length: int, bits: int, is_signed: bool) -> int:
    """The loop of "bfe"."""
    start, length = start & 255, length & 255
    sign = 0
    if is_signed and length:
        sign = a >> min(start + length - 1, bits - 1) & 1
    result = 0
    for i in range(bits):
        bit = a >> (start + i) & 1 if i < length and start + i < bits else sign
        result |= bit << i
    return result


def inserted(a: int, b: int, start: int, length: int, bits: int) -> int:
    """The loop of "bfi"."""
    start, length = start & 255, length & 255
    for i in range(length):
        if start + i < bits:
            b = b & ~(1 << (start + i)) | (a >> i & 1) << (start + i)
    return b


def funnel(low: int, high: int, count: int, left: bool, clamp: bool) -> int:
    count = min(count, 32) if clamp else count & 31
    both = high << 32 | low
    return both << count >> 32 if left else both >> count


def permuted(a: int, b: int, selector: int) -> int:
    """The default mode of "prmt"."""
    octets = (b << 32 | a).to_bytes(8, "little")
    result = 0
    for place in range(4):
        pick = selector >> 4 * place & 15
        value = octets[pick & 7]
        if pick & 8:
            value = 255 if value & 128 else 0
        result |= value << 8 * place
    return result


def logic(table: int) -> Callable[[int, int, int], int]:
    """The function of "lop3" for a table."""

    def function(a: int, b: int, c: int) -> int:
        bits = [
            table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1 for i in range(32)
        ]
        return sum(bit << i for i, bit in enumerate(bits))

    return function


def truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


S, U = signed, int
CASES: dict[str, tuple[int, Callable[..., int]]] = {
    # instruction: bits of the operands, what it computes of unsigned operands
    "add.s32": (32, lambda a, b: a + b),
    "sub.u64": (64, lambda a, b: a - b),
    "add.u16": (16, lambda a, b: a + b),
    "add.sat.s32": (32, lambda a, b: max(min(S(a) + S(b), LOW[32] >> 1), -(1 << 31))),
    "sub.sat.s32": (32, lambda a, b: max(min(S(a) - S(b), LOW[32] >> 1), -(1 << 31))),
    "add.s16x2": (32, lambda a, b: (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) & 0xFFFF) << 16),
    "mul.lo.u32": (32, lambda a, b: a * b),
    "mul.hi.u32": (32, lambda a, b: a * b >> 32),
    "mul.hi.s32": (32, lambda a, b: S(a) * S(b) >> 32),
    "mul.hi.u64": (64, lambda a, b: a * b >> 64),
    "mul.hi.s64": (64, lambda a, b: S(a, 64) * S(b, 64) >> 64),
    "mul.hi.s16": (16, lambda a, b: S(a, 16) * S(b, 16) >> 16),
    "mul24.lo.s32": (32, lambda a, b: S(a << 8) // 256 * (S(b << 8) // 256)),
    "mul24.hi.u32": (32, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 16),
    "mad.lo.s32": (32, lambda a, b, c: a * b + c),
    "mad.hi.u32": (32, lambda a, b, c: (a * b >> 32) + c),
    "mad.hi.sat.s32": (
        32,
        lambda a, b, c: max(min((S(a) * S(b) >> 32) + S(c), LOW[32] >> 1), -(1 << 31)),
    ),
    "sad.s32": (32, lambda a, b, c: c + abs(S(a) - S(b))),
    "sad.u16": (16, lambda a, b, c: c + abs(a - b)),
    "div.u32": (32, lambda a, b: a // b if b else LOW[32]),
    "div.s64": (64, lambda a, b: truncated(S(a, 64), S(b, 64)) if b else -1),
    "rem.s32": (32, lambda a, b: S(a) - S(b) * truncated(S(a), S(b)) if b else a),
    "rem.u64": (64, lambda a, b: a % b if b else a),
    "abs.s32": (32, lambda a: abs(S(a))),
    "neg.s16": (16, lambda a: -a),
    "min.s32": (32, lambda a, b: min(S(a), S(b))),
    "max.u64": (64, max),
    "min.relu.s32": (32, lambda a, b: max(min(S(a), S(b)), 0)),
    "max.s16x2": (
        32,
        lambda a, b: (
            (max(S(a, 16), S(b, 16)) & 0xFFFF)
            | (max(S(a >> 16, 16), S(b >> 16, 16)) & 0xFFFF) << 16
        ),
    ),
    "and.b32": (32, lambda a, b: a & b),
    "or.b16": (16, lambda a, b: a | b),
    "xor.b64": (64, lambda a, b: a ^ b),
    "not.b32": (32, lambda a: ~a),
    "cnot.b32": (32, lambda a: int(a == 0)),
    "brev.b64": (64, lambda a: int(f"{a:064b}"[::-1], 2)),
    "slct.u32.s32": (32, lambda a, b, c: a if S(c) >= 0 else b),
    "prmt.b32": (32, permuted),
    "shf.l.clamp.b32": (32, lambda a, b, c: funnel(a, b, c, True, True)),
    "shf.r.wrap.b32": (32, lambda a, b, c: funnel(a, b, c, False, False)),
    "bfe.u32": (32, lambda a, b, c: bit_field(a, b, c, 32, False)),
    "bfe.s32": (32, lambda a, b, c: bit_field(a, b, c, 32, True)),
    "bfi.b32": (32, lambda a, b, c, d: inserted(a, b, c, d, 32)),
}


@pytest.mark.parametrize("name", CASES)
def test_result_of_operands_of_one_type(name: str) -> None:
    bits, function = CASES[name]
    count = function.__code__.co_argcount if hasattr(function, "__code__") else 2
    arrays = operands(bits, count)
    if name.startswith(("bfe", "bfi")):
        arrays[-2:] = [array % 70 for array in arrays[-2:]]
    listed = ", ".join(f"%a{index}" for index in range(count))
    (got,) = run_lanes(f"{name} %d0, {listed};", arrays, [arrays[0].dtype.type], block=64)
    rows = zip(*(array.tolist() for array in arrays), strict=True)
    assert got.tolist() == [function(*row) & LOW[bits] for row in rows]


@pytest.mark.parametrize("table", [0x00, 0x1D, 0x80, 0x96, 0xCA, 0xE8, 0xEA, 0xF8, 0xFE, 0xFF])
def test_lop3_follows_its_table(table: int) -> None:
    arrays = operands(32, 3)
    (got,) = run_lanes(f"lop3.b32 %d0, %a0, %a1, %a2, {table};", arrays, [np.uint32], block=64)
    rows = zip(*(array.tolist() for array in arrays), strict=True)
    assert got.tolist() == [logic(table)(*row) for row in rows]


@pytest.mark.parametrize("constant", [0x3210, 0x7654, 0x0123, 0xB3A1, 0x5410])
def test_prmt_by_a_constant(constant: int) -> None:
    arrays = operands(32, 2)
    (got,) = run_lanes(f"prmt.b32 %d0, %a0, %a1, {constant};", arrays, [np.uint32], block=64)
    pairs = zip(arrays[0].tolist(), arrays[1].tolist(), strict=True)
    assert got.tolist() == [permuted(a, b, constant) for a, b in pairs]


# The table of "prmt": source bytes of the result, highest first, for selectors 0 to 3.
PRMT_MODES = {
    "f4e": ["3210", "4321", "5432", "6543"],
    "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"],
    "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"],
    "rc16": ["1010", "3232", "1010", "3232"],
}


@pytest.mark.parametrize("mode", PRMT_MODES)
def test_prmt_modes(mode: str) -> None:
    a, b = operands(32, 2)
    selectors = np.arange(64, dtype=np.uint32) * 37
    (got,) = run_lanes(
        f"prmt.b32.{mode} %d0, %a0, %a1, %a2;", [a, b, selectors], [np.uint32], block=64
    )
    for low, high, selector, result in zip(a, b, selectors, got, strict=True):
        octets = (int(high) << 32 | int(low)).to_bytes(8, "little")
        order = PRMT_MODES[mode][selector & 3][::-1]
        assert int(result) == int.from_bytes(bytes(octets[int(i)] for i in order), "little")


@pytest.mark.parametrize(
    ("name", "bits"), [("shl.b32", 32), ("shr.u32", 32), ("shr.s32", 32), ("shr.s64", 64)]
)
@pytest.mark.parametrize("constant", [None, 0, 5, 31, 32, 63, 64, 200])
def test_shifts_clamp_their_amount(name: str, bits: int, constant: int | None) -> None:
    (values,) = operands(bits, 1)
    amounts = (np.arange(64) * 3).astype(np.uint32)
    amount = "%a1" if constant is None else str(constant)
    (got,) = run_lanes(
        f"{name} %d0, %a0, {amount};", [values, amounts], [values.dtype.type], block=64
    )
    for value, by, result in zip(values.tolist(), amounts.tolist(), got.tolist(), strict=True):
        by = by if constant is None else constant
        value = signed(value, bits) if ".s" in name else value
        expected = value << by if name.startswith("shl") else value >> by
        assert result == expected & LOW[bits]


@pytest.mark.parametrize(
    ("name", "bits", "function"),
    [
        ("popc.b32", 32, lambda a: bin(a).count("1")),
        ("popc.b64", 64, lambda a: bin(a).count("1")),
        ("clz.b32", 32, lambda a: 32 - a.bit_length()),
        ("clz.b64", 64, lambda a: 64 - a.bit_length()),
        ("bfind.u32", 32, lambda a: a.bit_length() - 1),
        ("bfind.s32", 32, lambda a: (~S(a) if S(a) < 0 else a).bit_length() - 1),
        ("bfind.shiftamt.u64", 64, lambda a: 64 - a.bit_length() if a else -1),
    ],
)
def test_counting_bits(name: str, bits: int, function: Callable[[int], int]) -> None:
    (values,) = operands(bits, 1)
    (got,) = run_lanes(f"{name} %d0, %a0;", [values], [np.uint32], block=64)
    assert got.tolist() == [function(value) & LOW[32] for value in values.tolist()]


@pytest.mark.parametrize("kind", ["u", "s"])
def test_wide_products(kind: str) -> None:
    a, b = operands(32, 2)
    (c,) = operands(64, 1, seed=8)
    body = f"mul.wide.{kind}32 %d0, %a0, %a1; mad.wide.{kind}32 %d1, %a0, %a1, %a2;"
    product, total = run_lanes(body, [a, b, c], [np.uint64, np.uint64], block=64)
    as_value = S if kind == "s" else U
    for x, y, z, p, t in zip(*(v.tolist() for v in (a, b, c, product, total)), strict=True):
        exact = as_value(x) * as_value(y)
        assert (p, t) == (exact & LOW[64], exact + z & LOW[64])


def test_dot_products_of_bytes() -> None:
    a, b, c = operands(32, 3)
    body = """
        dp4a.u32.s32 %d0, %a0, %a1, %a2;
        dp4a.s32.s32 %d1, %a0, %a1, %a2;
        dp2a.hi.s32.u32 %d2, %a0, %a1, %a2;
    """
    mixed, both, pairs = run_lanes(body, [a, b, c], [np.uint32] * 3, block=64)
    for x, y, z, m, s, p in zip(*(v.tolist() for v in (a, b, c, mixed, both, pairs)), strict=True):
        left, right = x.to_bytes(4, "little"), y.to_bytes(4, "little")
        dot = sum(i * S(j, 8) for i, j in zip(left, right, strict=True))
        signed_dot = sum(S(i, 8) * S(j, 8) for i, j in zip(left, right, strict=True))
        halves = S(x, 16) * right[2] + S(x >> 16, 16) * right[3]
        assert [m, s, p] == [(v + z) & LOW[32] for v in (dot, signed_dot, halves)]


def test_extended_precision_carries_from_word_to_word() -> None:
    a, b = operands(64, 2)
    split = "mov.b64 {%x0, %x1}, %a0; mov.b64 {%y0, %y1}, %a1;"
    body = f"""
        .reg .b32 %x0, %x1, %y0, %y1, %z0, %z1, %c, %p0, %p1;
        {split}
        add.cc.u32 %z0, %x0, %y0; addc.cc.u32 %z1, %x1, %y1; addc.u32 %c, 0, 0;
        mov.b64 %d0, {{%z0, %z1}}; mov.b32 %d1, %c;
        sub.cc.u32 %z0, %x0, %y0; subc.cc.u32 %z1, %x1, %y1; subc.u32 %c, 0, 0;
        mov.b64 %d2, {{%z0, %z1}}; mov.b32 %d3, %c;
        mul.lo.u32 %p0, %x0, %y0; mul.hi.u32 %p1, %x0, %y0;
        mad.lo.cc.u32 %p1, %x0, %y1, %p1; madc.hi.u32 %c, %x0, %y1, 0;
        mov.b64 %d4, {{%p1, %c}};
    """
    kinds = [np.uint64, np.uint32, np.uint64, np.uint32, np.uint64]
    total, carry, difference, borrow, middle = run_lanes(body, [a, b], kinds, block=64)
    for x, y, t, c, d, w, m in zip(
        *(v.tolist() for v in (a, b, total, carry, difference, borrow, middle)), strict=True
    ):
        assert t | c << 64 == x + y
        assert (d, w) == (x - y & LOW[64], LOW[32] if x < y else 0)
        low, high = x & LOW[32], y >> 32
        assert m == ((low * (y & LOW[32]) >> 32) + low * high) & LOW[64]


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_masks_and_extensions(mode: str) -> None:
    (a,) = operands(32, 1)
    starts = (np.arange(64) * 5 % 45).astype(np.uint32)
    widths = (np.arange(64) * 11 % 41).astype(np.uint32)
    body = f"bmsk.{mode}.b32 %d0, %a1, %a2; szext.{mode}.s32 %d1, %a0, %a2;"
    masks, extended = run_lanes(body, [a, starts, widths], [np.uint32] * 2, block=64)
    for x, start, width, mask, value in zip(
        *(v.tolist() for v in (a, starts, widths, masks, extended)), strict=True
    ):
        count = min(width, 32) if mode == "clamp" else width & 31
        if mode == "clamp" and start >= 32:
            assert mask == 0
        else:
            assert mask == ((1 << count) - 1) << (start & 31) & LOW[32]
        if count == 32:
            assert value == x
        else:
            sign = x >> (count - 1) & 1 if count else 0
            assert value == ((x & ((1 << count) - 1)) - (sign << count)) & LOW[32]


def test_lop3_says_whether_anything_is_left() -> None:
    body = """
        .reg .pred %p, %q, %odd; and.b32 %at32, %t, 1; setp.eq.u32 %odd, %at32, 1;
        lop3.or.b32 %d0|%p, %a0, 3, 0, 0xC0, %odd; lop3.and.b32 _|%q, %a0, 3, 0, 0xC0, %odd;
        selp.u32 %d1, 1, 0, %p; selp.u32 %d2, 1, 0, %q;
    """.replace(".reg .pred", ".reg .b32 %at32; .reg .pred")
    (a,) = operands(32, 1)
    left, either, both = run_lanes(body, [a], [np.uint32] * 3, block=64)
    odd = np.arange(64) % 2 == 1
    assert np.array_equal(left, a & 3)
    assert np.array_equal(either, (left != 0) | odd)
    assert np.array_equal(both, (left != 0) & odd)


def test_fns_finds_the_nth_bit() -> None:
    masks = np.array([0b10110100, 0b10110100, 0b10110100, 0b1, 0xFFFFFFFF] + [0] * 27, np.uint32)
    bases = np.array([0, 3, 7, 0, 31] + [0] * 27, np.uint32)
    offsets = np.array([2, 0, -2, 0, -32] + [1] * 27, np.int32)
    (got,) = run_lanes("fns.b32 %d0, %a0, %a1, %a2;", [masks, bases, offsets], [np.uint32])
    assert got.tolist() == [4, LOW[32], 5, 0, 0] + [LOW[32]] * 27


@pytest.mark.parametrize(
    "text",
    [
        "frobnicate.u32 %d0, %a0, %a0;",
        "add.cluster.u32 %d0, %a0, %a0;",
        "add.sat.u32 %d0, %a0, %a0;",
        "mov.u32 %d0, %envreg7;",
        "atom.global.exch.b128 _, [%at], {%at, %at};",
        "vabsdiff4.u32.u32.u32 %d0, %a0, %a0, %a0;",
    ],
)
def test_what_is_unknown_stops_with_its_text(text: str) -> None:
    (a,) = operands(32, 1)
    with pytest.raises(UnsupportedInstruction) as caught:
        run_lanes(text, [a], [np.uint32], block=64)
    assert text in str(caught.value)
    assert "line " in str(caught.value)
