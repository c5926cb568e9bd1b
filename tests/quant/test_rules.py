"""The rules `search` and `covariance`: against slow references, and what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdsa_quant.errors import InputError
from sdsa_quant.formats import nvfp4, scale_search
from sdsa_quant.formats.nvfp4 import COVARIANCE, SEARCH, dequantize_nvfp4, quantize_nvfp4
from sdsa_quant.formats.rule_weights import DAMPING, LIMB_MAX, RuleWeights, rule_weights
from support.rule_cases import adversarial_keys, correlated, some_weights

SCALES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
F = np.float32


def nearest(values: np.ndarray) -> np.ndarray:
    """The nearest E2M1 values, ties to the even code, by looking at all eight."""
    magnitudes = np.minimum(np.abs(values), F(6))
    distance = np.abs(magnitudes[..., None].astype(np.float64) - GRID)
    is_nearest = distance == distance.min(-1, keepdims=True)
    even_first = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    index = even_first[is_nearest[..., even_first].argmax(-1)]
    return np.copysign(GRID[index], values) * (GRID[index] > 0)


def tree(values: np.ndarray) -> np.float32:
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return F(values[0])


def inverse(scale: np.float32) -> np.float32:
    return F(0) if scale == 0 else F(1) / scale


def searched(block: np.ndarray, base: int, weights: np.ndarray) -> int:
    """The scale byte of one block by the definition: all bytes in the range, largest first."""
    amax = np.abs(block).max()
    low = [byte for byte in range(127) if SCALES[byte] >= min(amax / F(8), F(448))]
    high = [byte for byte in range(127) if SCALES[byte] <= amax / F(3.5)]
    best, least = base, F(np.inf)
    for byte in range(max(high[-1], base), min(low[0], base) - 1, -1):
        scale = SCALES[byte]
        error = nearest(np.abs(block) * inverse(scale)) * scale - np.abs(block)
        loss = tree(error * error * weights)
        if loss < least:
            best, least = byte, loss
    return best


def limbs(errors: np.ndarray, unit: np.float32) -> np.ndarray:
    """Errors in units to the nearest of 2^-10, as far as 1023."""
    scaled = errors / unit
    upper = np.rint(np.clip(scaled, -1023, 1023))
    lower = np.rint(np.clip((scaled - upper) * F(1024), -1023, 1023))
    return upper.astype(np.float64) + lower.astype(np.float64) / 1024


def one_by_one(
    x: np.ndarray, base: np.ndarray, weights: RuleWeights
) -> tuple[np.ndarray, list[int], float]:
    """Decoded values, scale bytes and loss of one key by the rule covariance, before its guard."""
    factor, pivots = weights.factor.double().numpy(), weights.pivots.numpy()
    unit = F(2.0 ** (np.floor(np.log2(np.abs(x).max())) - 10))
    q, errors, scales, total = np.zeros(128, dtype=F), np.zeros(128), [], F(0)
    for b in range(8):
        block = slice(16 * b, 16 * b + 16)
        if base[b] == 0:
            errors[block] = limbs(-x[block], unit)
        sums = (factor[block] @ errors).astype(F)
        targets = x[block] - sums * (unit * F(weights.step))
        best: tuple[int, int, np.ndarray] | None = None
        for index, byte in enumerate(range(int(base[b]) - 2, int(base[b]) + 6)):
            byte = min(max(byte, 1), 126) if base[b] else 0
            scale = SCALES[byte] if byte else F(2.0**20)
            z = targets * inverse(scale)
            own = np.rint(x[block] * inverse(scale) * F(512)) / F(512)
            c, loss = np.zeros(16, dtype=F), F(0)
            for j in range(16):
                c[j] = nearest(z[j : j + 1])[0]
                distance = c[j] - z[j]
                loss += distance * distance * pivots[16 * b + j]
                column = factor[block, 16 * b + j].astype(F) * F(weights.step)
                z = z - column * (c[j] - own[j])
            loss = (loss + F(0 if byte == 0 else 2.0**-8)) * (scale * scale)
            rank = int(loss.view(np.int32)) & -8 | index
            if best is None or rank < best[0]:
                best = (rank, byte, c * scale)
        assert best is not None
        total += np.int32(best[0] & -8).view(F)
        q[block] = best[2]
        scales.append(best[1])
        errors[block] = limbs(q[block] - x[block], unit)
    return q, scales, float(total)


def losses(x: torch.Tensor, weights: RuleWeights, rule: str) -> torch.Tensor:
    """float64 ``e' W e`` of each key."""
    given = weights if rule == COVARIANCE else None
    stored = quantize_nvfp4(x, rule=rule, weights=given)
    errors = dequantize_nvfp4(*stored).double() - x.double()
    return ((errors @ weights.matrix) * errors).sum(-1)


