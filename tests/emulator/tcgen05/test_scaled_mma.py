"""Block-scaled and narrow kinds of tcgen05.mma, against NumPy on ml_dtypes' values."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from emulator import errors
from emulator.programs.ptx_kernels import SEEDS
from emulator.programs.tcgen05_kernels import MmaCase

from .canonical_layouts import encode_descriptor

RANDOM = np.random.default_rng(12)
TYPES = {
    "e2m1": (ml_dtypes.float4_e2m1fn, 4, 5),
    "e2m3": (ml_dtypes.float6_e2m3fn, 6, 3),
    "e3m2": (ml_dtypes.float6_e3m2fn, 6, 4),
    "e4m3": (ml_dtypes.float8_e4m3fn, 8, 0),
    "e5m2": (ml_dtypes.float8_e5m2, 8, 1),
}
# Codes whose values are small integers and halves, so that FP32 holds every sum exactly.
MODEST_E4M3 = np.array([0x00, 0x38, 0xB8, 0x40, 0xC0, 0x44, 0x30], np.uint8)


def packed_image(codes: np.ndarray, bits: int, span: int, *, padded: bool) -> np.ndarray:
    """A K-major matrix with the swizzle of `span` bytes, 32 bytes of K to a row.

    Codes lie side by side; `padded` starts every 16 of them on a new cell of 16 bytes.
    """
    rows = codes.shape[0]
    image = np.zeros(rows // 8 * 8 * span, np.uint8)
    per_cell = 16 if padded else 128 // bits
    for row in range(rows):
        for cell in range(2):
            part = codes[row, cell * per_cell : (cell + 1) * per_cell].tolist()
            word = sum(code << bits * i for i, code in enumerate(part))
            offset = row * span + cell * 16
            offset ^= (offset >> 7 & span // 16 - 1) << 4
            image[offset : offset + 16] = np.frombuffer(word.to_bytes(16, "little"), np.uint8)
    return image


def values_of(codes: np.ndarray, name: str) -> np.ndarray:
    """What ml_dtypes says the codes stand for."""
    return codes.astype(np.uint8).view(TYPES[name][0]).astype(np.float64)


def random_codes(name: str, rows: int, k: int) -> np.ndarray:
    """Codes of modest finite values."""
    if name in ("e4m3", "e5m2"):
        modest = MODEST_E4M3.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return RANDOM.choice(modest, (rows, k)).astype(TYPES[name][0]).view(np.uint8)
    return RANDOM.integers(0, 1 << TYPES[name][1], (rows, k)).astype(np.uint8)


def scale_image(codes: np.ndarray) -> np.ndarray:
    """512 bytes for `tcgen05.cp.32x128b.warpx4`: row `r` at `r % 32 * 16 + r // 32 * 4`."""
    image = np.full(512, 0x7F, np.uint8)
    for row in range(codes.shape[0]):
        start = row % 32 * 16 + row // 32 * 4
        image[start : start + 4] = codes[row]
    return image


def scaled_case(
    kind: str,
    a_type: str,
    b_type: str,
    vector: int,
    scale_codes: tuple[np.ndarray, np.ndarray],
    scale_values: tuple[np.ndarray, np.ndarray],
    *,
    n: int = 8,
    ids: tuple[int, int] = (0, 0),
    ue8m0: bool = False,
    span: int = 64,
) -> tuple[MmaCase, np.ndarray]:
    """A case, and (A * scale_A) * (B * scale_B)^T rounded to FP32."""
    k = 32 if kind.startswith("kind::mxf8f6f4") else 64
    a, b = random_codes(a_type, 128, k), random_codes(b_type, n, k)
    padded = k == 32
    images = [
        packed_image(codes, TYPES[name][1], span, padded=padded)
        for codes, name in ((a, a_type), (b, b_type))
    ]
    type_ids = (TYPES[a_type][2], TYPES[b_type][2]) if padded else (1, 1)
    word = ids[1] << 4 | type_ids[0] << 7 | type_ids[1] << 10 | (n >> 3) << 17 | ue8m0 << 23
    word |= 1 << 27 | ids[0] << 29
    matrix = encode_descriptor(0, 16, 8 * span, {32: 6, 64: 4, 128: 2}[span])
    case = MmaCase(
        kind,
        word,
        *images,
        matrix,
        matrix,
        n,
        scales=np.concatenate([scale_image(codes) for codes in scale_codes]),
    )
    scaled = [
        values_of(codes, name) * np.repeat(scales[:, first : first + vector], k // vector, axis=1)
        for codes, name, scales, first in zip(
            (a, b), (a_type, b_type), scale_values, ids, strict=True
        )
    ]
    return case, (scaled[0] @ scaled[1].T).astype(np.float32)


def e4m3_scales(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Non-negative E4M3 codes of powers of two and a few others, and their values."""
    codes = RANDOM.choice(np.array([0x30, 0x38, 0x40, 0x3C, 0x44, 0x08], np.uint8), (rows, 4))
    return codes, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def e8m0_scales(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """UE8M0 codes around 2^0, and their values."""
    codes = RANDOM.integers(124, 131, (rows, 4)).astype(np.uint8)
    return codes, 2.0 ** (codes.astype(np.float64) - 127)


def transposed(pairs: tuple[tuple[np.ndarray, np.ndarray], ...]) -> tuple:
    """Codes of A and B, and values of A and B."""
    return tuple(zip(*pairs, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_nvfp4_with_e4m3_scales(seed: int) -> None:
    codes, values = transposed((e4m3_scales(128), e4m3_scales(8)))
    case, expected = scaled_case(
        "kind::mxf4nvf4.block_scale.scale_vec::4X", "e2m1", "e2m1", 4, codes, values
    )
    np.testing.assert_array_equal(case.result(seed).view(np.float32), expected)


@pytest.mark.parametrize("qualifier", ["scale_vec::4X", "block16"])
@pytest.mark.parametrize("n", [8, 72, 128])
@pytest.mark.parametrize("span", [32, 64, 128])
def test_nvfp4_shapes_and_swizzles(qualifier: str, n: int, span: int) -> None:
    codes, values = transposed((e4m3_scales(128), e4m3_scales(n)))
    kind = f"kind::mxf4nvf4.block_scale.{qualifier}"
    case, expected = scaled_case(kind, "e2m1", "e2m1", 4, codes, values, n=n, span=span)
    np.testing.assert_array_equal(case.result().view(np.float32), expected)


SCALED = {
    "nvf4-ue8m0-4x": ("mxf4nvf4.block_scale.scale_vec::4X", 4, [(0, 0)]),
    "nvf4-ue8m0-2x": ("mxf4nvf4.block_scale.scale_vec::2X", 2, [(0, 0), (2, 0), (0, 2), (2, 2)]),
    "nvf4-block32": ("mxf4nvf4.block_scale.block32", 2, [(0, 2)]),
    "mxf4": ("mxf4.block_scale", 2, [(0, 0), (2, 2)]),
    "mxf4-2x": ("mxf4.block_scale.scale_vec::2X", 2, [(2, 0)]),
}


@pytest.mark.parametrize("name", SCALED)
def test_four_bit_kinds_with_ue8m0_scales(name: str) -> None:
    kind, vector, pairs = SCALED[name]
    for ids in pairs:
        codes, values = transposed((e8m0_scales(128), e8m0_scales(16)))
        case, expected = scaled_case(
            f"kind::{kind}", "e2m1", "e2m1", vector, codes, values, n=16, ids=ids, ue8m0=True
        )
        np.testing.assert_array_equal(case.result().view(np.float32), expected)


@pytest.mark.parametrize("a_type", TYPES)
@pytest.mark.parametrize("b_type", TYPES)
def test_mxf8f6f4_types(a_type: str, b_type: str) -> None:
    codes, values = transposed((e8m0_scales(128), e8m0_scales(8)))
    ids = (int(RANDOM.integers(4)), int(RANDOM.integers(4)))
    case, expected = scaled_case(
        "kind::mxf8f6f4.block_scale", a_type, b_type, 1, codes, values, ids=ids, ue8m0=True
    )
    np.testing.assert_array_equal(case.result().view(np.float32), expected)


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2"])
@pytest.mark.parametrize("in_tensor_memory", [False, True], ids=["shared", "tensor"])
def test_narrow_types_of_f8f6f4(name: str, in_tensor_memory: bool) -> None:
    """From shared memory with padding; from tensor memory in 8-bit containers, decompressed."""
    a, b = random_codes(name, 128, 32), random_codes("e4m3", 8, 32)
    a_image = packed_image(a, TYPES[name][1], 64, padded=True)
    b_image = packed_image(b, 8, 64, padded=True)
    matrix = encode_descriptor(0, 16, 512, 4)
    word = 1 << 4 | TYPES[name][2] << 7 | 1 << 17 | 8 << 24
    case = MmaCase("kind::f8f6f4", word, a_image, b_image, matrix, matrix, 8)
    body = None
    if in_tensor_memory:
        case = replace(case, a_in_tensor_memory=True)
        source = "b4x16_p64" if TYPES[name][1] == 4 else "b6x16_p32"
        plain = encode_descriptor(0, 128, 256, 0)
        body = case.body().replace("128x256b", f"128x256b.b8x16.{source}")
        body = body.replace(f"add.s64 %rd10, %rd10, {plain}", f"add.s64 %rd10, %rd10, {matrix}")
    expected = values_of(a, name) @ values_of(b, "e4m3").T
    np.testing.assert_array_equal(case.result(body=body).view(np.float32), expected)


def test_packed_four_bit_a_from_tensor_memory() -> None:
    codes, values = transposed((e4m3_scales(128), e4m3_scales(8)))
    case, expected = scaled_case(
        "kind::mxf4nvf4.block_scale.scale_vec::4X", "e2m1", "e2m1", 4, codes, values
    )
    case = replace(case, a_in_tensor_memory=True)
    plain = encode_descriptor(0, 128, 256, 0)
    body = case.body().replace(
        f"add.s64 %rd10, %rd10, {plain}", f"add.s64 %rd10, %rd10, {case.a_word}"
    )
    np.testing.assert_array_equal(case.result(body=body).view(np.float32), expected)


def nvfp4_case() -> tuple[MmaCase, np.ndarray]:
    """One case for the planted bugs."""
    codes, values = transposed((e4m3_scales(128), e4m3_scales(8)))
    return scaled_case("kind::mxf4nvf4.block_scale.block16", "e2m1", "e2m1", 4, codes, values)


def test_swapped_scale_words_give_another_result() -> None:
    case, expected = nvfp4_case()
    assert case.scales is not None
    words = case.scales.view(np.uint32).copy()
    words[[0, 1]] = words[[1, 0]]  # rows 0 and 32 of A
    result = replace(case, scales=words.view(np.uint8)).result().view(np.float32)
    assert (result != expected).any(axis=1).sum() <= 2
    assert not np.array_equal(result, expected)


def test_a_nan_scale_makes_its_row_nan() -> None:
    case, expected = nvfp4_case()
    assert case.scales is not None
    scales = case.scales.copy()
    scales[5 * 16] = 0x7F
    result = replace(case, scales=scales).result().view(np.float32)
    assert np.isnan(result[5]).all()
    np.testing.assert_array_equal(np.delete(result, 5, 0), np.delete(expected, 5, 0))


def test_scale_factors_must_be_in_all_quarters() -> None:
    case, _ = nvfp4_case()
    body = case.body().replace("32x128b.warpx4", "64x128b.warpx2::02_13", 1)
    with pytest.raises(errors.EmulationError, match="quarters"):
        case.result(body=body)


def test_a_matrix_without_copied_scales_is_undefined() -> None:
    case, _ = nvfp4_case()
    lines = [line for line in case.body().splitlines() if "tcgen05.cp" not in line]
    with pytest.raises(errors.UnwrittenRead, match="d: what is stored depends on"):
        case.result(body="\n".join(lines))
