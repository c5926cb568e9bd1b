"""tcgen05.mma: every kind and layout, against products computed in plain NumPy."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from emulator.programs.ptx_kernels import SEEDS
from emulator.programs.tcgen05_kernels import DEALLOCATE, MmaCase

from .canonical_layouts import Canonical, encode_descriptor

RANDOM = np.random.default_rng(11)
K_MAJOR = {"none": 0, "32B": 6, "64B": 4, "128B": 2}


def plain_descriptor(m: int, n: int, d: int, a: int, b: int, extra: int = 0) -> int:
    """Instruction descriptor of the kinds without scaling."""
    return d << 4 | a << 7 | b << 10 | (n >> 3) << 17 | (m >> 4) << 24 | extra


def bytes_of(values: np.ndarray, dtype: type) -> np.ndarray:
    """Values as elements: uint8 `[rows, K, bytes]`."""
    stored = values.astype(dtype)
    return stored.view(np.uint8).reshape(*values.shape, stored.dtype.itemsize)


def small_integers(rows: int, k: int) -> np.ndarray:
    """Integers whose products and sums every format holds exactly."""
    return RANDOM.integers(-3, 4, (rows, k)).astype(np.float32)


def image(values: np.ndarray, dtype: type, mode: int, k_major: bool) -> tuple[np.ndarray, int]:
    """Bytes of shared memory and descriptor of a matrix."""
    elements = bytes_of(values, dtype)
    size = elements.shape[2]
    layout = Canonical(mode, k_major)
    t, cells = 16 // size, 1 << layout.bits
    if k_major:
        leading, stride = 128, 256 if mode == 0 else 8 * 16 * cells
        length = values.shape[0] // 8 * stride
    elif mode == 0:
        leading, stride = values.shape[0] // t * 128, 128
        length = values.shape[1] // 8 * leading
    else:
        stride = 8 * 16 * cells
        leading = stride * (values.shape[1] // 8)
        length = -(-values.shape[0] // (t * cells)) * leading
    word = encode_descriptor(0, leading, stride, mode)
    return layout.place(elements, size, leading, stride, length), word


def f16_case(
    m: int = 128,
    n: int = 8,
    *,
    dtype: type = np.float16,
    a_layout: tuple[int, bool] = (2, True),
    b_layout: tuple[int, bool] = (2, True),
    extra: int = 0,
) -> tuple[MmaCase, np.ndarray]:
    """A case of kind f16 with FP32 results, and A * B^T."""
    a, b = small_integers(m, 16), small_integers(n, 16)
    a_image, a_word = image(a, dtype, *a_layout)
    b_image, b_word = image(b, dtype, *b_layout)
    type_id = 1 if dtype is ml_dtypes.bfloat16 else 0
    transposes = (not a_layout[1]) << 15 | (not b_layout[1]) << 16
    word = plain_descriptor(m, n, 1, type_id, type_id, transposes | extra)
    case = MmaCase("kind::f16", word, a_image, b_image, a_word, b_word, n)
    return case, a @ b.T


@pytest.mark.parametrize("seed", SEEDS)
def test_f16_under_every_policy(seed: int) -> None:
    case, expected = f16_case()
    np.testing.assert_array_equal(case.result(seed).view(np.float32), expected)


@pytest.mark.parametrize("b_mode", K_MAJOR)
@pytest.mark.parametrize("a_mode", K_MAJOR)
def test_k_major_layouts(a_mode: str, b_mode: str) -> None:
    case, expected = f16_case(a_layout=(K_MAJOR[a_mode], True), b_layout=(K_MAJOR[b_mode], True))
    np.testing.assert_array_equal(case.result().view(np.float32), expected)


@pytest.mark.parametrize("b_mode", K_MAJOR)
@pytest.mark.parametrize("a_mode", K_MAJOR)
def test_mn_major_layouts(a_mode: str, b_mode: str) -> None:
    case, expected = f16_case(
        n=64,
        dtype=ml_dtypes.bfloat16,
        a_layout=(K_MAJOR[a_mode], False),
        b_layout=(K_MAJOR[b_mode], False),
    )
    np.testing.assert_array_equal(case.result().view(np.float32), expected)


@pytest.mark.parametrize("n", [8, 24, 128, 256])
def test_columns(n: int) -> None:
    case, expected = f16_case(n=n)
    np.testing.assert_array_equal(case.result().view(np.float32), expected)


def test_sixty_four_rows_use_half_of_each_quarter() -> None:
    case, expected = f16_case(m=64)
    body = case.body()
    # Only lanes 0-15 of each quarter are written: read them with a shape of 16 lanes.
    start = body.index("    add.u32 %r22, %r21, 0;")
    stop = body.index(DEALLOCATE)
    read = """
    tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r100, %r101, %r102, %r103}, [%r21];
    tcgen05.wait::ld.sync.aligned;
    st.global.v4.b32 [%rd6], {%r100, %r101, %r102, %r103};
