"""Caches of engines: four layouts told apart, decoded bit for bit, refused where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdsa_quant import open_cache
from sdsa_quant.caches import build_cache
from sdsa_quant.engines.convert import convert_engine_cache
from sdsa_quant.engines.dump import open_engine_cache
from sdsa_quant.engines.layouts import ENGINE_LAYOUTS, find_layout, what_is_wrong
from sdsa_quant.errors import InputError
from support.engine_dumps import engine_dump

LENGTHS = [150, 64, 0, 1]


@pytest.mark.parametrize("layout", ENGINE_LAYOUTS)
@pytest.mark.parametrize("outlier", [1.0, 300.0], ids=["plain", "outlier"])
def test_a_dump_is_found_and_decoded_bit_for_bit(
    layout: str, outlier: float, tmp_path: Path
) -> None:
    dump = engine_dump(layout, LENGTHS, outlier=outlier)
    save_file(dump.tensors, tmp_path / "dump.safetensors")
    written = convert_engine_cache(tmp_path / "dump.safetensors", tmp_path / "keys.safetensors")
    assert written.cache.layout.name == layout
    read = load_file(tmp_path / "keys.safetensors")
    assert torch.equal(read["keys"], torch.cat(dump.keys))
    assert read["lengths"].tolist() == LENGTHS
    for request, keys in enumerate(dump.keys):
        assert torch.equal(written.cache.keys(request), keys)
    build_cache(tmp_path / "keys.safetensors", tmp_path / "cache.safetensors", lengths="lengths")
    assert open_cache(tmp_path / "cache.safetensors").context_lengths.tolist() == LENGTHS


@pytest.mark.parametrize("layout", ENGINE_LAYOUTS)
def test_a_wrong_guess_is_refused(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "dump.safetensors"
    save_file(engine_dump(layout, [200]).tensors, path)
    for guess in ENGINE_LAYOUTS:
        if guess == layout:
            assert open_engine_cache(path, layout=guess).layout.name == layout
            continue
        with pytest.raises(InputError, match=f"tensor pages: is not of the layout {guess}: "):
            open_engine_cache(path, layout=guess)
    with pytest.raises(InputError, match="layout must be one of fp8-rows, "):
        open_engine_cache(path, layout="fp8")


@pytest.mark.parametrize("layout", ENGINE_LAYOUTS)
@pytest.mark.parametrize("keys", [2, 3, 8, 64])
def test_few_keys_are_enough_to_tell_or_it_is_said(layout: str, keys: int) -> None:
    for seed in range(20):
        dump = engine_dump(layout, [keys], seed)
        page = dump.tensors["pages"][dump.tensors["block_table"][0].long()].flatten(1)
        used = torch.arange(64)[None] < keys
        size = dump.tensors["pages"].shape[-1]
        fitting = [
            each.name
            for each in ENGINE_LAYOUTS.values()
            if each.key_bytes == size and what_is_wrong(page, each, used) is None
        ]
        # Two or three scales may be positive and near each other by chance: never a wrong guess.
        assert layout in fitting
        if len(fitting) > 1:
            assert keys < 8
            with pytest.raises(InputError, match="both decode"):
                find_layout(page, size, used)
        else:
            assert find_layout(page, size, used).name == layout


def test_real_keys_are_told_too(fixtures: Path) -> None:
    from sdsa_quant import quantize_fp8

    keys = load_file(fixtures / "smollm2-layer12.safetensors")["keys"][:1280]
    codes, scales = quantize_fp8(keys.view(-1, 64, 128))
    parts = codes.view(torch.uint8), scales[..., None].view(torch.uint8)
    rows = torch.cat(parts, -1).flatten(1)
    planes = torch.cat([part.flatten(1) for part in parts], -1)
    assert find_layout(rows, 132).name == "fp8-rows"
    assert find_layout(planes, 132).name == "fp8-planes"


def test_bytes_that_are_no_keys_are_refused(generator: torch.Generator) -> None:
    noise = torch.randint(0, 256, (4, 64 * 132), generator=generator).to(torch.uint8)
    for size in (132, 68):
        with pytest.raises(InputError, match="no layout decodes to finite keys of similar length"):
            find_layout(noise[:, : 64 * size], size)
    with pytest.raises(InputError, match=r"both decode .* the layout cannot be found"):
        find_layout(torch.zeros(1, 64 * 132, dtype=torch.uint8), 132)
    with pytest.raises(InputError, match=r"a key must have 132 bytes \(FP8\) or 68 .*, got 100"):
        find_layout(noise, 100)
    fp8 = engine_dump("fp8-rows", [64])
    page = fp8.tensors["pages"][fp8.tensors["block_table"][0].long()].flatten(1)
    layout = ENGINE_LAYOUTS["fp8-rows"]
    assert what_is_wrong(page, layout) is None
    for offset, changed, fault in (
        (7, [0xFF], "a code is NaN"),
        (128, [0, 0, 0x80, 0x7F], "a scale is not finite"),
        (128, [0, 0, 0x80, 0xBF], "2% of the scales are negative"),
    ):
        spoiled = page.clone()
        spoiled[0, offset : offset + len(changed)] = torch.tensor(changed, dtype=torch.uint8)
        assert what_is_wrong(spoiled, layout) == fault


def test_tables_and_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = engine_dump("fp8-planes", [150, 64]).tensors
    path = tmp_path / "dump.safetensors"

    def refused(changes: dict[str, torch.Tensor], match: str, **given: str) -> None:
        save_file({**good, **changes}, path)
        with pytest.raises(InputError, match=match):
            open_engine_cache(path, **given)

    wrong = good["block_table"].clone()
    wrong[0, 1] = 99
    refused({"block_table": wrong}, r"pages from 0 to 5, got 99 for block 1 of request 0")
    refused({"block_table": good["block_table"][:1].clone()}, "a row for each of the 2 lengths")
    refused({"context_lengths": torch.tensor([150, 300])}, "must have 5 columns for the 300 keys")
    refused({"context_lengths": torch.tensor([-1, 3])}, "must not be negative, got -1")
    refused({"context_lengths": torch.ones(2)}, "must be integers")
    refused({"more": good["pages"].clone()}, "one tensor must be uint8 .*give pages to name it")
    refused({}, "no tensor is named nothing", pages="nothing")
    save_file({**good, "more": good["pages"].clone()}, path)
    assert open_engine_cache(path, pages="more").name == "more"
    squeezed = {**good, "pages": good["pages"][:, :, None].contiguous()}
    save_file(squeezed, path)
    assert open_engine_cache(path).context_lengths == (150, 64)
