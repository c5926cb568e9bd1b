"""Caches by other rules and of transformed keys, from quantize-cache through inspect to score."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sdsa_quant import dequantize_nvfp4, gather_keys, open_cache, quantize_nvfp4
from sdsa_quant.errors import CacheFormatError, InputError
from sdsa_quant.files.cache_file import CacheWriter
from sdsa_quant.files.cache_header import CacheHeader
from sdsa_quant.formats.key_formats import KEY_FORMATS
from sdsa_quant.formats.transforms import TransformChoice, hadamard
from sdsa_quant.study.inputs import StudyInputs
from sdsa_quant.study.layers import open_layers
from sdsa_quant.study.settings import StudySettings
from sdsa_quant.study.unit import fit_layer, measure_unit, unpack_rows
from support.command_line import Run

TRANSFORMS = {
    "hadamard": TransformChoice("hadamard"),
    "gain": TransformChoice(gain="auto"),
    "center": TransformChoice(center="channel"),
    "all": TransformChoice("hadamard", "2^-3", "channel"),
}


@pytest.fixture
def files(tmp_path: Path, generator: torch.Generator) -> Path:
    """Keys of three requests with channel offsets, and two query rows of each."""
    keys = torch.randn(700, 128, generator=generator) + 3 * torch.randn(128, generator=generator)
    tensors = {
        "keys": keys.bfloat16(),
        "queries": torch.randn(6, 128, generator=generator).bfloat16(),
        "lengths": torch.tensor([400, 170, 130], dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "files.safetensors", {"rows_per_group": "2"})
    return tmp_path / "files.safetensors"


def options_of(choice: TransformChoice) -> tuple[str, ...]:
    return "--rotate", choice.rotate, "--gain", choice.gain, "--center", choice.center


def write_cache(sdsa: Run, files: Path, *options: str) -> Path:
    path = files.parent / "cache.safetensors"
    where = ("-o", path, "--lengths", "lengths", "--device", "cpu", "--force")
    sdsa("quantize-cache", files, *where, *options).is_clean()
    return path


def score(sdsa: Run, cache: Path, files: Path, *options: str) -> dict[str, Any]:
    against = ("--queries", files, "--baseline", files, "--device", "cpu", "--top-k", "16,64")
    outcome = sdsa("score", cache, *against, "--json", *options)
    outcome.is_clean()
    return outcome.document


@pytest.mark.parametrize("values", ["nvfp4", "bf16"])
@pytest.mark.parametrize("choice", TRANSFORMS.values(), ids=TRANSFORMS)
def test_scores_are_those_of_the_study(
    sdsa: Run, files: Path, choice: TransformChoice, values: str
) -> None:
    report = score(sdsa, write_cache(sdsa, files, "--format", values, *options_of(choice)), files)
    settings = StudySettings(formats=(values,), transforms=(choice,), top_k=(16, 64))
    (layer,) = open_layers(StudyInputs(files, files, lengths="lengths"))
    fitted = fit_layer(layer, settings)
    assert report["cache"]["gain"] == fitted[0].gain
    for request in range(3):
        unit = measure_unit(layer, request, settings, fitted)
        for row in unpack_rows(unit.rows[0], settings.top_k):
            theirs = report["rows"][row.row]["accuracy"]
            # The kernel adds in FP32, the study in FP64.
            assert theirs["relative_l2"] == pytest.approx(row.relative_l2, rel=0.02, abs=2e-6)
            assert theirs["cosine"] == pytest.approx(row.cosine, abs=1e-6)
            recalls = [each["recall"] for each in theirs["top_k"]]
            wanted = [each.recall for each in row.top_k]
            assert all(abs(a - b) <= 1 / 16 for a, b in zip(recalls, wanted, strict=True))


def test_a_transform_helps_where_it_should(sdsa: Run, files: Path) -> None:
    plain = score(sdsa, write_cache(sdsa, files), files)["accuracy"]["relative_l2"]["mean"]
    both = options_of(TransformChoice("hadamard", "none", "channel"))
    better = score(sdsa, write_cache(sdsa, files, *both), files)["accuracy"]["relative_l2"]["mean"]
    assert better < 0.8 * plain


def test_stored_keys_are_the_transformed_ones(sdsa: Run, files: Path) -> None:
    cache = open_cache(write_cache(sdsa, files, *options_of(TRANSFORMS["all"])))
    keys = load_file(files)["keys"]
    mean = keys.double().mean(0).float()
    assert cache.transform.mean is not None
    assert torch.equal(cache.transform.mean, mean)
    wanted = dequantize_nvfp4(*quantize_nvfp4(hadamard(keys.float() - mean) / 8))
    stored = torch.cat([gather_keys(cache.paged_keys(), request) for request in range(3)])
    assert torch.equal(stored, wanted)


def test_a_gain_undone_gives_the_same_bits(sdsa: Run, files: Path) -> None:
    scores = []
    for gain in ("none", "2^5"):
        cache = write_cache(sdsa, files, "--gain", gain)
        output = files.parent / f"scores{gain}.safetensors"
        where = ("--queries", files, "--device", "cpu", "-o", output)
        sdsa("score", cache, *where).is_clean()
        scores.append(load_file(output)["scores"])
    assert torch.equal(*scores)


def test_pieces_and_the_whole_agree(sdsa: Run, files: Path) -> None:
    cache = write_cache(sdsa, files, *options_of(TRANSFORMS["all"]))
    stored = []
    for name, chunk in (("whole", ()), ("pieces", ("--chunk", "1"))):
        output = files.parent / f"{name}.safetensors"
        where = ("--queries", files, "--device", "cpu", "-o", output)
        sdsa("score", cache, *where, *chunk).is_clean()
        stored.append(load_file(output)["scores"])
    assert torch.equal(*stored)
    assert stored[0][4, 130:].eq(-math.inf).all()


def test_the_rule_4over6(sdsa: Run, files: Path) -> None:
    path = write_cache(sdsa, files, "--rule", "4over6")
    cache = open_cache(path)
    assert (cache.header.rule, cache.header.metadata()["version"]) == ("4over6", "1")
    stored = torch.cat([gather_keys(cache.paged_keys(), request) for request in range(3)])
    wanted = KEY_FORMATS["nvfp4-4over6"].round_trip(load_file(files)["keys"])
    assert torch.equal(stored, wanted)
    assert score(sdsa, path, files)["cache"]["rule"] == "4over6"
    errors = []
    for rule in ("amax/6", "4over6"):
        where = ("-o", path, "--force", "--json", "--device", "cpu", "--rule", rule)
        errors.append(sdsa("quantize-cache", files, *where).document["caches"][0]["relative_error"])
    assert errors[1] < 0.98 * errors[0]


def test_inspect_and_reports_name_the_transform(sdsa: Run, files: Path) -> None:
    where = ("-o", files.parent / "cache.safetensors", "--lengths", "lengths", "--device", "cpu")
    outcome = sdsa("quantize-cache", files, *where, *options_of(TRANSFORMS["all"]))
    outcome.is_clean()
    words = "center + hadamard + gain 0.125"
    assert words in outcome.stdout
    assert words in sdsa("inspect", files.parent / "cache.safetensors").stdout
    shown = sdsa("score", files.parent / "cache.safetensors", "--queries", files, "--device", "cpu")
    assert words in shown.stdout
    record = sdsa(
        "quantize-cache", files, *where, "--force", "--json", *options_of(TRANSFORMS["all"])
    ).document["caches"][0]
    assert (record["rotate"], record["gain"], record["center"]) == ("hadamard", 0.125, "channel")


def edit_metadata(path: Path, changes: dict[str, str | None]) -> None:
    """Replace header fields in place; None removes one. Tensor data stays where it is."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    for name, value in changes.items():
        if value is None:
            del header["__metadata__"][name]
        else:
            header["__metadata__"][name] = value
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "4"}, "header field version must be 1 or 2 or 3, got '4'"),
        ({"version": "1"}, "header field rotate goes with version 2"),
        ({"rotate": "givens"}, "header field rotate must be none or hadamard, got 'givens'"),
        ({"rotate": None}, "header field rotate is missing"),
        ({"center": "row"}, "header field center must be none or channel, got 'row'"),
        ({"gain": "3.0"}, "header field gain must be a power of two, got '3.0'"),
        ({"gain": "x"}, "header field gain must be a power of two, got 'x'"),
        ({"gain": None}, "header field gain must be a power of two, got ''"),
        ({"rule": "amax/4"}, "header field rule must be amax/6 or 4over6, got 'amax/4'"),
    ],
)
def test_an_unknown_transform_is_refused(
    sdsa: Run, files: Path, changes: dict[str, str | None], words: str
) -> None:
    path = write_cache(sdsa, files, *options_of(TRANSFORMS["all"]))
    edit_metadata(path, changes)
    with pytest.raises(CacheFormatError, match=words):
        open_cache(path)
    sdsa("score", path, "--queries", files).fails_with(2, words)


