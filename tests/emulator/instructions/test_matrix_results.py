"""ldmatrix, stmatrix and mma against the fragment layouts of the PTX ISA, row by row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from emulator.errors import DivergentExecution, UnsupportedInstruction
from emulator.programs.lane_programs import run_lanes

LANES = np.arange(32, dtype=np.uint32)
GROUP, THREAD = LANES // 4, LANES % 4


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_and_stmatrix(count: int, trans: str) -> None:
    listed = ", ".join(f"%w{i}" for i in range(count))
    stores = "\n".join(f"mov.b32 %d{i}, %w{i};" for i in range(count))
    body = f"""
        .shared .align 16 .b8 box[1024]; .reg .b32 %base, %row, %to, %w<4>, %x; .reg .b64 %g;
        mov.u32 %base, box; mad.lo.u32 %row, %t, 16, %base;
        st.shared.b64 [%row], %a0; st.shared.b64 [%row + 8], %a1; bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{listed}}}, [%row];
        add.u32 %to, %row, 512;
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%to], {{{listed}}};
        bar.sync 0;
        {stores}
        ld.shared.b64 %d{count}, [%row + 512];
    """
    if count < 4:
        body = body.replace(
            "add.u32 %to",
            f".reg .pred %p; setp.ge.u32 %p, %t, {8 * count};\n"
            "@%p st.shared.b64 [%row + 512], %a0; bar.sync 0; add.u32 %to",
        )
    values = np.arange(256, dtype=np.uint16).reshape(32, 8)
    halves = values.view(np.uint64)
    kinds = [np.uint32] * count + [np.uint64]
    got = run_lanes(body, [halves[:, 0].copy(), halves[:, 1].copy()], kinds)
    for matrix in range(count):
        rows = values[8 * matrix : 8 * matrix + 8]
        rows = rows.T if trans else rows
        pair = rows[GROUP, 2 * THREAD], rows[GROUP, 2 * THREAD + 1]
        assert np.array_equal(got[matrix], pair[0] | pair[1].astype(np.uint32) << 16)
    # What was stored the same way lies as it was loaded from.
    assert np.array_equal(got[count][: 8 * count], halves[: 8 * count, 0])


def a_element(m: int, bits: int, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of element i of A, as the ISA writes them for every shape of 8 to 32 bits."""
    each = 32 // bits
    register, place = divmod(i, each)
    if m == 8:
        return GROUP, THREAD * each + place + register * 4 * each
    row = GROUP if register % 2 == 0 else GROUP + 8
    return row, THREAD * each + place + (register // 2) * 4 * each


def b_element(bits: int, i: int) -> tuple[np.ndarray, np.ndarray]:
    each = 32 // bits
    register, place = divmod(i, each)
    return THREAD * each + place + register * 4 * each, GROUP


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Registers [count, 32] of codes by lane [elements, 32]."""
    each = 32 // bits
    words = np.zeros((len(codes) // each, 32), np.uint64)
    for index, row in enumerate(codes):
        words[index // each] |= row.astype(np.uint64) << np.uint64(bits * (index % each))
    return words.astype(np.uint32)


PRODUCTS = [
    (16, 8, 8, "f16", "f32"),
    (16, 8, 16, "f16", "f32"),
    (16, 8, 16, "f16", "f16"),
    (16, 8, 8, "bf16", "f32"),
    (16, 8, 16, "bf16", "f32"),
    (16, 8, 4, "tf32", "f32"),
    (16, 8, 8, "tf32", "f32"),
    (16, 8, 32, "e4m3", "f32"),
    (16, 8, 16, "e5m2", "f32"),
    (8, 8, 16, "s8", "s32"),
    (16, 8, 16, "u8", "s32"),
    (16, 8, 32, "s8", "s32"),
    (8, 8, 32, "u4", "s32"),
    (16, 8, 64, "s4", "s32"),
]
DTYPES = {
    "f16": (16, np.float16),
    "bf16": (16, ml_dtypes.bfloat16),
    "tf32": (32, np.float32),
    "e4m3": (8, ml_dtypes.float8_e4m3fn),
    "e5m2": (8, ml_dtypes.float8_e5m2),
}


@pytest.mark.parametrize(
    ("m", "n", "k", "kind", "result"),
    PRODUCTS,
    ids=[f"m{p[0]}k{p[2]}-{p[3]}-{p[4]}" for p in PRODUCTS],
)
def test_products_of_small_integers_are_exact(
    m: int, n: int, k: int, kind: str, result: str
) -> None:
    generator = np.random.default_rng(k)
    low, high = (0, 4) if kind[0] == "u" else (-3, 4)
    a, b = generator.integers(low, high, (m, k)), generator.integers(low, high, (k, n))
    c = generator.integers(-20, 21, (m, n))
    if kind in DTYPES:
        bits, dtype = DTYPES[kind]
        a_codes, b_codes = (x.astype(dtype).view(f"u{bits // 8}") for x in (a, b))
    else:
        bits = int(kind[1:])
        a_codes, b_codes = a & (1 << bits) - 1, b & (1 << bits) - 1
    each = 32 // bits
    a_count, b_count = m * k // 32, n * k // 32
    a_words = packed(np.array([a_codes[a_element(m, bits, i)] for i in range(a_count)]), bits)
    b_words = packed(np.array([b_codes[b_element(bits, i)] for i in range(b_count)]), bits)
    places = [(GROUP + 8 * (i // 2), 2 * THREAD + i % 2) for i in range(m * n // 32)]
    c_lanes = np.array([c[place] for place in places])
    if result == "f32":
        c_words = c_lanes.astype(np.float32).view(np.uint32)
    elif result == "f16":
        c_words = packed(c_lanes.astype(np.float16).view(np.uint16), 16)
    else:
        c_words = c_lanes.astype(np.int32).view(np.uint32)
    inputs = [*a_words, *b_words, *c_words]
    names = iter(f"%a{i}" for i in range(len(inputs)))
    lists = [", ".join(next(names) for _ in words) for words in (a_words, b_words, c_words)]
    results = ", ".join(f"%d{i}" for i in range(len(c_words)))
    body = (
        f"mma.sync.aligned.m{m}n{n}k{k}.row.col.{result}.{kind}.{kind}.{result}"
        f" {{{results}}}, {{{lists[0]}}}, {{{lists[1]}}}, {{{lists[2]}}};"
    )
    got = np.array(run_lanes(body, inputs, [np.uint32] * len(c_words)))
    assert each * len(a_words) == a_count
    expected = a @ b + c
    wanted = np.array([expected[place] for place in places])
    if result == "f16":
        wanted = packed(wanted.astype(np.float16).view(np.uint16), 16)
        assert np.array_equal(got, wanted)
    elif result == "f32":
        assert np.array_equal(got.view(np.float32), wanted)
    else:
        assert np.array_equal(got.view(np.int32), wanted)


def test_integer_sums_wrap_or_saturate() -> None:
    words = np.full(32, 0x7F7F7F7F, np.uint32)
    start = np.full(32, 0x7FFFFFFF, np.uint32)
    for text, expected in (
        ("", (0x7FFFFFFF + 16 * 127 * 127) & 0xFFFFFFFF),
        (".satfinite", start[0]),
    ):
        body = (
            f"mma.sync.aligned.m8n8k16.row.col{text}.s32.s8.s8.s32"
            " {%d0, %d1}, {%a0}, {%a0}, {%a1, %a1};"
        )
        got = run_lanes(body, [words, start], [np.uint32] * 2)
        assert (got[0] == expected).all()


@pytest.mark.parametrize(
    "text",
    [
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%d0}, {%a0}, {%a0}, {%a0};",
        "mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32 {%d0}, {%a0}, {%a0}, {%a0};",
        "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%d0}, {%a0}, {%a0}, {%a0};",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%d0, %d0}, [%a0];",
        "wgmma.fence.sync.aligned;",
    ],
)
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=text.split(" ")[0].replace(".", r"\.")):
        run_lanes(text, [LANES], [np.uint32])


def test_all_lanes_take_part() -> None:
    body = """
        .reg .pred %p; setp.lt.u32 %p, %t, 7;
        @%p mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%d0, %d0}, {%a0}, {%a0}, {%a0, %a0};
    """
    with pytest.raises(DivergentExecution):
        run_lanes(body, [LANES], [np.uint32])
