"""The baseline: exact, the same wherever a key stands, and read from keys and from caches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.accuracy import baseline
from sdsa_quant.accuracy.baseline import baseline_scores
from sdsa_quant.captures.baseline import describe_other_source, open_baseline
from sdsa_quant.errors import CheckFailedError, InputError
from sdsa_quant.files.cache_file import CacheFile
from support.caches import write_cache

LENGTHS = [70, 0, 5, 64]


@pytest.fixture
def keys(generator: torch.Generator) -> torch.Tensor:
    """bfloat16 keys of every request."""
    return torch.randn(sum(LENGTHS), 128, generator=generator).bfloat16()


@pytest.fixture
def cache(tmp_path: Path, keys: torch.Tensor) -> CacheFile:
    """The keys as an NVFP4 cache."""
    return write_cache(tmp_path / "cache.safetensors", keys, LENGTHS)


def exact_dot(query: torch.Tensor, key: torch.Tensor) -> float:
    """The correctly rounded float32 dot product, by exact summation of exact products."""
    exact = math.fsum(a * b for a, b in zip(query.tolist(), key.tolist(), strict=True))
    return float(torch.tensor(exact, dtype=torch.float64).float())


def test_scores_are_exact_dot_products_rounded_once(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    monkeypatch.setattr(baseline, "_KEYS_AT_A_TIME", 7)
    query = torch.randn(3, 128, generator=generator).bfloat16()
    some_keys = (torch.randn(20, 128, generator=generator) * 30).bfloat16()
    scores = baseline_scores(query, lambda request, start, stop: some_keys[start:stop], 0, 20)
    expected = [[exact_dot(row, key) for key in some_keys] for row in query]
    assert scores.dtype == torch.float32
    assert scores.tolist() == expected


def test_equal_keys_have_equal_scores_wherever_they_are(generator: torch.Generator) -> None:
    query = torch.randn(1, 128, generator=generator).bfloat16()
    key = torch.randn(1, 128, generator=generator).bfloat16()
    same = key.expand(777, 128)
    scores = baseline_scores(query, lambda request, start, stop: same[start:stop], 0, 777)
    assert (scores == exact_dot(query[0], key[0])).all()


@pytest.mark.parametrize("kind", ["flat", "padded", "cache"])
def test_reads_each_requests_keys(
    tmp_path: Path, keys: torch.Tensor, cache: CacheFile, kind: str
) -> None:
    path = tmp_path / "baseline.safetensors"
    parts = keys.split(LENGTHS)
    if kind == "flat":
        save_file({"keys": keys}, path)
    elif kind == "padded":
        padded = torch.zeros(4, 70, 128, dtype=torch.bfloat16)
        for request, part in enumerate(parts):
            padded[request, : part.shape[0]] = part
        save_file({"keys": padded}, path)
    else:
        write_cache(path, keys, LENGTHS, "bf16")
    opened = open_baseline(path, cache)
    assert opened.kind == ("cache" if kind == "cache" else "keys")
    assert opened.dtype == "BF16"
    for request, part in enumerate(parts):
        assert torch.equal(opened.read_keys(request, 0, part.shape[0]).float(), part.float())
    assert torch.equal(opened.read_keys(0, 63, 66).float(), parts[0][63:66].float())


def test_refuses_what_does_not_fit_the_cache(
    tmp_path: Path, keys: torch.Tensor, cache: CacheFile
) -> None:
    short, padded = tmp_path / "short.safetensors", tmp_path / "padded.safetensors"
    save_file({"keys": keys[:-1].clone()}, short)
    save_file({"keys": torch.zeros(4, 69, 128)}, padded)
    nvfp4 = write_cache(tmp_path / "nvfp4.safetensors", keys, LENGTHS)
    other = write_cache(tmp_path / "other.safetensors", keys, [70, 5, 0, 64], "bf16")
    for path, message in (
        (short, "tensor keys must have the 139 keys of .*cache.safetensors, got 138"),
        (padded, r"must hold the requests of .*, \[70, 0, 5, 64\] keys, got \[4, 69, 128\]"),
        (nvfp4.path, "must be unquantized keys or a bf16 cache, but is a cache of nvfp4 keys"),
        (other.path, r"\[70, 0, 5, 64\], got \[70, 5, 0, 64\]"),
    ):
        with pytest.raises(InputError, match=message) as error:
            open_baseline(path, cache)
        assert str(path) in str(error.value)


def test_refuses_a_baseline_cache_with_a_broken_table(
    tmp_path: Path, keys: torch.Tensor, cache: CacheFile
) -> None:
    path = tmp_path / "bf16.safetensors"
    other = write_cache(path, keys, LENGTHS, "bf16")
    table = other.block_table.clone()
    table[0, 0] = 99
    tensors = {
        "pages": other.paged_keys().key_cache.view(torch.uint8).flatten(1).clone(),
        "block_table": table,
        "context_lengths": other.context_lengths.clone(),
    }
    save_file(tensors, path, other.header.metadata())
    with pytest.raises(CheckFailedError, match=r"block_table\[0, 0\] must be a page"):
        open_baseline(path, cache)


def test_refuses_several_tensors(tmp_path: Path, keys: torch.Tensor, cache: CacheFile) -> None:
    path = tmp_path / "layers.safetensors"
    save_file({"layers.2.keys": keys, "layers.10.keys": keys.clone()}, path)
    with pytest.raises(InputError, match=r"must match one .* layers\.2\.keys, layers\.10\.keys"):
        open_baseline(path, cache, "layers.*.keys")


def test_refuses_a_tensor_name_for_a_cache(
    tmp_path: Path, keys: torch.Tensor, cache: CacheFile
) -> None:
    bf16 = write_cache(tmp_path / "bf16.safetensors", keys, LENGTHS, "bf16")
    with pytest.raises(InputError, match="is a cache, which has no tensor to choose"):
        open_baseline(bf16.path, cache, "keys")


def test_keys_of_one_head_are_a_baseline(
    tmp_path: Path, keys: torch.Tensor, cache: CacheFile
) -> None:
    save_file({"keys": keys[:, None]}, tmp_path / "head.safetensors")
    read_keys = open_baseline(tmp_path / "head.safetensors", cache).read_keys
    assert torch.equal(read_keys(3, 0, 64), keys[75:139])
    assert torch.equal(read_keys(0, 5, 70), keys[5:70])


def of_layer(path: Path, keys: torch.Tensor, layer: int, values: str = "nvfp4") -> CacheFile:
    """A cache whose header says that it was made from one layer's tensor of several."""
    cache = write_cache(path, keys, LENGTHS, values)
    return replace(cache, header=replace(cache.header, source=f"keys.safetensors:layers.{layer}.k"))


def test_the_cache_says_which_tensor_is_its_baseline(tmp_path: Path, keys: torch.Tensor) -> None:
    path = tmp_path / "keys.safetensors"
    save_file({"layers.0.k": keys, "layers.1.k": keys * 2}, path)
    cache = of_layer(tmp_path / "cache.safetensors", keys * 2, 1)
    opened = open_baseline(path, cache)
    assert opened.name == "layers.1.k"
    assert describe_other_source(cache, opened) is None


def test_a_baseline_of_another_layer_is_remarked_on(tmp_path: Path, keys: torch.Tensor) -> None:
    path = tmp_path / "keys.safetensors"
    save_file({"layers.0.k": keys, "layers.1.k": keys * 2}, path)
    cache = of_layer(tmp_path / "cache.safetensors", keys * 2, 1)
    doubt = describe_other_source(cache, open_baseline(path, cache, "layers.0.k"))
    assert doubt is not None
    assert "made from tensor layers.1.k, but the baseline is layers.0.k" in doubt