def test_plain_caches_stay_version_1(sdsa: Run, files: Path) -> None:
    with safe_open(write_cache(sdsa, files), "pt") as file:
        metadata = file.metadata()
    assert metadata["version"] == "1"
    assert not {"rotate", "gain", "center"} & set(metadata)


def test_a_missing_mean_is_refused(sdsa: Run, files: Path) -> None:
    path = write_cache(sdsa, files, *options_of(TRANSFORMS["gain"]))
    edit_metadata(path, {"center": "channel"})
    with pytest.raises(CacheFormatError, match="tensor key_mean is missing"):
        open_cache(path)


def test_a_mean_that_is_not_finite_is_invalid(sdsa: Run, files: Path) -> None:
    path = write_cache(sdsa, files, *options_of(TRANSFORMS["center"]))
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["key_mean"][7] = math.nan
    save_file(tensors, path, metadata)
    sdsa("inspect", path).fails_with(1, "key_mean must be finite")


def test_a_transformed_cache_is_no_baseline(sdsa: Run, files: Path) -> None:
    cache = write_cache(sdsa, files)
    plain = cache.rename(files.parent / "plain.safetensors")
    other = write_cache(sdsa, files, "--format", "bf16", "--rotate", "hadamard")
    outcome = sdsa("score", plain, "--queries", files, "--baseline", other)
    outcome.fails_with(2, "but is a cache of transformed keys")


