"""`sdsa calibrate`, and caches by the rules that search and that need its statistics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sdsa_quant.calibration.file import read_calibration
from sdsa_quant.errors import InputError
from sdsa_quant.files.cache_file import open_cache
from sdsa_quant.files.cache_header import CacheHeader
from sdsa_quant.formats.nvfp4 import quantize_nvfp4
from sdsa_quant.formats.transforms import hadamard
from support.command_line import Run
from support.rule_cases import correlated


@pytest.fixture
def capture(tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers in capture.safetensors, of 100 keys and 16 rows each."""
    tensors = {}
    for layer in (0, 1):
        tensors[f"layers.{layer}.keys"] = (correlated(100, generator) + 1).bfloat16()
        tensors[f"layers.{layer}.queries"] = correlated(16, generator).bfloat16()
    save_file(tensors, tmp_path / "capture.safetensors")
    monkeypatch.chdir(tmp_path)


STATS = ("calibrate", "capture.safetensors", "capture.safetensors", "-o", "stats.safetensors")
BUILD = ("quantize-cache", "capture.safetensors", "--keys", "layers.1.keys")
COVARIANCE = (*BUILD, "--rule", "covariance", "--calibration", "stats.safetensors")


@pytest.mark.usefixtures("capture")
def test_a_cache_names_its_statistics_and_holds_what_the_rule_makes(sdsa: Run) -> None:
    document = json.loads(sdsa(*STATS, "--json").stdout)
    assert [(each["name"], each["keys"], each["rows"]) for each in document["layers"]] == [
        ("layers.0.keys", 100, 16),
        ("layers.1.keys", 100, 16),
    ]
    digest = document["layers"][1]["digest"]
    how = ("--rotate", "hadamard", "--center", "channel", "-o", "cache.safetensors", "--json")
    built = json.loads(sdsa(*COVARIANCE, *how).stdout)
    assert (built["caches"][0]["rule"], built["caches"][0]["calibration"]) == ("covariance", digest)

    with safe_open("cache.safetensors", "pt") as file:
        metadata = file.metadata()
        pages = file.get_tensor("pages")
    assert (metadata["version"], metadata["calibration"]) == ("3", digest)
    layer = read_calibration("stats.safetensors").layer("layers.1.keys")
    with safe_open("capture.safetensors", "pt") as file:
        keys = file.get_tensor("layers.1.keys")
    moved = hadamard(keys.float() - layer.key_mean.float())
    codes, scales = quantize_nvfp4(moved, rule="covariance", weights=layer.key_weights("hadamard"))
    assert torch.equal(pages[:, :4096].reshape(-1, 64)[:100], codes)
    assert torch.equal(pages[:, 4096:].reshape(-1, 8)[:100], scales.view(torch.uint8))
    header = open_cache("cache.safetensors").header
    assert (header.rule, header.calibration) == ("covariance", digest)
    sdsa("inspect", "cache.safetensors").is_clean()
    query = ("--query-name", "layers.1.queries", "--requests", ",".join("0" * 16))
    sdsa("score", "cache.safetensors", "--queries", "capture.safetensors", *query).is_clean()


@pytest.mark.usefixtures("capture")
def test_a_rule_and_its_statistics_go_together(sdsa: Run) -> None:
    sdsa(*STATS).is_clean()
    output = ("-o", "cache.safetensors")
    without = sdsa(*BUILD, "--rule", "covariance", *output)
    assert without.exit_code == 2
    assert "--calibration must be given for the rule covariance" in without.stderr
    surplus = sdsa(*BUILD, "--calibration", "stats.safetensors", *output)
    assert surplus.exit_code == 2
    over_stats = sdsa(*COVARIANCE, "-o", "stats.safetensors", "--force")
    assert over_stats.exit_code == 2
    assert not Path("cache.safetensors").exists()


