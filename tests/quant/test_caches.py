"""`build_cache`: what the command does, in one call from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant import BuiltCaches, build_cache, gather_keys, open_cache
from sdsa_quant.errors import Hint, InputError
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4

LENGTHS = {"early": [3, 70], "late": [65, 8]}


@pytest.fixture
def layers(tmp_path: Path, generator: torch.Generator) -> Path:
    """Two layers of 73 keys in 2 requests, told apart by words."""
    tensors = {}
    for name, lengths in LENGTHS.items():
        tensors[f"{name}.keys"] = torch.randn(73, 128, generator=generator).bfloat16()
        tensors[f"{name}.lengths"] = torch.tensor(lengths)
    save_file(tensors, tmp_path / "layers.safetensors")
    return tmp_path / "layers.safetensors"


def test_one_layer(layers: Path, tmp_path: Path) -> None:
    output = tmp_path / "cache.safetensors"
    built = build_cache(layers, output, key_names="late.keys", lengths="late.lengths")
    assert isinstance(built, BuiltCaches)
    (cache,) = built.caches
    assert (cache.path, cache.pages, cache.cache_bytes) == (output, 3, 3 * 4608)
    assert cache.ratio_to_bf16 == 16384 / 4608
    assert 0.08 < cache.statistics.relative_error < 0.11
    stored = open_cache(output)
    assert stored.header.source == "layers.safetensors:late.keys"
    expected = dequantize_nvfp4(*quantize_nvfp4(cache.keys.read(0)))
    assert torch.equal(gather_keys(stored.paged_keys(), 0), expected)


def test_many_layers_with_lengths_of_their_own(layers: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    built = build_cache(
        layers,
        f"{tmp_path}/caches/",
        key_names="*.keys",
        lengths="*.lengths",
        format="bf16",
        layout="separate",
        progress=lambda done, total: told.append((done, total)),
    )
    assert [cache.path.name for cache in built.caches] == [
        "early.keys.safetensors",
        "late.keys.safetensors",
    ]
    for cache, lengths in zip(built.caches, LENGTHS.values(), strict=True):
        stored = open_cache(cache.path)
        assert stored.context_lengths.tolist() == lengths
        assert (stored.header.format, stored.header.layout) == ("bf16", "separate")
        assert cache.statistics.relative_error == 0
    assert told == [(73, 146), (146, 146)]


def test_transforms(layers: Path, tmp_path: Path) -> None:
    built = build_cache(
        layers,
        tmp_path / "c.safetensors",
        key_names="early.keys",
        center="channel",
        rotate="hadamard",
        gain="auto",
        rule="4over6",
    )
    header = open_cache(tmp_path / "c.safetensors").header
    assert header == built.caches[0].header
    assert (header.center, header.rotate, header.rule) == ("channel", "hadamard", "4over6")
    assert header.gain > 1


REFUSED = {
    "unclear keys": ({}, None, "no tensor is named keys"),
    "one file for two": ({"key_names": "*.keys"}, "output", "2 key tensors need a folder"),
    "other lengths": (
        {"key_names": "early.keys", "lengths": "l*.lengths"},
        "lengths",
        "must match one tensor that goes with early.keys, got none of the 1",
    ),
    "format": ({"format": "fp8"}, "format", "must be one of nvfp4, bf16"),
    "scale order": ({"scale_order": "128x4"}, "scale_order", "needs layout separate"),
    "rule": ({"format": "bf16", "rule": "4over6"}, "rule", "needs format nvfp4"),
    "nonfinite": ({"nonfinite": "keep"}, "nonfinite", "must be one of error, saturate"),
    "transformed": (
        {"nonfinite": "saturate", "gain": "auto"},
        "nonfinite",
        r"must be error, got saturate: .* transformed \(gain auto\)",
    ),
}


@pytest.mark.parametrize(("options", "argument", "words"), REFUSED.values(), ids=REFUSED)
def test_refuses(
    options: dict[str, str], argument: str | None, words: str, layers: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words) as raised:
        build_cache(layers, tmp_path / "c.safetensors", **options)
    assert raised.value.argument == argument
    assert "--" not in str(raised.value)
    assert [file.name for file in tmp_path.iterdir()] == ["layers.safetensors"]


def test_a_file_is_replaced_only_by_force(layers: Path, tmp_path: Path) -> None:
    output = tmp_path / "c.safetensors"
    output.write_bytes(b"mine")
    with pytest.raises(InputError, match="exists already") as raised:
        build_cache(layers, output, key_names="late.keys")
    assert raised.value.hint == Hint("force", "to replace it", True)
    assert output.read_bytes() == b"mine"
    build_cache(layers, output, key_names="late.keys", force=True)
    with pytest.raises(InputError, match="is the input and cannot be the output too"):
        build_cache(layers, layers, key_names="late.keys", force=True)


def test_keys_that_are_not_finite_are_named(tmp_path: Path) -> None:
    keys = torch.ones(5, 128)
    keys[3, 7] = torch.inf
    save_file({"keys": keys}, tmp_path / "keys.safetensors")
    with pytest.raises(InputError, match="key 3 of request 0, dimension 7") as raised:
        build_cache(tmp_path / "keys.safetensors", tmp_path / "c.safetensors")
    assert raised.value.hint == Hint("nonfinite", "to convert such values", "saturate")
    built = build_cache(
        tmp_path / "keys.safetensors", tmp_path / "c.safetensors", nonfinite="saturate"
    )
    assert built.caches[0].statistics.nonfinite == 1


@pytest.mark.parametrize("output", ["{folder}/", "{folder}/made.safetensors", "{folder}"])
def test_caches_do_not_go_among_the_captures(tmp_path: Path, output: str) -> None:
    folder = tmp_path / "captures"
    folder.mkdir()
    save_file({"keys": torch.randn(10, 128)}, folder / "layer.safetensors")
    with pytest.raises(InputError, match="would lie among the captures"):
        build_cache(folder, output.format(folder=folder))
    assert [path.name for path in folder.iterdir()] == ["layer.safetensors"]


def test_a_cache_in_a_folder_of_captures_is_named(tmp_path: Path) -> None:
    save_file({"a.keys": torch.randn(10, 128)}, tmp_path / "a.safetensors")
    build_cache(tmp_path / "a.safetensors", tmp_path / "c.safetensors")
    with pytest.raises(InputError, match=r"c\.safetensors: is a cache already"):
        build_cache(tmp_path, tmp_path / "out" / "x.safetensors")
