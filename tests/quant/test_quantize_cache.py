"""Captured keys to cache files, whatever their lengths, dtypes and layouts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sdsa_quant import quantize_cache as job
from sdsa_quant.captures.keys import CapturedKeys, captured_keys
from sdsa_quant.errors import InputError
from sdsa_quant.files.cache_file import open_cache, validate_cache
from sdsa_quant.files.cache_header import CacheHeader
from sdsa_quant.files.tensor_source import open_tensors
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from sdsa_quant.paging import gather_keys
from sdsa_quant.quantize_cache import QuantizedCache, quantize_cache

HEADERS = [
    CacheHeader("nvfp4"),
    CacheHeader("nvfp4", "separate"),
    CacheHeader("nvfp4", "separate", "128x4"),
    CacheHeader("bf16"),
    CacheHeader("bf16", "separate"),
]
HEADER_IDS = [f"{h.format}-{h.layout}-{h.scale_order}" for h in HEADERS]


def capture(folder: Path, keys: torch.Tensor, lengths: Sequence[int] | None = None) -> CapturedKeys:
    tensors = {"keys": keys}
    if lengths is not None:
        tensors["lengths"] = torch.tensor(lengths, dtype=torch.int64)
    save_file(tensors, folder / "keys.safetensors")
    source = open_tensors(folder / "keys.safetensors")
    return captured_keys(source, source["keys"], None if lengths is None else "lengths")


def random_keys(count: int, generator: torch.Generator) -> torch.Tensor:
    """Keys of very different magnitudes: every 16 values by their own power of two."""
    exponents = torch.randint(-4, 5, (count, 8, 1), generator=generator).float()
    keys = torch.randn(count, 8, 16, generator=generator) * torch.exp2(exponents)
    return keys.view(count, 128).bfloat16()


def write(
    folder: Path, captured: CapturedKeys, header: CacheHeader = HEADERS[0], **options: object
) -> QuantizedCache:
    return quantize_cache(captured, folder / "cache.safetensors", header, **options)


def decoded(keys: torch.Tensor, values: str) -> torch.Tensor:
    return dequantize_nvfp4(*quantize_nvfp4(keys)) if values == "nvfp4" else keys.float()


@pytest.mark.parametrize("header", HEADERS, ids=HEADER_IDS)
# One page of a chunk, a few requests in one, a request in several; 0 and 1 past a page's end.
@pytest.mark.parametrize("chunk_pages", [1, 3, 256])
def test_every_key_is_in_its_place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
    header: CacheHeader,
    chunk_pages: int,
) -> None:
    monkeypatch.setattr(job, "_CPU_PAGES_PER_CHUNK", chunk_pages)
    lengths = [300, 0, 64, 65, 1, 63, 128]
    keys = random_keys(sum(lengths), generator)
    done: list[int] = []
    result = write(tmp_path, capture(tmp_path, keys, lengths), header, advance=done.append)
    cache = open_cache(tmp_path / "cache.safetensors")
    validate_cache(cache)
    assert cache.header == header
    assert cache.context_lengths.tolist() == lengths
    assert result.pages == cache.pages == 12
    assert sum(done) == sum(lengths)
    assert result.statistics.keys == sum(lengths)
    paged = cache.paged_keys()
    for request, part in enumerate(keys.split(lengths)):
        assert torch.equal(gather_keys(paged, request), decoded(part, header.format))


@pytest.mark.parametrize("chunk_pages", [1, 2, 256])
def test_padding_of_padded_requests_is_left_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
    chunk_pages: int,
) -> None:
    monkeypatch.setattr(job, "_CPU_PAGES_PER_CHUNK", chunk_pages)
    lengths = [100, 130, 0, 64]
    keys = random_keys(4 * 130, generator).view(4, 130, 128)
    for request, length in enumerate(lengths):
        keys[request, length:] = math.nan
    result = write(tmp_path, capture(tmp_path, keys, lengths))
    paged = open_cache(result.path).paged_keys()
    for request, length in enumerate(lengths):
        expected = decoded(keys[request, :length], "nvfp4")
        assert torch.equal(gather_keys(paged, request), expected)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lengths=st.lists(st.integers(0, 200), min_size=1, max_size=6), chunk_pages=st.integers(1, 5))
def test_files_do_not_depend_on_the_chunks(
    tmp_path: Path, lengths: list[int], chunk_pages: int
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    captured = capture(tmp_path, random_keys(sum(lengths), generator), [*lengths, 0])
    with pytest.MonkeyPatch.context() as patch:
        whole = write(tmp_path, captured, force=True)
        expected = whole.path.read_bytes()
        patch.setattr(job, "_CPU_PAGES_PER_CHUNK", chunk_pages)
        parts = write(tmp_path, captured, force=True)
    assert parts.path.read_bytes() == expected
    assert parts.statistics.flushed == whole.statistics.flushed


def test_1000_keys_are_16_pages(tmp_path: Path, generator: torch.Generator) -> None:
    captured = capture(tmp_path, random_keys(1000, generator))
    result = write(tmp_path, captured)
    assert (result.pages, result.cache_bytes, result.bf16_bytes) == (16, 73728, 262144)
    assert round(result.ratio_to_bf16, 3) == 3.556
    assert load_file(result.path)["pages"].numel() == result.cache_bytes
    assert result.file_bytes == result.path.stat().st_size
    result = write(tmp_path, captured, CacheHeader("bf16"), force=True)
    assert (result.cache_bytes, result.ratio_to_bf16) == (262144, 1.0)


@pytest.mark.parametrize("count", [*range(1, 131), 384, 512, 1024, 4097])
def test_bytes_of_a_prefix_do_not_depend_on_the_count(tmp_path: Path, count: int) -> None:
    keys = random_keys(4097, torch.Generator().manual_seed(1))
    codes, scales = quantize_nvfp4(keys)
    result = write(tmp_path, capture(tmp_path, keys[:count].clone()))
    paged = open_cache(result.path).paged_keys()
    stored_codes = paged.key_cache.flatten(0, 1)
    stored_scales = paged.key_scales.view(torch.uint8).flatten(0, 1)
    assert torch.equal(stored_codes[:count], codes[:count])
    assert torch.equal(stored_scales[:count], scales[:count].view(torch.uint8))
    assert not stored_codes[count:].any()
    assert not stored_scales[count:].any()
    assert result.statistics.flushed == 0


def test_dtypes_of_the_same_keys_give_the_same_bytes(
    tmp_path: Path, generator: torch.Generator
) -> None:
    keys = random_keys(1000, generator)
    keys.masked_fill_(keys.abs() < 2.0**-14, 0.0)  # F16 has fewer bits there
    digests = set()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        captured = capture(tmp_path, keys.to(dtype))
        assert torch.equal(captured.read(0).bfloat16(), keys)
        write(tmp_path, captured, force=True)
        digests.add(hashlib.sha256((tmp_path / "cache.safetensors").read_bytes()).digest())
    assert len(digests) == 1


def test_zeros_and_no_keys(tmp_path: Path) -> None:
    result = write(tmp_path, capture(tmp_path, torch.zeros(130, 128)))
    assert (result.pages, result.statistics.relative_error) == (3, 0.0)
    assert not load_file(result.path)["pages"].any()
    result = write(tmp_path, capture(tmp_path, torch.zeros(0, 128)), force=True)
    assert (result.pages, result.cache_bytes) == (0, 0)
    assert math.isnan(result.ratio_to_bf16)
    validate_cache(open_cache(result.path))


def test_a_misaligned_input_is_read_all_the_same(
    tmp_path: Path, generator: torch.Generator
) -> None:
    # Another writer's header of an odd length puts the keys at an odd address of the mapped file.
    keys = random_keys(100, generator)
    path = capture(tmp_path, keys).source.path
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    odd = data[8 : 8 + size] + b" " * (1 + size % 2)
    path.write_bytes(len(odd).to_bytes(8, "little") + odd + data[8 + size :])
    source = open_tensors(path)
    result = write(tmp_path, captured_keys(source, source["keys"]))
    paged = open_cache(result.path).paged_keys()
    assert torch.equal(gather_keys(paged, 0), decoded(keys, "nvfp4"))


@pytest.mark.parametrize(
    "header", [CacheHeader("nvfp4"), CacheHeader("bf16")], ids=["nvfp4", "bf16"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_nonfinite_keys_are_refused_by_name_and_place(
    tmp_path: Path, generator: torch.Generator, header: CacheHeader, value: float
) -> None:
    keys = random_keys(300, generator)
    keys[230, 17] = value
    captured = capture(tmp_path, keys, [100, 0, 200])
    message = (
        rf"keys\.safetensors: tensor keys must be finite, got {value} in key 130 of request 2, "
    )
    with pytest.raises(InputError, match=message + "dimension 17; give nonfinite=.saturate."):
        write(tmp_path, captured, header)
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.safetensors"]


def test_saturated_nonfinite_keys(tmp_path: Path) -> None:
    keys = torch.zeros(3, 128)
    keys[0, 0], keys[1, 0], keys[2, 0] = math.nan, math.inf, -math.inf
    keys[:, 1] = 6.0
    captured = capture(tmp_path, keys)
    result = write(tmp_path, captured, nonfinite="saturate")
    assert result.statistics.nonfinite == 3
    stored = gather_keys(open_cache(result.path).paged_keys(), 0)
    assert stored[:, 0].tolist() == [6.0, 2688.0, -2688.0]
    result = write(tmp_path, captured, CacheHeader("bf16"), nonfinite="saturate", force=True)
    stored = gather_keys(open_cache(result.path).paged_keys(), 0)
    largest = torch.finfo(torch.bfloat16).max
    assert stored[:, 0].tolist() == [0.0, largest, -largest]
    assert result.statistics.nonfinite == 3


def test_float32_keys_beyond_bf16_are_refused_only_there(tmp_path: Path) -> None:
    keys = torch.zeros(3, 128)
    keys[2, 5] = torch.finfo(torch.float32).max
    captured = capture(tmp_path, keys)
    with pytest.raises(InputError, match=r"got 3\.40\d*e\+38 in key 2 of request 0, dimension 5"):
        write(tmp_path, captured, CacheHeader("bf16"))
    assert write(tmp_path, captured).statistics.saturated == 1


def test_the_input_is_left_as_it_is(tmp_path: Path, generator: torch.Generator) -> None:
    keys = random_keys(200, generator)
    keys[0, :2] = torch.tensor([-0.0, -0.1])
    captured = capture(tmp_path, keys)
    before = captured.source.path.read_bytes()
    write(tmp_path, captured)
    assert captured.source.path.read_bytes() == before
    assert torch.equal(captured.read(0).view(torch.int16), keys.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("header", HEADERS, ids=HEADER_IDS)
def test_a_gpu_writes_the_same_file(
    tmp_path: Path, generator: torch.Generator, header: CacheHeader
) -> None:
    captured = capture(tmp_path, random_keys(1000, generator), [900, 1, 99])
    here = write(tmp_path, captured, header)
    expected, error = here.path.read_bytes(), here.statistics.relative_error
    there = write(tmp_path, captured, header, device="cuda", force=True)
    assert there.path.read_bytes() == expected
    assert there.statistics.relative_error == pytest.approx(error, rel=1e-12)
