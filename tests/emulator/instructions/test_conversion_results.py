"""`cvt` against ml_dtypes, numpy and the rules of the PTX ISA."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from emulator.programs.lane_programs import run_lanes

SMALL = {
    "e4m3x2": ml_dtypes.float8_e4m3fn,
    "e5m2x2": ml_dtypes.float8_e5m2,
    "e2m3x2": ml_dtypes.float6_e2m3fn,
    "e3m2x2": ml_dtypes.float6_e3m2fn,
}
LARGEST = {"e4m3x2": 448.0, "e5m2x2": 57344.0, "e2m3x2": 7.5, "e3m2x2": 28.0, "e2m1x2": 6.0}


def floats(count: int, largest: float) -> np.ndarray:
    """FP32 numbers around and beyond a format's range, ties among them."""
    generator = np.random.default_rng(3)
    scales = np.exp2(generator.integers(-12, 3, count))
    values = generator.standard_normal(count) * largest * scales
    values[::4] = np.round(values[::4] * 8) / 8
    values[:6] = [0.0, -0.0, largest, -largest * 1.07, largest * 3, 0.25]
    return values.astype(np.float32)


@pytest.mark.parametrize("name", SMALL)
def test_to_short_floats(name: str) -> None:
    values = floats(128, LARGEST[name])
    high, low = values[:64].view(np.uint32), values[64:].view(np.uint32)
    body = f".reg .b16 %h; cvt.rn.satfinite.{name}.f32 %h, %a0, %a1; cvt.u32.u16 %d0, %h;"
    (got,) = run_lanes(body, [high, low], [np.uint32], block=64)
    clipped = np.clip(values, -LARGEST[name], LARGEST[name])
    codes = clipped.astype(SMALL[name]).view(np.uint8).astype(np.uint32)
    assert got.tolist() == (codes[:64] << 8 | codes[64:]).tolist()


def test_to_e2m1_and_back() -> None:
    values = floats(128, 6.0)
    high, low = values[:64].view(np.uint32), values[64:].view(np.uint32)
    body = """
        .reg .b8 %b; .reg .b16 %h;
        cvt.rn.satfinite.e2m1x2.f32 %b, %a0, %a1;
        mov.b16 %h, {%b, 0};
        cvt.u32.u16 %d0, %h;
        cvt.rn.f16x2.e2m1x2 %d1, %b;
    """
    codes, halves = run_lanes(body, [high, low], [np.uint32, np.uint32], block=64)
    wanted = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    bits = wanted.view(np.uint8).astype(np.uint32)
    assert codes.tolist() == (bits[:64] << 4 | bits[64:]).tolist()
    pairs = halves.view(np.float16).reshape(64, 2)
    assert np.array_equal(pairs[:, 1], wanted[:64].astype(np.float16))
    assert np.array_equal(pairs[:, 0], wanted[64:].astype(np.float16))


@pytest.mark.parametrize("name", SMALL)
def test_from_every_code_of_a_short_float(name: str) -> None:
    count = 256 if name[1:3] in ("4m", "5m") else 64
    codes = np.arange(count, dtype=np.uint8)
    pairs = codes.view(np.uint16)
    body = f"cvt.rn.f16x2.{name} %d0, %a0;"
    (got,) = run_lanes(body, [pairs], [np.uint32], block=len(pairs))
    expected = codes.view(SMALL[name]).astype(np.float16)
    values = got.view(np.float16)
    assert np.array_equal(np.isnan(values), np.isnan(expected))
    assert np.array_equal(values[~np.isnan(values)], expected[~np.isnan(expected)])


@pytest.mark.parametrize(
    ("mode", "function"), [("rz", math.floor), ("rp", math.ceil)], ids=["rz", "rp"]
)
def test_to_powers_of_two(mode: str, function: object) -> None:
    values = np.exp2(np.linspace(-120.3, 120.3, 64)).astype(np.float32)
    values[:3] = [1.0, 4.0, np.nan]
    zeros = np.zeros(64, np.uint32)
    body = f"""
        .reg .b16 %h;
        cvt.{mode}.satfinite.ue8m0x2.f32 %h, %a1, %a0; cvt.u32.u16 %d0, %h;
        cvt.rn.bf16x2.ue8m0x2 %d1, %h;
    """
    codes, back = run_lanes(body, [values.view(np.uint32), zeros], [np.uint32] * 2, block=64)
    for value, code, pair in zip(values.tolist(), codes.tolist(), back.tolist(), strict=True):
        if value != value:
            assert code & 0xFF == 0xFF
            continue
        assert callable(function)
        assert code & 0xFF == function(math.log2(value)) + 127
        assert np.uint32(pair << 16 & 0xFFFFFFFF).view(np.float32) == 2.0 ** ((code & 0xFF) - 127)


