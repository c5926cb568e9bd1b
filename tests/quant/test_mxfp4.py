"""MXFP4 against ml_dtypes' conversions, by hand, and at the edges of its range."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.formats import blocks
from sdsa_quant.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4


def independent_mxfp4(values: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (one a byte), E8M0 bytes and decoded values of ``[n, 32]``, by ml_dtypes and math."""
    blocks = values.float().numpy()
    codes, scales, decoded = [], [], []
    for block in blocks:
        amax = float(np.abs(block).max())
        exponent = math.frexp(amax)[1] - 1 - 2 if amax else -127
        scale = np.float64(2.0 ** max(exponent, -127))
        quotients = np.clip(block.astype(np.float64) / scale, -6, 6)
        elements = quotients.astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
        codes.append(elements.view(np.uint8))
        scales.append(scale.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))
        decoded.append(elements.astype(np.float64) * scale)
    return np.stack(codes), np.array(scales), np.stack(decoded)


def unpacked(codes: torch.Tensor) -> np.ndarray:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).numpy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_agrees_with_independent_conversions(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    values = torch.randn(2000, 32, generator=generator)
    values *= torch.exp2(torch.randint(-12, 12, (2000, 1), generator=generator).float())
    values = values.to(dtype)
    codes, scales = quantize_mxfp4(values)
    wanted_codes, wanted_scales, wanted_values = independent_mxfp4(values)
    assert np.array_equal(unpacked(codes), wanted_codes)
    assert np.array_equal(scales.flatten().numpy(), wanted_scales)
    assert np.array_equal(dequantize_mxfp4(codes, scales).numpy(), wanted_values)


def test_the_whole_range_of_bfloat16() -> None:
    # Every positive finite BF16 value as a block's maximum, subnormals and 0 included.
    values = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    blocks = torch.zeros(0x7F80, 32, dtype=torch.bfloat16)
    blocks[:, 5], blocks[:, 6] = values, -values
    codes, scales = quantize_mxfp4(blocks)
    wanted_codes, wanted_scales, wanted_values = independent_mxfp4(blocks)
    assert np.array_equal(unpacked(codes), wanted_codes)
    assert np.array_equal(scales.flatten().numpy(), wanted_scales)
    assert np.array_equal(dequantize_mxfp4(codes, scales).numpy(), wanted_values)


def test_by_hand() -> None:
    # amax 7: exponent 2, scale 2^0 = 1. 7 saturates to 6; 2.5 ties to 2, 5 to 4, -0.25 to -0.
    block = torch.zeros(32)
    block[:5] = torch.tensor([7.0, 2.5, 5.0, -0.25, 1.5])
    codes, scales = quantize_mxfp4(block)
    assert scales.tolist() == [127]
    assert unpacked(codes)[:5].tolist() == [7, 4, 6, 8, 3]
    assert dequantize_mxfp4(codes, scales)[:5].tolist() == [6.0, 2.0, 4.0, 0.0, 1.5]


def test_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    values = torch.randn(7, 128, generator=generator)
    whole = quantize_mxfp4(values)
    monkeypatch.setattr(blocks, "values_per_pass", lambda device: 96)
    parts = quantize_mxfp4(values)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_an_empty_tensor_is_empty() -> None:
    codes, scales = quantize_mxfp4(torch.zeros(0, 128))
    assert (codes.shape, scales.shape) == ((0, 64), (0, 4))
    assert dequantize_mxfp4(codes, scales).shape == (0, 128)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
def test_refuses_what_is_not_finite(bad: float) -> None:
    values = torch.ones(2, 32)
    values[1, 31] = bad
    with pytest.raises(InputError, match="values must be finite"):
        quantize_mxfp4(values)


def test_refuses_wrong_arguments() -> None:
    with pytest.raises(InputError, match=r"multiple of 32, got \[2, 16\]"):
        quantize_mxfp4(torch.zeros(2, 16))
    with pytest.raises(DtypeError, match=r"bfloat16, float16 or float32, got torch\.float64"):
        quantize_mxfp4(torch.zeros(2, 32, dtype=torch.float64))
    codes = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(InputError, match=r"scales must be \[2, 1\]"):
        dequantize_mxfp4(codes, torch.zeros(2, 2, dtype=torch.uint8))
    with pytest.raises(DtypeError, match="scales must be uint8"):
        dequantize_mxfp4(codes, torch.zeros(2, 1))