@pytest.mark.usefixtures("capture")
def test_search_has_version_3_and_merging_adds(sdsa: Run) -> None:
    sdsa(*BUILD, "--rule", "search", "-o", "cache.safetensors").is_clean()
    header = open_cache("cache.safetensors").header
    assert (header.rule, header.calibration) == ("search", "none")
    assert header.metadata()["version"] == "3"
    sdsa(*STATS).is_clean()
    sdsa(*STATS[:-1], "both.safetensors", "--merge", "stats.safetensors").is_clean()
    assert read_calibration("both.safetensors").layers[0].keys == 200


def test_headers_of_version_3() -> None:
    digest = "0123456789abcdef" * 4
    header = CacheHeader("nvfp4", rule="covariance", calibration=digest, rotate="hadamard")
    assert CacheHeader.from_metadata(header.metadata()) == header
    with pytest.raises(InputError, match="must be given for the rule covariance"):
        CacheHeader("nvfp4", rule="covariance").metadata()
    with pytest.raises(InputError, match="must be a SHA-256 digest"):
        CacheHeader("nvfp4", calibration=digest)
    for field, value in (("version", "1"), ("calibration", "x"), ("rule", "amax/6")):
        with pytest.raises(InputError, match="header field"):
            CacheHeader.from_metadata({**header.metadata(), field: value})


@pytest.mark.usefixtures("capture")
def test_score_quantizes_query_rows_with_the_statistics_of_the_cache(
    sdsa: Run, generator: torch.Generator
) -> None:
    sdsa(*STATS)
    sdsa(*COVARIANCE, "--rotate", "hadamard", "--center", "channel", "-o", "cache.safetensors")
    query = ("--queries", "capture.safetensors", "--query-name", "layers.1.queries")
    how = [*query, "--rows-per-group", "8", "--requests", "0,0", "--json"]
    how += ["--baseline", "capture.safetensors", "--keys", "layers.1.keys"]
    plain = sdsa("score", "cache.safetensors", *how)
    calibrated = sdsa("score", "cache.safetensors", *how, "--calibration", "stats.safetensors")
    documents = [json.loads(each.stdout) for each in (plain, calibrated)]
    assert documents[1]["inputs"]["calibration"] == "stats.safetensors"
    errors = [each["accuracy"]["relative_l2"]["mean"] for each in documents]
    assert errors[1] < 0.9 * errors[0]

    stats = ("--calibration", "stats.safetensors")
    refused = sdsa("score", "cache.safetensors", *how, *stats, "--query-format", "bf16")
    refused.fails_with(2, "--calibration is for NVFP4 query rows")
    sdsa(*BUILD, "--rule", "search", "-o", "other.safetensors")
    refused = sdsa("score", "other.safetensors", *how, *stats)
    refused.fails_with(2, "must have one layer for a cache that does not name its own, got 2")
    changed = {"layers.1.keys": correlated(100, generator).bfloat16()}
    changed["layers.1.queries"] = correlated(16, generator).bfloat16()
    save_file(changed, "changed.safetensors")
    sdsa("calibrate", "changed.safetensors", "changed.safetensors", "-o", "others.safetensors")
    refused = sdsa("score", "cache.safetensors", *how, "--calibration", "others.safetensors")
    refused.fails_with(2, "has no layer of the statistics that the cache was made with")


@pytest.mark.usefixtures("capture")
def test_a_study_says_that_statistics_may_contain_its_rows(sdsa: Run, tmp_path: Path) -> None:
    sdsa(*STATS)
    how = ["--formats", "nvfp4-covariance", "--top-k", "8", "--rotate", "none", "--no-plots"]
    how += ["--rows-per-group", "8", "--calibration", "stats.safetensors"]
    own = sdsa("study", "capture.safetensors", "capture.safetensors", "-o", "a", *how)
    assert own.exit_code == 0, own.stderr
    assert "stats.safetensors was made from capture.safetensors" in own.stderr
    (tmp_path / "capture.safetensors").rename(tmp_path / "other.safetensors")
    other = sdsa("study", "other.safetensors", "other.safetensors", "-o", "b", *how)
    assert other.exit_code == 0, other.stderr
    assert "was made from" not in other.stderr
