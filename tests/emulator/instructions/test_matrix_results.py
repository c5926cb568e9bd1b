"""ldmatrix, stmatrix and mma against the fragment layouts of the PTX ISA, row by row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from emulator.errors import DataRace, DivergentExecution, UnsupportedInstruction
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


BYTES = np.random.default_rng(5).integers(0, 256, (32, 16), dtype=np.uint8)
SIX_BITS = np.unpackbits(BYTES[:, :12], axis=1, bitorder="little").reshape(32, 16, 6)
STORED = {
    "b8": BYTES,
    "b8x16.b4x16_p64": np.stack([BYTES[:, :8] & 15, BYTES[:, :8] >> 4], 2).reshape(32, 16),
    "b8x16.b6x16_p32": (SIX_BITS << np.arange(6, dtype=np.uint8)).sum(2, dtype=np.uint8),
}


@pytest.mark.parametrize(
    ("shape", "stored", "count"),
    [
        ("m16n16", "b8", 1),
        ("m16n16", "b8", 2),
        ("m8n16", "b8x16.b4x16_p64", 4),
        ("m8n16", "b8x16.b6x16_p32", 2),
        ("m16n16", "b8x16.b4x16_p64", 1),
    ],
)
def test_matrices_of_bytes(shape: str, stored: str, count: int) -> None:
    """Rows of 16 bytes, from byte 4 c on in lane 4 r + c; 16x16 ones transposed, in halves."""
    rows = 16 if shape == "m16n16" else 8
    registers = count * rows // 8
    listed = ", ".join(f"%d{i}" for i in range(registers))
    trans = ".trans" * (rows == 16)
    body = f"""
        .shared .align 16 .b8 box[512]; .reg .b32 %base, %row;
        mov.u32 %base, box; mad.lo.u32 %row, %t, 16, %base;
        st.shared.b64 [%row], %a0; st.shared.b64 [%row + 8], %a1; bar.sync 0;
        ldmatrix.sync.aligned.{shape}.x{count}{trans}.shared.{stored} {{{listed}}}, [%row];
    """
    words = BYTES.view(np.uint64)
    got = np.array(
        run_lanes(body, [words[:, 0].copy(), words[:, 1].copy()], [np.uint32] * registers)
    )
    for index in range(registers):
        matrix = STORED[stored][rows * (index * 8 // rows) :][:rows]
        half = matrix.T[8 * (index % 2) :][:8] if rows == 16 else matrix
        for byte in range(4):
            found = got[index] >> (8 * byte) & 0xFF
            assert np.array_equal(found, half[GROUP, 4 * THREAD + byte])


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
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%a0], {%a0};",
        "ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%d0, %d0}, [%a0];",
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


SMALL_FORMATS = {
    # bits, and the bit from which on they lie in a byte; ml_dtypes' type
    "e4m3": (8, 0, ml_dtypes.float8_e4m3fn),
    "e5m2": (8, 0, ml_dtypes.float8_e5m2),
    "e3m2": (6, 0, ml_dtypes.float6_e3m2fn),
    "e2m3": (6, 0, ml_dtypes.float6_e2m3fn),
    "e2m1": (4, 2, ml_dtypes.float4_e2m1fn),
}
KINDS = {
    # kind, scale factors of a row, types of A and B, type of the factors
    "nvfp4": ("mxf4nvf4", 4, "e2m1", "e2m1", "ue4m3"),
    "mxfp4": ("mxf4", 2, "e2m1", "e2m1", "ue8m0"),
    "mxfp8": ("mxf8f6f4", 1, "e4m3", "e5m2", "ue8m0"),
    "mxfp6": ("mxf8f6f4", 1, "e3m2", "e2m3", "ue8m0"),
    "mixed": ("mxf8f6f4", 1, "e2m1", "e4m3", "ue8m0"),
    "unscaled": ("f8f6f4", 0, "e2m1", "e3m2", ""),
}


def scale_words(factors: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """A register with the factors of row i in lane `lanes[i]`, garbage elsewhere."""
    words = np.full((32, 4), 0x81, np.uint8)
    words[lanes, : factors.shape[1]] = factors
    return words.view(np.uint32)[:, 0]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("a_thread", "b_thread"), [(0, 0), (1, 3)])
def test_products_of_small_formats(name: str, a_thread: int, b_thread: int) -> None:
    kind, vectors, a_type, b_type, scale_type = KINDS[name]
    packed_kind = kind.startswith("mxf4")
    bits, k = (4, 64) if packed_kind else (8, 32)
    generator = np.random.default_rng(k)
    matrices, words = [], []
    for type_name, rows in ((a_type, 16), (b_type, 8)):
        width, shift, dtype = SMALL_FORMATS[type_name]
        codes = generator.integers(-2, 3, (rows, k)).astype(dtype).view(np.uint8)
        matrices.append(codes.view(dtype).astype(np.float64))
        codes = (codes & (1 << width) - 1) << (0 if packed_kind else shift)
        element = a_element if rows == 16 else lambda _, bits, i: b_element(bits, i)[::-1]
        lanes = [codes[element(16, bits, i)] for i in range(rows * k // 32)]
        words.append(packed(np.array(lanes), bits))
    text = f"mma.sync.aligned.m16n8k{k}.row.col.kind::{kind}"
    scales = []
    if vectors:
        low = {"ue8m0": 126, "ue4m3": 0x30}[scale_type]
        row = np.arange(16)
        for index, (rows, lanes) in enumerate(
            ((16, 4 * (row % 8) + row // 8 + 2 * a_thread), (8, 4 * np.arange(8) + b_thread))
        ):
            codes = generator.integers(low, low + 4, (rows, vectors), dtype=np.uint8)
            dtype = {"ue8m0": ml_dtypes.float8_e8m0fnu, "ue4m3": ml_dtypes.float8_e4m3fn}[
                scale_type
            ]
            factors = codes.view(dtype).astype(np.float64)
            matrices[index] = matrices[index] * np.repeat(factors, k // vectors, 1)
            scales.append(scale_words(codes, lanes))
        text += f".block_scale.scale_vec::{vectors}X"
    inputs = [*words[0], *words[1], *scales]
    names = [f"%a{i}" for i in range(len(inputs))]
    a_names, b_names = ", ".join(names[:4]), ", ".join(names[4:6])
    text += f".f32.{a_type}.{b_type}.f32" + f".{scale_type}" * bool(vectors)
    body = f".reg .b32 %zero; mov.b32 %zero, 0; {text} {{%d0, %d1, %d2, %d3}}, {{{a_names}}}, "
    body += f"{{{b_names}}}, {{%zero, %zero, %zero, %zero}}"
    if vectors:
        body += f", {{%a6}}, {{0, {a_thread}}}, %a7, {{0, {b_thread}}}"
    got = np.array(run_lanes(body + ";", inputs, [np.uint32] * 4)).view(np.float32)
    places = [(GROUP + 8 * (i // 2), 2 * THREAD + i % 2) for i in range(4)]
    expected = matrices[0] @ matrices[1].T
    assert np.array_equal(got, np.array([expected[place] for place in places]))


@pytest.mark.parametrize(("m", "k"), [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_products_of_doubles(m: int, k: int) -> None:
    generator = np.random.default_rng(k)
    a, b = generator.integers(-9, 10, (m, k)) / 4, generator.integers(-9, 10, (k, 8)) / 4
    a_lanes = [a[a_element(m, 32, i)] for i in range(m * k // 32)]
    b_lanes = [b[b_element(32, i)] for i in range(8 * k // 32)]
    count = m * 8 // 32
    names = [f"%a{i}" for i in range(len(a_lanes) + len(b_lanes))]
    results = ", ".join(f"%d{i}" for i in range(count))
    body = f"""
        .reg .b64 %one; mov.f64 %one, 0d3FF0000000000000;
        mma.sync.aligned.m{m}n8k{k}.row.col.f64.f64.f64.f64 {{{results}}},
            {{{", ".join(names[: len(a_lanes)])}}}, {{{", ".join(names[len(a_lanes) :])}}},
            {{{", ".join(["%one"] * count)}}};
    """
    got = run_lanes(
        body, [each.view(np.uint64) for each in a_lanes + b_lanes], [np.float64] * count
    )
    places = [(GROUP + 8 * (i // 2), 2 * THREAD + i % 2) for i in range(count)]
    assert np.array_equal(np.array(got), np.array([(a @ b + 1)[place] for place in places]))


def test_a_matrix_that_is_there_already_may_be_stored_again() -> None:
    """Warps of Triton's kernels that hold the same values all store them; others' are a race."""
    body = """
        .shared .align 16 .b8 box[128]; .reg .b32 %row, %base; and.b32 %row, %t, 7;
        mov.u32 %base, box; mad.lo.u32 %row, %row, 16, %base;
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%row], {%a0}; bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%d0}, [%row];
    """
    same = np.tile(LANES, 2)
    (got,) = run_lanes(body, [same], [np.uint32], block=64)
    assert np.array_equal(got, same)
    with pytest.raises(DataRace):
        run_lanes(body, [np.arange(64, dtype=np.uint32)], [np.uint32], block=64)