@pytest.mark.parametrize("name", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_pairs_of_halves(name: str, relu: str) -> None:
    values = floats(128, 1000.0)
    high, low = values[:64].view(np.uint32), values[64:].view(np.uint32)
    (got,) = run_lanes(
        f"cvt.rn{relu}.{name}.f32 %d0, %a0, %a1;", [high, low], [np.uint32], block=64
    )
    dtype = np.float16 if name == "f16x2" else ml_dtypes.bfloat16
    kept = np.where(values > 0, values, 0) if relu else values
    halves = kept.astype(dtype).view(np.uint16).astype(np.uint32)
    assert got.tolist() == (halves[:64] << 16 | halves[64:]).tolist()


ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", ["s32", "u32", "s16", "u8", "s64", "u64"])
def test_to_integers_clamps(kind: str, rounding: str) -> None:
    values = np.array(
        [0.5, 1.5, -0.5, -2.5, 1e20, -1e20, np.inf, -np.inf, np.nan, 255.5, 3e9, -3e9] + [7.7] * 20,
        np.float32,
    )
    bits = int(kind[1:])
    wide = "u64" if bits == 64 else "s32" if kind[0] == "s" else "u32"
    result = {64: np.uint64}.get(bits, np.uint32)
    body = f"cvt.{rounding}.{kind}.f32 %d0, %a0;"
    (got,) = run_lanes(body, [values.view(np.uint32)], [result])
    lowest, highest = (
        (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    )
    register = 64 if bits == 64 else 32
    for value, found in zip(values.tolist(), got.tolist(), strict=True):
        if value != value:
            expected = 1 << 63 if bits == 64 else 0
        elif math.isinf(value):
            expected = highest if value > 0 else lowest
        else:
            expected = min(max(int(ROUNDINGS[rounding](value)), lowest), highest)
        # A destination wider than the type is sign- or zero-extended.
        assert found == expected & ((1 << register) - 1), (value, wide)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["s64", "u64", "s32", "u32"])
def test_from_integers_is_rounded_once(kind: str, mode: str) -> None:
    generator = np.random.default_rng(9)
    bits = int(kind[1:])
    values = generator.integers(0, (1 << bits) - 1, 64, np.uint64, endpoint=True)
    values[:4] = [(1 << 53) + 1, (1 << bits - 1) - 1, (1 << 24) + 1, (1 << 25) + 2]
    values &= np.uint64((1 << bits) - 1)
    stored = values.astype(f"u{bits // 8}")
    (got,) = run_lanes(f"cvt.{mode}.f32.{kind} %d0, %a0;", [stored], [np.uint32], block=64)
    for value, single in zip(
        stored.view(f"{kind[0].replace('s', 'i')}{bits // 8}").tolist(),
        got.view(np.float32).tolist(),
        strict=True,
    ):
        nearest = np.float32(value)
        around = [
            nearest,
            np.nextafter(nearest, np.float32(-np.inf)),
            np.nextafter(nearest, np.float32(np.inf)),
        ]
        below = max(int(x) for x in around if int(x) <= value)
        above = min(int(x) for x in around if int(x) >= value)
        expected = {
            "rn": int(nearest),
            "rm": below,
            "rp": above,
            "rz": below if value >= 0 else above,
        }[mode]
        assert int(single) == expected, value


def test_between_integers_truncates_saturates_and_extends() -> None:
    values = np.array([0x80, 0x17F, 0xFFFFFFFF, 0x7FFFFFFF] * 8, np.uint32)
    body = """
        cvt.s32.s8 %d0, %a0;
        cvt.u32.u8 %d1, %a0;
        cvt.sat.s8.s32 %d2, %a0;
        cvt.sat.u16.s32 %d3, %a0;
        cvt.s64.s32 %d4, %a0;
    """
    got = run_lanes(body, [values], [np.uint32] * 4 + [np.uint64])
    first = [column[:4].tolist() for column in got]
    assert first[0] == [0xFFFFFF80, 0x7F, 0xFFFFFFFF, 0xFFFFFFFF]
    assert first[1] == [0x80, 0x7F, 0xFF, 0xFF]
    assert first[2] == [0x7F, 0x7F, 0xFFFFFFFF, 0x7F]
    assert first[3] == [0x80, 0x17F, 0, 0xFFFF]
    assert first[4] == [0x80, 0x17F, (1 << 64) - 1, 0x7FFFFFFF]


def test_pack_of_saturated_integers() -> None:
    a = np.array([300, -300, 5, -6] * 8, np.int32).view(np.uint32)
    b = np.array([-1, 127, 128, 3] * 8, np.int32).view(np.uint32)
    c = np.full(32, 0xABCD1234, np.uint32)
    body = "cvt.pack.sat.s8.s32.b32 %d0, %a0, %a1, %a2; cvt.pack.sat.u16.s32 %d1, %a0, %a1;"
    octets, halves = run_lanes(body, [a, b, c], [np.uint32] * 2)
    assert octets[:4].tolist() == [0x12347FFF, 0x1234807F, 0x1234057F, 0x1234FA03]
    assert halves[:4].tolist() == [300 << 16, 127, 5 << 16 | 128, 3]