def test_search_is_its_definition(generator: torch.Generator) -> None:
    keys = torch.cat([correlated(6, generator), adversarial_keys(18, generator)])
    base = quantize_nvfp4(keys)[1].view(torch.uint8).view(-1)
    scales = quantize_nvfp4(keys, rule=SEARCH)[1].view(torch.uint8).view(-1)
    ones = np.ones(16, dtype=F)
    for block, plain, found in zip(keys.view(-1, 16), base, scales, strict=True):
        assert int(found) == searched(block.numpy(), int(plain), ones)


def test_covariance_is_its_definition(generator: torch.Generator) -> None:
    weights = some_weights(generator)
    keys = torch.cat([correlated(4, generator), adversarial_keys(12, generator)])
    base = quantize_nvfp4(keys)[1].view(torch.uint8)
    codes, scales = quantize_nvfp4(keys, rule=COVARIANCE, weights=weights)
    plain = losses(keys, weights, "amax/6")
    kept = 0
    for i, key in enumerate(keys.numpy()):
        if np.abs(key).max() > 3584:
            assert torch.equal(scales[i].view(torch.uint8), base[i])
            continue
        decoded, bytes_, total = one_by_one(key, base[i].numpy(), weights)
        error = decoded.astype(np.float64) - key
        assert error @ weights.matrix.numpy() @ error < total * (1 + 2**-5)
        if total * (1 + 2**-5) < 0.999 * plain[i]:
            kept += 1
            assert scales[i].view(torch.uint8).tolist() == bytes_
            assert dequantize_nvfp4(codes[i], scales[i]).numpy().tolist() == decoded.tolist()
        elif total * (1 + 2**-5) > 1.001 * plain[i]:
            assert torch.equal(scales[i].view(torch.uint8), base[i])
    assert kept >= 8


def test_every_maximum_has_at_most_as_many_scales_as_are_tried() -> None:
    amax = torch.arange(0, 0x7F800000, 1 << 12, dtype=torch.int32).view(torch.float32)
    base = nvfp4.e4m3_scales(amax).view(torch.uint8).int()
    first, last = scale_search.scales_to_try(amax, base)
    assert int((last - first).max()) + 1 == scale_search.MAX_SCALES
    assert torch.equal(last == 0, base == 0), "a scale of 0 has no other to try"
    assert bool((first[base > 0] > 0).all())


def test_a_block_with_nan_or_infinity_keeps_its_scale_and_disturbs_no_other(
    generator: torch.Generator,
) -> None:
    blocks = correlated(8, generator).view(64, 16)
    expected = quantize_nvfp4(blocks, rule=SEARCH)[1].view(torch.uint8)
    blocks[3, 4], blocks[9, 0], blocks[17] = torch.nan, torch.inf, torch.nan
    broken = [3, 9, 17]
    found = quantize_nvfp4(blocks, rule=SEARCH, nonfinite="saturate")[1].view(torch.uint8)
    expected[broken] = quantize_nvfp4(blocks[broken], nonfinite="saturate")[1].view(torch.uint8)
    assert torch.equal(found, expected)


