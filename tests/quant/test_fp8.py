"""FP8 keys against ml_dtypes' conversions, by hand, and at the edges; every E4M3 byte decoded."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.formats import blocks, e4m3
from sdsa_quant.formats.fp8 import dequantize_fp8, quantize_fp8


def independent_fp8(values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 bytes and FP32 scales of ``[n, 128]`` by numpy and ml_dtypes."""
    vectors = values.float().numpy()
    scales = np.abs(vectors).max(axis=1) / np.float32(448)
    quotients = np.divide(
        vectors, scales[:, None], out=np.zeros_like(vectors), where=scales[:, None] != 0
    )
    codes = np.clip(quotients, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8), scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_agrees_with_independent_conversions(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    values = torch.randn(500, 128, generator=generator) * torch.logspace(-4, 3, 500)[:, None]
    values[::7, ::5] *= 1e-3  # into E4M3's subnormals
    values = values.to(dtype)
    codes, scales = quantize_fp8(values)
    wanted_codes, wanted_scales = independent_fp8(values)
    assert np.array_equal(codes.view(torch.uint8).numpy(), wanted_codes)
    assert np.array_equal(scales.numpy(), wanted_scales)
    decoded = wanted_codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(dequantize_fp8(codes, scales).numpy(), decoded * wanted_scales[:, None])


def test_by_hand() -> None:
    # amax 896: scale 2. 896 / 2 = 448; 50 / 2 = 25 ties between 24 and 26: even mantissa, 24;
    # -54 / 2 = -27 ties between -26 and -28: -28.
    values = torch.zeros(128)
    values[:4] = torch.tensor([896.0, 50.0, -54.0, 2.0])
    codes, scales = quantize_fp8(values)
    assert scales.item() == 2.0
    assert codes[:4].float().tolist() == [448.0, 24.0, -28.0, 1.0]
    assert dequantize_fp8(codes, scales)[:4].tolist() == [896.0, 48.0, -56.0, 2.0]


def test_keys_of_zeros_and_of_vanishing_scales() -> None:
    values = torch.zeros(3, 128)
    values[1, 0] = 1e-45  # the smallest float32: its scale underflows to 0
    values[2, 0] = 1e-43  # a subnormal scale, so coarse that the quotient exceeds 448
    codes, scales = quantize_fp8(values)
    assert scales[:2].tolist() == [0.0, 0.0]
    assert not codes[:2].view(torch.uint8).any()
    assert codes[2].float().abs().max() <= 448
    assert dequantize_fp8(codes, scales).isfinite().all()


def test_one_key_at_a_time(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    values = torch.randn(2, 5, 128, generator=generator)
    codes, scales = quantize_fp8(values)
    assert scales.shape == (2, 5)
    monkeypatch.setattr(blocks, "values_per_pass", lambda device: 128)
    parts = quantize_fp8(values)
    assert torch.equal(parts[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(parts[1], scales)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
def test_refuses_what_is_not_finite(bad: float) -> None:
    values = torch.ones(2, 128)
    values[1, 127] = bad
    with pytest.raises(InputError, match="values must be finite"):
        quantize_fp8(values)


def test_refuses_wrong_arguments() -> None:
    with pytest.raises(DtypeError, match=r"got torch\.float64"):
        quantize_fp8(torch.zeros(2, 128, dtype=torch.float64))
    codes, scales = quantize_fp8(torch.zeros(2, 128))
    with pytest.raises(DtypeError, match="codes must be float8_e4m3fn"):
        dequantize_fp8(codes.view(torch.uint8), scales)
    with pytest.raises(DtypeError, match="scales must be float32"):
        dequantize_fp8(codes, scales.double())
    with pytest.raises(InputError, match=r"scales must be \[2\]"):
        dequantize_fp8(codes, scales[:1])


def test_every_e4m3_byte_decodes() -> None:
    codes = torch.arange(256).to(torch.uint8)
    wanted = codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(e4m3.decode(codes).numpy(), wanted, equal_nan=True)
    scaled = e4m3.decode(codes.view(torch.float8_e4m3fn), unit=2.0**14)
    assert np.array_equal(scaled.numpy(), wanted * np.float32(2**14), equal_nan=True)
