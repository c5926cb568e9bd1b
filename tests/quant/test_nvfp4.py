"""NVFP4 quantization: golden bits, a slow exact-rational quantizer, and the field's traps."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.formats import blocks
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4

NONFINITE_CLASS = 13


def scale_bytes(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8)


def block_of(*values: float) -> torch.Tensor:
    """One bfloat16 block that starts with `values`, zeros after them."""
    block = torch.zeros(16, dtype=torch.bfloat16)
    block[: len(values)] = torch.tensor(values).bfloat16()
    assert block[: len(values)].tolist() == list(values), "not representable in bfloat16"
    return block


def codes_of(block: torch.Tensor) -> tuple[list[int], int]:
    codes, scales = quantize_nvfp4(block)
    return torch.stack((codes & 15, codes >> 4), -1).flatten().tolist(), int(scale_bytes(scales))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_golden_vectors(fixtures: Path, dtype: torch.dtype) -> None:
    golden = load_file(fixtures / "nvfp4-golden.safetensors")
    inputs = golden["inputs"].to(dtype)
    same = (inputs.float() == golden["inputs"].float()) | golden["inputs"].isnan()
    rows = same.all(-1)  # a key out of float16's range or precision says nothing about it
    assert rows.sum() >= (64 if dtype != torch.float16 else 30)
    codes, scales = quantize_nvfp4(inputs[rows], nonfinite="saturate")
    assert torch.equal(codes, golden["codes"][rows])
    assert torch.equal(scale_bytes(scales), golden["scales"][rows])


def test_golden_vectors_one_block_at_a_time(
    fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = load_file(fixtures / "nvfp4-golden.safetensors")
    finite = golden["class"] != NONFINITE_CLASS
    monkeypatch.setattr(blocks, "values_per_pass", lambda device: 48)
    codes, scales = quantize_nvfp4(golden["inputs"][finite])
    assert torch.equal(codes, golden["codes"][finite])
    assert torch.equal(scale_bytes(scales), golden["scales"][finite])
    assert torch.equal(
        dequantize_nvfp4(codes, scales),
        torch.cat([dequantize_nvfp4(c, s) for c, s in zip(codes, scales, strict=True)]).view(
            -1, 128
        ),
    )


def exact_e4m3(value: Fraction) -> int:
    """E4M3 byte of a float32 quotient, nearest even, saturating."""
    if value >= 448:
        return 0x7E
    grid = [
        Fraction(m, 512) if e == 0 else Fraction(8 + m, 8) * Fraction(2) ** (e - 7)
        for e in range(16)
        for m in range(8)
    ][:0x7F]
    distances = [abs(value - g) for g in grid]
    least = min(distances)
    return min((b for b, d in enumerate(distances) if d == least), key=lambda b: b % 2)


def to_float32(value: Fraction) -> float:
    """`value` rounded to float32, through float64: that this is the nearest is checked."""
    single = torch.tensor(float(value), dtype=torch.float32).item()
    neighbours = [
        torch.nextafter(torch.tensor(single), torch.tensor(direction)).item()
        for direction in (float("-inf"), float("inf"))
    ]
    assert all(abs(Fraction(single) - value) <= abs(Fraction(n) - value) for n in neighbours)
    return single


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 0xFFFF), min_size=16, max_size=16),
    st.integers(-10, 10),
)
def test_matches_exact_rational_arithmetic(patterns: list[int], shift: int) -> None:
    bits = torch.tensor(patterns, dtype=torch.int32).to(torch.int16)
    block = bits.view(torch.bfloat16)
    # Bring any pattern into the range where codes and scales are interesting.
    block = torch.where(block.isfinite(), block, torch.ones_like(block)).float()
    block = (block.frexp().mantissa * 2.0**shift).bfloat16()
    codes, byte = codes_of(block)

    exact = [Fraction(v) for v in block.float().tolist()]
    amax = max(abs(v) for v in exact)
    assert byte == exact_e4m3(Fraction(to_float32(amax / 6)))
    scale = float(torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn).float())
    inverse = Fraction(to_float32(1 / Fraction(scale))) if scale else Fraction(0)
    levels = [Fraction(m) for m in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
    for code, value in zip(codes, exact, strict=True):
        scaled = abs(Fraction(to_float32(value * inverse)))
        distances = [abs(scaled - level) for level in levels]
        nearest = [c for c, d in enumerate(distances) if d == min(distances)]
        assert code & 7 == min(nearest, key=lambda c: c % 2)


def test_zeros_give_scale_zero() -> None:
    codes, scales = quantize_nvfp4(torch.zeros(130, 128, dtype=torch.bfloat16))
    assert not codes.any()
    assert not scale_bytes(scales).any()
    assert not dequantize_nvfp4(codes, scales).any()


@pytest.mark.parametrize(
    ("amax", "byte"),
    [(0.00390625, 0x00), (0.005859375, 0x00), (0.0059814453125, 0x01)],
    ids=["below-half", "tie-at-half", "above-half"],
)
def test_vanishing_scale(amax: float, byte: int) -> None:
    block = block_of(amax, -amax)
    codes, got = codes_of(block)
    assert got == byte
    if byte == 0:
        assert codes == [0, 8] + [0] * 14
        assert not dequantize_nvfp4(*quantize_nvfp4(block)).any()


def test_tiny_and_subnormal_values_vanish() -> None:
    tiny = torch.full((16,), 1e-35).bfloat16()
    tiny[1::2] = -tiny[1::2]
    subnormal = torch.arange(1, 17, dtype=torch.int16).view(torch.bfloat16)
    for block in (tiny, subnormal):
        codes, byte = codes_of(block)
        assert byte == 0
        assert all(code & 7 == 0 for code in codes)


def test_the_reciprocal_decides_ties() -> None:
    codes, byte = codes_of(block_of(11.25, 2.34375, 4.6875, 9.375))
    assert byte == 0x3F  # 1.875
    assert codes[:4] == [7, 3, 5, 7]


def test_values_are_scaled_by_the_stored_scale() -> None:
    codes, _ = codes_of(block_of(7.0, 0.283203125, 0.84375))
    assert codes[1:3] == [1, 2]


def test_signed_zeros_and_the_callers_tensor() -> None:
    block = block_of(6.0, -0.0, -0.10009765625)
    before = block.clone()
    codes, scales = quantize_nvfp4(block)
    assert torch.equal(block.view(torch.int16), before.view(torch.int16))
    assert (dequantize_nvfp4(codes, scales)[1:] == 0).all()


def test_dtypes_agree_byte_for_byte(generator: torch.Generator) -> None:
    keys = torch.randn(64, 128, generator=generator).bfloat16()
    keys = torch.where(keys.half().float() == keys.float(), keys, torch.zeros_like(keys))
    expected = quantize_nvfp4(keys)
    for dtype in (torch.float16, torch.float32):
        codes, scales = quantize_nvfp4(keys.to(dtype))
        assert torch.equal(codes, expected[0])
        assert torch.equal(scale_bytes(scales), scale_bytes(expected[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_are_refused(dtype: torch.dtype, bad: float) -> None:
    values = torch.zeros(4, 32, dtype=dtype)
    values[2, 17] = bad
    with pytest.raises(InputError, match="values must be finite"):
        quantize_nvfp4(values)


def test_nonfinite_values_saturate_on_request() -> None:
    nan, inf = float("nan"), float("inf")
    block = torch.tensor([nan, inf, -inf, 1.0] + [0.0] * 12)
    codes, scales = quantize_nvfp4(block, nonfinite="saturate")
    assert (codes[0] & 15, codes[0] >> 4) == (7, 7)
    assert (codes[1] & 15, codes[1] >> 4) == (15, 0)
    assert int(scale_bytes(scales)) == 0x7E
    codes, scales = quantize_nvfp4(torch.full((16,), nan), nonfinite="saturate")
    assert (codes == 0x77).all()
    assert int(scale_bytes(scales)) == 0


@pytest.mark.parametrize("amax", [2688.0, 2784.0, 1e6, 3e38])
def test_saturation(amax: float) -> None:
    codes, scales = quantize_nvfp4(torch.tensor([amax, -amax] + [0.0] * 14))
    assert int(scale_bytes(scales)) == 0x7E
    assert int(codes[0]) == 0xF7
    assert dequantize_nvfp4(codes, scales)[:2].tolist() == [2688.0, -2688.0]


def test_prefixes_do_not_depend_on_the_count(generator: torch.Generator) -> None:
    keys = torch.randn(4097, 128, generator=generator).bfloat16()
    codes, scales = quantize_nvfp4(keys)
    for count in (*range(1, 131), 384, 512, 1024):
        part_codes, part_scales = quantize_nvfp4(keys[:count])
        assert torch.equal(part_codes, codes[:count])
        assert torch.equal(scale_bytes(part_scales), scale_bytes(scales)[:count])
    nonzero = keys.view(-1, 8, 16).abs().amax(-1) > 0.006
    assert (scale_bytes(scales)[nonzero] != 0).all()


def test_strided_input(generator: torch.Generator) -> None:
    wide = torch.randn(8, 3, 256, generator=generator).bfloat16()
    view = wide[:, 1, :128]
    expected = quantize_nvfp4(view.contiguous())
    codes, scales = quantize_nvfp4(view)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scale_bytes(scales), scale_bytes(expected[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_code_times_every_scale_is_exact(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    byte = torch.arange(0x7F, dtype=torch.uint8)  # every finite non-negative scale
    codes = every.view(1, 32, 8).expand(0x7F, 32, 8).reshape(0x7F, 256)
    values = dequantize_nvfp4(codes, byte[:, None].expand(0x7F, 32).contiguous(), dtype).double()
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = torch.tensor([*positive, *(-t for t in positive)], dtype=torch.float64)
    exact = table[torch.stack((every & 15, every >> 4), -1).flatten().long()]
    scales = byte.view(torch.float8_e4m3fn).double()
    assert torch.equal(values, exact[None, :] * scales[:, None])


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(DtypeError, match=r"bfloat16, float16 or float32, got torch\.float64"):
        quantize_nvfp4(torch.zeros(16, dtype=torch.float64))
    with pytest.raises(InputError, match=r"multiple of 16, got \[2, 17\]"):
        quantize_nvfp4(torch.zeros(2, 17))
    with pytest.raises(InputError, match=r"nonfinite must be one of .* got 'ignore'"):
        quantize_nvfp4(torch.zeros(16), nonfinite="ignore")
    codes, scales = quantize_nvfp4(torch.zeros(2, 32))
    with pytest.raises(InputError, match=r"scales must be \[2, 2\] for codes \[2, 16\]"):
        dequantize_nvfp4(codes, scales[:, :1])
    with pytest.raises(DtypeError, match="codes must be uint8"):
        dequantize_nvfp4(codes.int(), scales)
    with pytest.raises(DtypeError, match="scales must be float8_e4m3fn or uint8"):
        dequantize_nvfp4(codes, scales.float())


def test_empty_input() -> None:
    codes, scales = quantize_nvfp4(torch.zeros(0, 128))
    assert codes.shape == (0, 64)
    assert scales.shape == (0, 8)
    assert dequantize_nvfp4(codes, scales).shape == (0, 128)
