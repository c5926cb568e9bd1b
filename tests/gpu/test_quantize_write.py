"""`quantize_write_nvfp4` on a GPU: the bits of `sdsa_quant`, in the slots given, nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sdsa_kernels import quantize_write_nvfp4
from sdsa_kernels.measure.timing import capture
from sdsa_quant.formats.nvfp4 import quantize_nvfp4
from sdsa_quant.paging import page_views
from support.problems import gaussian_values
from support.quantize_cases import (
    every_maximum,
    every_value_under_every_scale,
    ties_and_their_neighbours,
)

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def poisoned_cache(pages: int, pitch: int = 4608) -> tuple[torch.Tensor, torch.Tensor]:
    buffer = torch.full((pages, pitch), 0xA5, dtype=torch.uint8, device="cuda")
    key_cache, key_scales = page_views(buffer[:, :4608], "nvfp4")
    assert key_scales is not None
    return key_cache, key_scales


def rows_of(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8)[slots // 64, slots % 64]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_golden_vectors(fixtures: Path, dtype: torch.dtype) -> None:
    golden = load_file(fixtures / "nvfp4-golden.safetensors")
    key_cache, key_scales = poisoned_cache(3)
    slots = torch.arange(64, device="cuda") + 70
    quantize_write_nvfp4(
        golden["inputs"].to("cuda", dtype), slots, key_cache=key_cache, key_scales=key_scales
    )
    assert torch.equal(rows_of(key_cache, slots).cpu(), golden["codes"])
    assert torch.equal(rows_of(key_scales, slots).cpu(), golden["scales"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 4097])
@pytest.mark.parametrize("pitch", [4608, 4624, 9216])
def test_same_bits_as_the_cpu(
    generator: torch.Generator, dtype: torch.dtype, tokens: int, pitch: int
) -> None:
    keys = gaussian_values((tokens, 128), generator).to(dtype)
    queries = gaussian_values((7, 128), generator).to(dtype)
    key_cache, key_scales = poisoned_cache(80, pitch)
    order = torch.randperm(80 * 64, generator=generator)
    slots = order[:tokens].clone()
    slots[tokens // 2 :: 5] = -1
    query_rows = torch.tensor([4, -1, 0, 9, -(2**62), 1, 8])
    packed = torch.full((10, 80), 0xA5, dtype=torch.uint8, device="cuda")[:, :64]
    query_scales = torch.full((10, 8), 0xA5, dtype=torch.uint8, device="cuda")
    quantize_write_nvfp4(
        keys.cuda(),
        slots.cuda(),
        queries.cuda(),
        query_rows.cuda(),
        key_cache=key_cache,
        key_scales=key_scales,
        packed_query=packed,
        query_scales=query_scales,
    )
    expected_keys = torch.full((80, 64, 64), 0xA5, dtype=torch.uint8)
    expected_scales = torch.full((80, 64, 8), 0xA5, dtype=torch.uint8)
    codes, scales = quantize_nvfp4(keys)
    kept = slots >= 0
    place = slots[kept]
    expected_keys[place // 64, place % 64] = codes[kept]
    expected_scales[place // 64, place % 64] = scales.view(torch.uint8)[kept]
    assert torch.equal(key_cache.cpu(), expected_keys)
    assert torch.equal(key_scales.view(torch.uint8).cpu(), expected_scales)
    codes, scales = quantize_nvfp4(queries)
    for query, row in enumerate(query_rows.tolist()):
        if row >= 0:
            assert torch.equal(packed[row].cpu(), codes[query])
            assert torch.equal(query_scales[row].cpu(), scales.view(torch.uint8)[query])
    untouched = [2, 3, 5, 6, 7]
    assert (packed[untouched] == 0xA5).all()
    assert (query_scales[untouched] == 0xA5).all()


def test_every_bfloat16_beside_every_maximum_exponent(generator: torch.Generator) -> None:
    # Blocks of any bits at all: NaN, infinities and subnormals among them.
    bits = torch.randint(-(2**15), 2**15, (4096, 128), generator=generator, dtype=torch.int16)
    keys = bits.view(torch.bfloat16)
    key_cache, key_scales = poisoned_cache(64)
    slots = torch.arange(4096, device="cuda")
    quantize_write_nvfp4(keys.cuda(), slots, key_cache=key_cache, key_scales=key_scales)
    codes, scales = quantize_nvfp4(keys, nonfinite="saturate")
    assert torch.equal(key_cache.cpu().reshape(-1, 64), codes)
    assert torch.equal(key_scales.cpu().reshape(-1, 8).view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize(
    "make",
    [every_maximum, every_value_under_every_scale, ties_and_their_neighbours],
    ids=lambda make: make.__name__,
)
def test_hard_rows(make: Callable[[], torch.Tensor]) -> None:
    values = make()
    count = values.shape[0]
    key_cache, key_scales = poisoned_cache(-(-count // 64))
    slots = torch.arange(count, device="cuda")
    quantize_write_nvfp4(values.cuda(), slots, key_cache=key_cache, key_scales=key_scales)
    codes, scales = quantize_nvfp4(values)
    assert torch.equal(rows_of(key_cache, slots).cpu(), codes)
    assert torch.equal(rows_of(key_scales, slots).cpu(), scales.view(torch.uint8))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), least=st.integers(-40, 20))
def test_any_float32(seed: int, least: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(least, least + 24, (1024, 128), generator=generator)
    values = torch.randn(1024, 128, generator=generator) * torch.exp2(exponents.float())
    key_cache, key_scales = poisoned_cache(16)
    slots = torch.arange(1024, device="cuda")
    quantize_write_nvfp4(values.cuda(), slots, key_cache=key_cache, key_scales=key_scales)
    codes, scales = quantize_nvfp4(values)
    assert torch.equal(rows_of(key_cache, slots).cpu(), codes)
    assert torch.equal(rows_of(key_scales, slots).cpu(), scales.view(torch.uint8))


def test_slots_past_32_bits(generator: torch.Generator) -> None:
    pages = 466_040
    key_cache, key_scales = poisoned_cache(pages)
    keys = gaussian_values((2, 128), generator)
    slots = torch.tensor([466_034 * 64 + 5, 3], device="cuda")
    quantize_write_nvfp4(keys.cuda(), slots, key_cache=key_cache, key_scales=key_scales)
    codes, scales = quantize_nvfp4(keys)
    assert torch.equal(rows_of(key_cache, slots).cpu(), codes)
    assert torch.equal(rows_of(key_scales, slots).cpu(), scales.view(torch.uint8))
    for plane in (key_cache, key_scales.view(torch.uint8)):
        plane[slots // 64, slots % 64] = 0xA5
        assert (plane == 0xA5).all()


def test_capture_and_replay(generator: torch.Generator) -> None:
    keys = gaussian_values((100, 128), generator).cuda()
    slots = torch.arange(100, device="cuda")
    key_cache, key_scales = poisoned_cache(2)

    def write() -> None:
        quantize_write_nvfp4(keys, slots, key_cache=key_cache, key_scales=key_scales)

    write()
    graph = capture(write)
    keys.copy_(gaussian_values((100, 128), generator))
    slots.copy_(slots.flip(0))
    graph.replay()
    codes, scales = quantize_nvfp4(keys)
    assert torch.equal(rows_of(key_cache, slots), codes)
    assert torch.equal(rows_of(key_scales, slots), scales.view(torch.uint8))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one(generator: torch.Generator) -> None:
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.max_memory_allocated(0)
    keys = gaussian_values((10, 128), generator).to("cuda:1")
    slots = torch.arange(10, device="cuda:1")
    codes = torch.zeros(1, 64, 64, dtype=torch.uint8, device="cuda:1")
    scales = torch.zeros(1, 64, 8, dtype=torch.uint8, device="cuda:1")
    quantize_write_nvfp4(keys, slots, key_cache=codes, key_scales=scales)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.max_memory_allocated(0) == before
    expected_codes, expected_scales = quantize_nvfp4(keys)
    assert torch.equal(codes[0, :10], expected_codes)
    assert torch.equal(scales[0, :10], expected_scales.view(torch.uint8))
