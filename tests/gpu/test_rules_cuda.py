"""The rules other than amax/6 on CUDA tensors: the bits of the CPU, and captured."""

from __future__ import annotations

import pytest
import torch

from sdsa_kernels import quantize_write_nvfp4
from sdsa_kernels.measure.timing import capture
from sdsa_quant.calibration.layer import LayerWeights
from sdsa_quant.errors import InputError
from sdsa_quant.formats.nvfp4 import COVARIANCE, RULES, SEARCH, quantize_nvfp4
from sdsa_quant.paging import page_views
from support.rule_cases import adversarial_keys, correlated, not_finite_keys, some_weights

pytestmark = pytest.mark.gpu


def pages_for(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    records = torch.full((-(-count // 64), 4608), 0xA5, dtype=torch.uint8, device="cuda")
    key_cache, key_scales = page_views(records, "nvfp4")
    assert key_scales is not None
    return key_cache, key_scales.view(torch.uint8)


@pytest.mark.parametrize("rule", [SEARCH, COVARIANCE])
def test_quantize_nvfp4(generator: torch.Generator, rule: str) -> None:
    weights = some_weights(generator) if rule == COVARIANCE else None
    keys = torch.cat([correlated(10_000, generator), adversarial_keys(10_000, generator)])
    here = quantize_nvfp4(keys, rule=rule, weights=weights)
    there = quantize_nvfp4(keys.cuda(), rule=rule, weights=weights)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8).cpu())


@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_written_bytes(generator: torch.Generator, rule: str, dtype: torch.dtype) -> None:
    calibration = None
    if rule == COVARIANCE:
        calibration = LayerWeights(some_weights(generator), some_weights(generator))
    some = correlated(20_011, generator), adversarial_keys(20_000, generator)
    keys = torch.cat([*some, not_finite_keys(generator)]).to(dtype)
    slots = torch.randperm(keys.shape[0] + 100, generator=generator)[: keys.shape[0]]
    slots[::97] = -1
    query = correlated(53, generator).to(dtype)
    rows = torch.randperm(60, generator=generator)[:53]
    rows[7] = -1
    cache, scales = pages_for(keys.shape[0] + 100)
    packed = torch.full((60, 64), 0xA5, dtype=torch.uint8, device="cuda")
    query_scales = torch.full((60, 8), 0xA5, dtype=torch.uint8, device="cuda")
    quantize_write_nvfp4(
        keys.cuda(),
        slots.cuda(),
        query.cuda(),
        rows.cuda(),
        key_cache=cache,
        key_scales=scales,
        packed_query=packed,
        query_scales=query_scales,
        rule=rule,
        calibration=None if calibration is None else calibration.to(cache.device),
    )
    halves = (
        (keys, slots, cache.reshape(-1, 64), scales.reshape(-1, 8), "keys"),
        (query, rows, packed, query_scales, "queries"),
    )
    for values, index, found_codes, found_scales, name in halves:
        weights = None if calibration is None else getattr(calibration, name)
        codes, expected = quantize_nvfp4(values, nonfinite="saturate", rule=rule, weights=weights)
        all_codes = torch.full_like(found_codes, 0xA5, device="cpu")
        all_scales = torch.full_like(found_scales, 0xA5, device="cpu")
        kept = index >= 0
        all_codes[index[kept]] = codes[kept]
        all_scales[index[kept]] = expected.view(torch.uint8)[kept]
        assert torch.equal(found_codes.cpu(), all_codes)
        assert torch.equal(found_scales.cpu(), all_scales)


@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("count", [1, 32, 513])
def test_capture_and_replay(generator: torch.Generator, rule: str, count: int) -> None:
    weights = some_weights(generator) if rule == COVARIANCE else None
    calibration = None if weights is None else LayerWeights(weights, weights).to("cuda")
    keys = correlated(count, generator).cuda()
    slots = torch.arange(count, device="cuda")
    cache, scales = pages_for(count)

    def write() -> None:
        quantize_write_nvfp4(
            keys, slots, key_cache=cache, key_scales=scales, rule=rule, calibration=calibration
        )

    write()
    graph = capture(write)
    for _ in range(3):
        keys.copy_(correlated(count, generator))
        slots.copy_(slots.flip(0))
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
        codes, expected = quantize_nvfp4(keys.cpu(), rule=rule, weights=weights)
        order = slots.cpu()
        assert torch.equal(cache.reshape(-1, 64).cpu()[order], codes)
        assert torch.equal(scales.reshape(-1, 8).cpu()[order], expected.view(torch.uint8))


def test_a_calibration_on_another_device_is_named(generator: torch.Generator) -> None:
    weights = some_weights(generator)
    cache, scales = pages_for(1)
    with pytest.raises(InputError, match="calibration must be on cuda:0, got cpu"):
        quantize_write_nvfp4(
            torch.zeros(1, 128, device="cuda"),
            torch.zeros(1, dtype=torch.int64, device="cuda"),
            key_cache=cache,
            key_scales=scales,
            rule=COVARIANCE,
            calibration=LayerWeights(weights, weights),
        )
