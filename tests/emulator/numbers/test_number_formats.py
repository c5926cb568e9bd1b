"""Decoding of every code of every format, against tables of the ISA and against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

from . import number_formats as formats

THEIRS = {
    "e2m1": (formats.E2M1, ml_dtypes.float4_e2m1fn),
    "e2m3": (formats.E2M3, ml_dtypes.float6_e2m3fn),
    "e3m2": (formats.E3M2, ml_dtypes.float6_e3m2fn),
    "e4m3": (formats.E4M3, ml_dtypes.float8_e4m3fn),
    "e5m2": (formats.E5M2, ml_dtypes.float8_e5m2),
    "ue8m0": (formats.UE8M0, ml_dtypes.float8_e8m0fnu),
}


@pytest.mark.parametrize("name", THEIRS)
def test_every_code_has_the_value_ml_dtypes_gives(name: str) -> None:
    ours, theirs = THEIRS[name]
    codes = np.arange(1 << ours.bits, dtype=np.uint8)
    expected = codes.view(theirs).astype(np.float64)
    decoded = ours.decode(codes)
    np.testing.assert_array_equal(decoded, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(decoded)[numbers], np.signbit(expected)[numbers])


def test_ue4m3_is_e4m3_without_sign() -> None:
    codes = np.arange(128, dtype=np.uint8)
    np.testing.assert_array_equal(formats.UE4M3.decode(codes), formats.E4M3.decode(codes))
    assert formats.UE4M3.table.size == 128


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(formats.F16, np.float16), (formats.BF16, ml_dtypes.bfloat16)],
    ids=["f16", "bf16"],
)
def test_sixteen_bit_formats_over_all_codes(ours: formats.WideFloat, theirs: type) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        expected = codes.view(theirs).astype(np.float64)
    np.testing.assert_array_equal(ours.decode(codes), expected)


def test_tf32_drops_the_thirteen_low_bits() -> None:
    codes = np.array([0x3F801FFF, 0x3F802000, 0xC0490FDB], np.uint32)
    expected = [1.0, 1.0 + 2.0**-10, -3.140625]
    np.testing.assert_array_equal(formats.TF32.decode(codes), expected)


def test_integers() -> None:
    codes = np.array([0, 127, 128, 255], np.uint8)
    np.testing.assert_array_equal(formats.S8.decode(codes), [0, 127, -128, -1])
    np.testing.assert_array_equal(formats.U8.decode(codes), [0, 127, 128, 255])


def test_results_round_once_to_nearest_even() -> None:
    halfway = 1.0 + 2.0**-24  # between two floats: to the even one
    above = np.nextafter(halfway, 2.0)
    bits = formats.to_f32_bits(np.array([halfway, above, 1e300, -0.0]))
    np.testing.assert_array_equal(bits, [0x3F800000, 0x3F800001, 0x7F800000, 0x80000000])
    halves = formats.to_f16_bits(np.array([1.0 + 2.0**-11, 65520.0, 2.0**-24]))
    np.testing.assert_array_equal(halves, [0x3C00, 0x7C00, 0x0001])


def test_integer_results_wrap_or_saturate() -> None:
    sums = np.array([2.0**31, -(2.0**31) - 1, 5.0])
    wrapped = formats.to_s32_bits(sums, saturate=False)
    clamped = formats.to_s32_bits(sums, saturate=True)
    np.testing.assert_array_equal(wrapped, [0x80000000, 0x7FFFFFFF, 5])
    np.testing.assert_array_equal(clamped, [0x7FFFFFFF, 0x80000000, 5])
