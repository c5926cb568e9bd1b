"""Statistics of layers: what they are, that they add up, and that a study holds out its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdsa_quant.calibration.calibrate import calibrate
from sdsa_quant.calibration.file import read_calibration
from sdsa_quant.calibration.layer import LayerCalibration, Moments
from sdsa_quant.errors import InputError
from sdsa_quant.formats.rule_weights import rule_weights
from sdsa_quant.formats.transforms import hadamard
from sdsa_quant.study import run
from support.rule_cases import correlated


@pytest.fixture
def capture(tmp_path: Path, generator: torch.Generator) -> Path:
    """Two layers of three requests of 60, 50 and 40 keys, with 8 query rows each."""
    tensors = {"lengths": torch.tensor([60, 50, 40], dtype=torch.int32)}
    for layer in (3, 7):
        tensors[f"layers.{layer}.keys"] = (correlated(150, generator) + 1).bfloat16()
        tensors[f"layers.{layer}.queries"] = correlated(24, generator).bfloat16()
    path = tmp_path / "capture.safetensors"
    save_file(tensors, path)
    return path


def test_the_statistics_are_their_definitions(capture: Path, tmp_path: Path) -> None:
    written = calibrate(capture, capture, tmp_path / "stats.safetensors", lengths="lengths")
    read = read_calibration(tmp_path / "stats.safetensors")
    tensors = load_file(capture)
    assert [layer.name for layer in read.layers] == ["layers.3.keys", "layers.7.keys"]
    assert [each.keys for each in read.sources] == ["capture.safetensors"]
    for layer, same in zip(read.layers, written.layers, strict=True):
        keys = tensors[layer.name].double()
        rows = tensors[layer.name.replace("keys", "queries")].double()
        assert (layer.keys, layer.rows) == (150, 24)
        assert torch.allclose(layer.key_mean, keys.mean(0))
        assert torch.allclose(layer.key_covariance, torch.cov(keys.T, correction=0))
        assert torch.allclose(layer.query_covariance, rows.T @ rows / 24)
        assert layer.digest == same.digest
        rotated = hadamard(rows).double()
        expected = rotated.T @ rotated / 24
        weights = rule_weights((expected + expected.T) / 2).matrix
        assert torch.allclose(layer.key_weights("hadamard").matrix, weights, atol=1e-5)


def test_captures_add_up(capture: Path, tmp_path: Path) -> None:
    tensors = load_file(capture)
    halves = {"a": slice(0, 60), "b": slice(60, 150)}, {"a": slice(0, 10), "b": slice(10, 24)}
    for name in ("a", "b"):
        part = {}
        for layer in (3, 7):
            part[f"layers.{layer}.keys"] = tensors[f"layers.{layer}.keys"][halves[0][name]].clone()
            rows = tensors[f"layers.{layer}.queries"][halves[1][name]]
            part[f"layers.{layer}.queries"] = rows.clone()
        save_file(part, tmp_path / f"{name}.safetensors")
    whole = calibrate(capture, capture, tmp_path / "whole.safetensors", lengths="lengths")
    calibrate(tmp_path / "a.safetensors", tmp_path / "a.safetensors", tmp_path / "one")
    merged = calibrate(
        tmp_path / "b.safetensors",
        tmp_path / "b.safetensors",
        tmp_path / "both",
        merge=[tmp_path / "one"],
    )
    assert {each.keys for each in merged.sources} == {"a.safetensors", "b.safetensors"}
    for merged_layer, expected in zip(merged.layers, whole.layers, strict=True):
        assert (merged_layer.keys, merged_layer.rows) == (expected.keys, expected.rows)
        for name in ("key_mean", "key_covariance", "query_covariance"):
            assert torch.allclose(getattr(merged_layer, name), getattr(expected, name))


def test_a_request_is_measured_without_itself(capture: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "lengths": "lengths",
        "keys_pattern": "layers.*.keys",
        "queries_pattern": "layers.*.queries",
        "center": ("channel",),
        "rotate": ("hadamard",),
        "top_k": (10,),
    }
    formats = ("nvfp4-mixed", "nvfp4-search", "nvfp4-covariance", "nvfp4-covariance-mixed")
    before = run(capture, capture, tmp_path / "before", formats=formats, **options)
    overall = {each.format: each for each in before.results if each.layer is None}
    recalls = {name: each.accuracy.top_k[0].recall.mean for name, each in overall.items()}
    assert recalls["nvfp4-covariance-mixed"] > recalls["nvfp4-mixed"]
    calibrate(capture, capture, tmp_path / "stats", lengths="lengths")
    told = run(
        capture,
        capture,
        tmp_path / "told",
        formats=formats,
        calibration=tmp_path / "stats",
        **options,
    )
    assert told.inputs.calibration == tmp_path / "stats"
    assert told.results != before.results, "statistics of all requests are not those of the others"


def test_one_request_cannot_calibrate_itself(capture: Path, tmp_path: Path) -> None:
    tensors = load_file(capture)
    one = {"keys": tensors["layers.3.keys"], "queries": tensors["layers.3.queries"]}
    save_file(one, tmp_path / "one.safetensors")
    path = tmp_path / "one.safetensors"
    with pytest.raises(InputError, match="must have other requests with query rows than request 0"):
        run(path, path, tmp_path / "out", formats="nvfp4-covariance")
    stats = tmp_path / "stats"
    calibrate(capture, capture, stats, lengths="lengths")
    with pytest.raises(InputError, match=r"has no layer keys; there are layers\.3\.keys"):
        run(
            path, path, tmp_path / "out", formats="nvfp4-covariance", calibration=tmp_path / "stats"
        )


def test_wrong_files_are_named(capture: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a calibration: format must be sdsa-calibration"):
        read_calibration(capture)
    stats = tmp_path / "stats"
    calibrate(capture, capture, stats, lengths="lengths")
    with pytest.raises(InputError, match="exists already"):
        calibrate(capture, capture, stats, lengths="lengths")
    tensors = load_file(stats)
    metadata = {"format": "sdsa-calibration", "version": "1", "sources": "[]"}
    damages = {
        "must be F64": {"layers.3.keys.key_mean": torch.zeros(64, dtype=torch.float64)},
        "must be finite": {"layers.3.keys.key_mean": torch.full((128,), torch.nan).double()},
        "must be at least 1": {"layers.3.keys.counts": torch.tensor([0, 3])},
        "must be symmetric": {"layers.3.keys.key_covariance": -torch.eye(128).double()},
    }
    for message, damage in damages.items():
        save_file({**tensors, **damage}, tmp_path / "damaged", metadata=metadata)
        with pytest.raises(InputError, match=message):
            read_calibration(tmp_path / "damaged")
    save_file(tensors, tmp_path / "damaged", metadata={**metadata, "sources": "{"})
    with pytest.raises(InputError, match="no readable list of sources"):
        read_calibration(tmp_path / "damaged")
    with pytest.raises(InputError, match="needs keys and query rows, got 0 and 0"):
        LayerCalibration.of("layer", Moments())
