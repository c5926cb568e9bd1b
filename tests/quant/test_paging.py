"""Views of page records, and keys read back from pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sdsa_quant.errors import InputError
from sdsa_quant.files.cache_file import sequential_block_table
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from sdsa_quant.formats.scale_order import linear_to_128x4
from sdsa_quant.paging import PagedKeys, gather_keys, page_views


def paged(keys: torch.Tensor, lengths: list[int], values: str) -> PagedKeys:
    table = sequential_block_table(lengths)
    records = torch.zeros(int(table.max()) + 1, 4608 if values == "nvfp4" else 16384).byte()
    key_cache, key_scales = page_views(records, values)
    start = 0
    for request, length in enumerate(lengths):
        for first in range(0, length, 64):
            page = int(table[request, first // 64])
            part = keys[start + first : start + min(first + 64, length)]
            if key_scales is None:
                key_cache[page, : len(part)] = part
            else:
                codes, scales = quantize_nvfp4(part)
                key_cache[page, : len(part)] = codes
                key_scales[page].view(torch.uint8)[: len(part)] = scales.view(torch.uint8)
        start += length
    return PagedKeys(key_cache, key_scales, table, torch.tensor(lengths, dtype=torch.int32))


def test_views_share_the_records_memory() -> None:
    records = torch.zeros(3, 4608, dtype=torch.uint8)
    key_cache, key_scales = page_views(records, "nvfp4")
    assert key_scales is not None
    key_cache[1, 2, 3] = 7
    key_scales[2].view(torch.uint8)[63, 7] = 9
    assert records[1, 2 * 64 + 3] == 7
    assert records[2, 4607] == 9
    keys, none = page_views(torch.zeros(2, 16384, dtype=torch.uint8), "bf16")
    assert none is None
    assert keys.shape == (2, 64, 128)


def test_wrong_records_are_refused() -> None:
    with pytest.raises(InputError, match=r"uint8 \[pages, 4608\] for nvfp4 keys"):
        page_views(torch.zeros(2, 16384, dtype=torch.uint8), "nvfp4")


@pytest.mark.parametrize("values", ["nvfp4", "bf16"])
def test_keys_come_back(values: str, generator: torch.Generator) -> None:
    lengths = [1, 130, 64, 0, 63]
    keys = torch.randn(sum(lengths), 128, generator=generator).bfloat16()
    cache = paged(keys, lengths, values)
    assert cache.format == values
    assert cache.pages == 6
    expected = keys.float() if values == "bf16" else dequantize_nvfp4(*quantize_nvfp4(keys))
    start = 0
    for request, length in enumerate(lengths):
        mine = expected[start : start + length]
        assert torch.equal(gather_keys(cache, request), mine)
        for first, stop in ((0, 0), (0, length), (length // 3, length // 2), (length, length)):
            assert torch.equal(gather_keys(cache, request, first, stop), mine[first:stop])
        start += length


def test_keys_come_back_from_scales_in_the_128x4_order(generator: torch.Generator) -> None:
    linear = paged(torch.randn(130, 128, generator=generator).bfloat16(), [130], "nvfp4")
    assert linear.key_scales is not None
    tiled = linear_to_128x4(linear.key_scales.reshape(-1, 8))
    assert torch.equal(
        gather_keys(replace(linear, key_scales=tiled), 0, 3, 129), gather_keys(linear, 0, 3, 129)
    )


def test_ranges_past_a_request_are_refused(generator: torch.Generator) -> None:
    cache = paged(torch.randn(10, 128, generator=generator).bfloat16(), [10], "nvfp4")
    with pytest.raises(InputError, match="within 0 to 10, got 3 to 11"):
        gather_keys(cache, 0, 3, 11)


@pytest.mark.parametrize("first", [0, 1])
def test_records_stay_records_on_another_device(first: int) -> None:
    key_cache, key_scales = page_views(torch.zeros(5, 4608).byte()[first:], "nvfp4")
    table = torch.zeros(1, 1, dtype=torch.int32)
    moved = PagedKeys(key_cache, key_scales, table, table[0]).to("meta")
    assert moved.key_scales is not None
    assert moved.key_cache.stride() == (4608, 64, 1)
    assert moved.key_scales.stride() == (4608, 8, 1)
    assert moved.key_scales.storage_offset() == 4096
    assert moved.key_cache.shape == key_cache.shape


def test_separate_tensors_stay_separate_on_another_device() -> None:
    codes, scales = torch.zeros(5, 64, 64).byte(), torch.zeros(5, 64, 8).to(torch.float8_e4m3fn)
    table = torch.zeros(1, 1, dtype=torch.int32)
    moved = PagedKeys(codes, scales, table, table[0]).to("meta")
    assert moved.key_scales is not None
    assert (moved.key_cache.stride(0), moved.key_scales.stride(0)) == (4096, 512)