def test_refuses_options_that_do_not_go_together(sdsa: Run, files: Path) -> None:
    where = ("-o", files.parent / "cache.safetensors", "--device", "cpu")
    run = ("quantize-cache", files, *where)
    sdsa(*run, "--gain", "3").fails_with(2, "gain must be none, auto or a power of two")
    sdsa(*run, "--format", "bf16", "--rule", "4over6").fails_with(
        2, "--rule 4over6 needs format nvfp4"
    )
    both = ("--nonfinite", "saturate", "--rotate", "hadamard")
    sdsa(*run, *both).fails_with(2, "keys must be finite to be transformed (hadamard)")
    assert not (files.parent / "cache.safetensors").exists()


@pytest.mark.parametrize("choice", TRANSFORMS.values(), ids=TRANSFORMS)
def test_keys_that_are_not_finite_are_named(
    sdsa: Run, files: Path, choice: TransformChoice
) -> None:
    tensors = load_file(files)
    tensors["keys"][450, 9] = math.nan
    save_file(tensors, files)
    where = ("-o", files.parent / "cache.safetensors", "--lengths", "lengths", "--device", "cpu")
    outcome = sdsa("quantize-cache", files, *where, *options_of(choice))
    outcome.fails_with(2, "tensor keys must be finite, got nan in key 50 of request 1, dimension 9")


def test_headers_and_means_go_together(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="key_mean must be given with center channel"):
        CacheWriter(tmp_path / "a", CacheHeader("nvfp4", center="channel"), [3])
    with pytest.raises(InputError, match="key_mean must be given with center channel"):
        CacheWriter(tmp_path / "a", CacheHeader("nvfp4"), [3], key_mean=torch.zeros(128))
    with pytest.raises(InputError, match="rotate must be one of none, hadamard"):
        CacheHeader("nvfp4", rotate="givens")
    with pytest.raises(InputError, match="gain must be"):
        CacheHeader("nvfp4", gain=3.0)
    assert list(tmp_path.iterdir()) == []