def test_covariance_beats_search_beats_amax_over_6(generator: torch.Generator) -> None:
    weights, keys = some_weights(generator), correlated(512, generator)
    plain, search, covariance = (
        losses(keys, weights, rule).mean() for rule in ("amax/6", SEARCH, COVARIANCE)
    )
    assert search < 0.9 * plain
    assert covariance < 0.5 * search


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_never_worse_than_amax_over_6(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = some_weights(generator)
    keys = torch.cat([correlated(32, generator), adversarial_keys(96, generator)])
    limits = losses(keys, weights, "amax/6") * 1.00001
    assert bool((losses(keys, weights, COVARIANCE) <= limits).all())
    plain, search = (dequantize_nvfp4(*quantize_nvfp4(keys, rule=r)) for r in ("amax/6", SEARCH))
    squares = [(each - keys).double().square().view(-1, 16).sum(-1) for each in (search, plain)]
    assert bool((squares[0] <= squares[1] * 1.00001).all())


@pytest.mark.parametrize("rule", [SEARCH, COVARIANCE])
def test_exact_zero_saturated_and_not_finite(generator: torch.Generator, rule: str) -> None:
    weights = some_weights(generator) if rule == COVARIANCE else None
    codes = torch.randint(0, 256, (64, 64), dtype=torch.uint8, generator=generator)
    codes[:, ::8] = 0x77  # a 6 in every block, so that amax/6 has its scale
    scales = torch.randint(1, 127, (64, 8), dtype=torch.uint8, generator=generator)
    exact = dequantize_nvfp4(codes, scales)
    stored = quantize_nvfp4(exact, rule=rule, weights=weights)
    assert torch.equal(dequantize_nvfp4(*stored), exact)

    zero = torch.zeros(3, 128)
    zero[1] = -0.0
    zero[2, 5] = 2.0**-12
    for made, plain in zip(
        quantize_nvfp4(zero, rule=rule, weights=weights), quantize_nvfp4(zero), strict=True
    ):
        assert torch.equal(made.view(torch.uint8), plain.view(torch.uint8))

    hard = torch.randn(4, 128, generator=generator)
    hard[0], hard[1, 3], hard[2, 7] = 1e30, torch.inf, torch.nan
    hard[3] = 3e38
    stored = quantize_nvfp4(hard, rule=rule, weights=weights, nonfinite="saturate")
    assert bool((stored[1].view(torch.uint8) <= 0x7E).all()), "a scale is never NaN"
    expected = quantize_nvfp4(hard, nonfinite="saturate")
    for made, plain in zip(stored, expected, strict=True):
        assert torch.equal(made.view(torch.uint8)[[0, 3]], plain.view(torch.uint8)[[0, 3]])
    with pytest.raises(InputError, match="must be finite"):
        quantize_nvfp4(hard, rule=rule, weights=weights)


@pytest.mark.parametrize("rule", [SEARCH, COVARIANCE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_same_bits_however_keys_are_divided(
    generator: torch.Generator, rule: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = some_weights(generator) if rule == COVARIANCE else None
    keys = correlated(70, generator).to(dtype)
    whole = quantize_nvfp4(keys, rule=rule, weights=weights)
    wide = quantize_nvfp4(keys.float(), rule=rule, weights=weights)
    monkeypatch.setattr(nvfp4, "_BLOCKS_OF_A_SEARCH", 48)
    monkeypatch.setattr(nvfp4, "_KEYS_OF_A_DESCENT", 9)
    parts = quantize_nvfp4(keys.view(7, 10, 128), rule=rule, weights=weights)
    for one, two, three in zip(whole, wide, parts, strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
        assert torch.equal(one.view(torch.uint8), three.view(torch.uint8).flatten(0, 1))


def test_weights_are_damped_and_of_mean_1(generator: torch.Generator) -> None:
    vectors = correlated(64, generator).double()
    covariance = (vectors.T @ vectors).add_(0)
    covariance = (covariance + covariance.T) / 2
    weights = rule_weights(covariance)
    damped = covariance / covariance.diagonal().mean() + DAMPING * torch.eye(128)
    damped /= 1 + DAMPING
    assert torch.allclose(weights.matrix, damped, rtol=0, atol=0.05)
    eigenvalues = torch.linalg.eigvalsh(weights.matrix)
    assert float(eigenvalues[0]) == pytest.approx(DAMPING / (1 + DAMPING), rel=0.03)
    assert torch.equal(rule_weights(torch.zeros(128, 128)).matrix, torch.eye(128).double())
    assert (
        rule_weights(covariance).digest
        == weights.digest
        != rule_weights(2 * covariance.diag().diag()).digest
    )


@pytest.mark.parametrize("rank", [1, 3, 24, 128])
def test_sums_of_errors_are_integers_that_float32_has(
    generator: torch.Generator, rank: int
) -> None:
    vectors = torch.randn(400, rank, generator=generator) @ torch.randn(
        rank, 128, generator=generator
    ).mul_(torch.exp2(torch.randint(-4, 5, (128,), generator=generator)))
    covariance = (vectors.T @ vectors).double()
    weights = rule_weights((covariance + covariance.T) / 2)
    factor = weights.factor.double()
    assert torch.equal(factor, factor.tril(-1).round())
    assert factor.abs().max() <= 1024, "float16 has every integer up to 2048"
    assert factor.abs().sum(1).max() * LIMB_MAX < 2**24
    assert factor.abs().max() * 2**14 <= 2**24, "products within a block"
    exponent = math.log2(weights.step)
    assert exponent == int(exponent)
    finer = weights.matrix - weights.matrix.T
    assert finer.abs().max() < 1e-12


def test_wrong_arguments(generator: torch.Generator) -> None:
    weights = some_weights(generator)
    with pytest.raises(InputError, match="weights must be given for the rule covariance"):
        quantize_nvfp4(torch.zeros(1, 128), rule=COVARIANCE)
    with pytest.raises(InputError, match="weights must be given for the rule covariance"):
        quantize_nvfp4(torch.zeros(1, 128), weights=weights)
    with pytest.raises(InputError, match=r"values must be \[..., 128\] for the rule covariance"):
        quantize_nvfp4(torch.zeros(1, 64), rule=COVARIANCE, weights=weights)
    with pytest.raises(InputError, match=r"covariance must be \[128, 128\]"):
        rule_weights(torch.zeros(64, 64))
    with pytest.raises(InputError, match="covariance must be finite"):
        rule_weights(torch.full((128, 128), torch.nan))
    with pytest.raises(InputError, match="covariance must be symmetric"):
        rule_weights(-torch.eye(128))


def test_search_rounds_right_just_below_a_power_of_two() -> None:
    """Quotients within a few float32 steps of 1, 2 and 4: the errors are those of float64."""
    generator = torch.Generator().manual_seed(9)
    edges = torch.tensor([0.25, 0.75, 1.0, 1.25, 2.0, 2.5, 4.0, 5.0])
    steps = torch.randint(-3, 4, (4000, 16), generator=generator)
    near = edges[torch.randint(0, 8, (4000, 16), generator=generator)]
    keys = (near.view(torch.int32) + steps).to(torch.int32).view(torch.float32)
    keys[:, 0] = 6.0
    keys *= torch.tensor(SCALES[40:80])[torch.randint(0, 40, (4000, 1), generator=generator)]
    blocks = torch.zeros(4000, 128)
    blocks[:, :16] = keys
    codes, scales = quantize_nvfp4(blocks, rule="search")
    error = (dequantize_nvfp4(codes, scales)[:, :16].double() - keys.double()).square().sum(1)
    bytes_ = torch.arange(1, 127, dtype=torch.uint8)
    least = torch.full((4000,), torch.inf, dtype=torch.float64)
    amax = keys.abs().amax(1)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    for scale in bytes_.view(torch.float8_e4m3fn).double():
        levels = torch.cat([-grid, grid]) * scale
        best = (keys.double().unsqueeze(2) - levels).abs().amin(2).square().sum(1)
        within = (scale >= amax / 8) & (scale <= amax / 3.5)
        least = torch.where(within & (best < least), best, least)
    assert (error <= least * (1 + 1e-5) + 1e-12).all()
