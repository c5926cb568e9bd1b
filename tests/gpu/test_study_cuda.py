"""A study on a GPU measures what it measures on the CPU, up to the last bits of sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.formats.key_formats import KEY_FORMATS
from sdsa_quant.formats.transforms import hadamard
from sdsa_quant.study.inputs import StudyInputs
from sdsa_quant.study.layers import open_layers
from sdsa_quant.study.settings import StudySettings, transform_choices
from sdsa_quant.study.unit import fit_layer, measure_unit, unpack_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", KEY_FORMATS)
def test_formats_decode_to_the_same_bits(name: str, generator: torch.Generator) -> None:
    keys = torch.randn(500, 128, generator=generator) * torch.logspace(-4, 3, 500)[:, None]
    for values in (keys, keys.bfloat16()):
        there = KEY_FORMATS[name].round_trip(values.cuda())
        assert torch.equal(there.cpu(), KEY_FORMATS[name].round_trip(values))


def test_hadamard_gives_the_same_bits(generator: torch.Generator) -> None:
    values = torch.randn(333, 128, generator=generator)
    assert torch.equal(hadamard(values.cuda()).cpu(), hadamard(values))


@pytest.mark.parametrize(
    "options",
    [
        {"score": "relu-sum", "weights": "weights"},
        {"score": "block-max", "block": 16, "local_blocks": 1},
        {"score": "relu-sum", "mean_pool": 4, "block": 8},
    ],
    ids=["relu-sum", "block-max", "pooled-blocks"],
)
def test_selections_of_heads_are_the_same(
    options: dict[str, Any], tmp_path: Path, generator: torch.Generator
) -> None:
    path = tmp_path / "capture.safetensors"
    tensors = {
        "keys": torch.randn(3000, 128, generator=generator).bfloat16(),
        "queries": torch.randn(9, 32, 128, generator=generator).bfloat16(),
        "weights": torch.rand(9, 32, generator=generator),
    }
    save_file(tensors, path)
    transforms = transform_choices(("none", "hadamard"), ("none",), ("none", "channel"))
    settings = StudySettings(formats=("nvfp4", "fp8"), transforms=transforms, top_k=(16,))
    (layer,) = open_layers(StudyInputs(path, path, causal=True, **options))
    fitted = fit_layer(layer, settings)
    here, there = (measure_unit(layer, 0, settings, fitted, each) for each in ("cpu", "cuda"))
    assert here.rows.shape == there.rows.shape
    forced = layer.ranking.local
    for ours, theirs in zip(here.rows, there.rows, strict=True):
        for a, b in zip(
            unpack_rows(ours, (16,), forced), unpack_rows(theirs, (16,), forced), strict=True
        ):
            assert b.relative_l2 == pytest.approx(a.relative_l2, rel=1e-5, abs=1e-9)
            assert abs(b.top_k[0].recall - a.top_k[0].recall) <= 1 / 16


def test_a_unit_measures_the_same(fixtures: Path) -> None:
    path = fixtures / "smollm2-layer12.safetensors"
    settings = StudySettings(
        formats=tuple(KEY_FORMATS),
        transforms=transform_choices(("none", "hadamard"), ("none", "auto"), ("none", "channel")),
        top_k=(64, 256),
    )
    (layer,) = open_layers(StudyInputs(path, path, lengths="lengths", causal=True))
    fitted = fit_layer(layer, settings)
    here = measure_unit(layer, 1, settings, fitted)
    there = measure_unit(layer, 1, settings, fitted, "cuda")
    assert there.profiles == here.profiles
    assert torch.allclose(there.channel_errors, here.channel_errors, rtol=1e-5, atol=1e-9)
    for ours, theirs in zip(here.rows, there.rows, strict=True):
        for a, b in zip(
            unpack_rows(ours, settings.top_k), unpack_rows(theirs, settings.top_k), strict=True
        ):
            assert b.relative_l2 == pytest.approx(a.relative_l2, rel=1e-5, abs=1e-9)
            assert b.cosine == pytest.approx(a.cosine, abs=1e-7)
            for of_a, of_b in zip(a.top_k, b.top_k, strict=True):
                assert abs(of_b.recall - of_a.recall) <= 1 / of_a.kept