"""
    out = case.result(body=body[:start] + read + body[stop:])[:, :4].reshape(4, 8, 4, 4)
    found = np.empty((4, 16, 8), np.uint32)  # quarter, lane, column
    for row, column, register in np.ndindex(8, 4, 4):
        lane, place = row + register // 2 * 8, column * 2 + register % 2
        found[:, lane, place] = out[:, row, column, register]
    np.testing.assert_array_equal(found.reshape(64, 8).view(np.float32), expected)


def test_k_steps_accumulate() -> None:
    """K = 64 in four MMAs, along rows of 128 bytes."""
    a, b = small_integers(128, 64), small_integers(8, 64)
    a_image, a_word = image(a, np.float16, 2, True)
    b_image, b_word = image(b, np.float16, 2, True)
    steps = [(32 * i, 32 * i) for i in range(4)]
    word = plain_descriptor(128, 8, 1, 0, 0)
    case = MmaCase("kind::f16", word, a_image, b_image, a_word, b_word, 8, steps=steps)
    np.testing.assert_array_equal(case.result().view(np.float32), a @ b.T)


def initial_values(n: int) -> np.ndarray:
    """FP32 integers for D."""
    return RANDOM.integers(-64, 64, (128, n)).astype(np.float32)


def test_d_is_an_input_where_the_predicate_says_so() -> None:
    case, product = f16_case()
    initial = initial_values(8)
    case = replace(case, d_initial=initial.view(np.uint32))
    np.testing.assert_array_equal(case.result().view(np.float32), product + initial)


def test_scale_input_d() -> None:
    case, product = f16_case()
    initial = initial_values(8)
    case = replace(case, d_initial=initial.view(np.uint32), after_d=", 3")
    np.testing.assert_array_equal(case.result().view(np.float32), product + initial / 8)


def test_disabled_lanes_keep_their_values() -> None:
    case, product = f16_case()
    initial = initial_values(8)
    words = [0x0000_0001, 0xFFFF_FFFF, 0, 0x8000_0000]
    lanes = "".join(f"    mov.b32 %r{40 + i}, {word};\n" for i, word in enumerate(words))
    case = replace(case, d_initial=initial.view(np.uint32), before_d="{%r40, %r41, %r42, %r43}, ")
    result = case.result(body=lanes + case.body()).view(np.float32)
    disabled = np.array([words[i // 32] >> i % 32 & 1 for i in range(128)], bool)
    assert disabled.sum() == 34
    expected = np.where(disabled[:, None], initial, product + initial)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(("bits", "sign"), [(1, -1), (2, -1), (3, 1)], ids=["A", "B", "both"])
def test_negation(bits: int, sign: int) -> None:
    case, product = f16_case(extra=bits << 13)
    np.testing.assert_array_equal(case.result().view(np.float32), sign * product)


def test_f16_results_fill_the_lower_halves_of_words() -> None:
    case, product = f16_case()
    case = replace(case, descriptor=case.descriptor & ~(1 << 4))
    low = case.result().astype(np.uint16).view(np.float16)
    np.testing.assert_array_equal(low, product.astype(np.float16))


def test_a_from_tensor_memory() -> None:
    case, product = f16_case(a_layout=(0, True))
    case = replace(case, a_in_tensor_memory=True)
    np.testing.assert_array_equal(case.result().view(np.float32), product)


EIGHT_BIT = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 0),
    "e5m2": (ml_dtypes.float8_e5m2, 1),
}


@pytest.mark.parametrize("b_type", EIGHT_BIT)
@pytest.mark.parametrize("a_type", EIGHT_BIT)
@pytest.mark.parametrize("major", ["k", "mn"])
def test_eight_bit_floats(a_type: str, b_type: str, major: str) -> None:
    k_major = major == "k"
    a, b = small_integers(128, 32), small_integers(16, 32)
    a_image, a_word = image(a, EIGHT_BIT[a_type][0], 2 if k_major else 4, k_major)
    b_image, b_word = image(b, EIGHT_BIT[b_type][0], 6 if k_major else 0, k_major)
    transposes = (not k_major) * 3 << 15
    word = plain_descriptor(128, 16, 1, EIGHT_BIT[a_type][1], EIGHT_BIT[b_type][1], transposes)
    case = MmaCase("kind::f8f6f4", word, a_image, b_image, a_word, b_word, 16)
    np.testing.assert_array_equal(case.result().view(np.float32), a @ b.T)


def test_tf32_in_both_majors_of_its_own() -> None:
    """K-major with any swizzle; MN-major only with 32-byte atoms, which is placed by hand here."""
    a, b = small_integers(128, 8), small_integers(32, 8)
    a_image, a_word = image(a, np.float32, 2, True)
    b_image = np.zeros(1024, np.uint8)
    for n, k in np.ndindex(32, 8):  # 128 bytes along N; 4 k to an atom, the next 4 k SBO away
        offset = n * 4 + k % 4 * 128 + k // 4 * 512
        offset ^= (offset >> 7 & 3) << 5
        b_image[offset : offset + 4] = np.frombuffer(np.float32(b[n, k]).tobytes(), np.uint8)
    word = plain_descriptor(128, 32, 1, 2, 2, 1 << 16)
    b_word = encode_descriptor(0, 1024, 512, 1)
    case = MmaCase("kind::tf32", word, a_image, b_image, a_word, b_word, 32)
    np.testing.assert_array_equal(case.result().view(np.float32), a @ b.T)


@pytest.mark.parametrize("saturate", [False, True], ids=["wraps", "saturates"])
def test_integers(saturate: bool) -> None:
    a = RANDOM.integers(0, 256, (128, 32))
    b = RANDOM.integers(-128, 128, (16, 32))
    a_image, a_word = image(a, np.uint8, 2, True)
    b_image, b_word = image(b, np.int8, 2, True)
    word = plain_descriptor(128, 16, 2, 0, 1, saturate << 3)
    initial = np.where(RANDOM.random((128, 16)) < 0.5, 2**31 - 5, -(2**31) + 5)
    case = MmaCase(
        "kind::i8",
        word,
        a_image,
        b_image,
        a_word,
        b_word,
        16,
        d_initial=initial.astype(np.int32).view(np.uint32),
    )
    exact = a @ b.T + initial
    assert (np.abs(exact) > 2**31).any()
    wrapped = (exact & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    expected = np.clip(exact, -(2**31), 2**31 - 1) if saturate else wrapped
    np.testing.assert_array_equal(case.result().view(np.int32), expected)
