"""The commands that measure, on a GPU: what they report, and that it is about the GPU."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sdsa_kernels.testing.selection import reference_top_k
from support.command_line import program

pytestmark = pytest.mark.gpu

REAL = Path(__file__).parents[2] / "fixtures" / "smollm2-layer12.safetensors"


def run(folder: Path, *arguments: str | Path) -> str:
    answer = subprocess.run(
        program(*arguments), cwd=folder, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""
    return answer.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    made = ("-o", "cache.safetensors", "--lengths", "lengths", "--device", "cuda")
    run(folder, "quantize-cache", REAL, *made)
    return folder / "cache.safetensors"


@functools.cache
def score(cache: Path, *options: str) -> Any:
    """The report of a run, which takes seconds to start: each is made once."""
    words = ("score", cache, "--queries", REAL, "--baseline", REAL, "--graph-replay", "20")
    return json.loads(run(cache.parent, *words, *options, "--json"))


def test_quantize_cache_writes_the_cpus_bytes(cache: Path, tmp_path: Path) -> None:
    run(tmp_path, "quantize-cache", REAL, "-o", "cpu.st", "--lengths", "lengths", "--device", "cpu")
    assert cache.read_bytes() == (tmp_path / "cpu.st").read_bytes()


def test_score_replays_graphs_on_cold_pages(cache: Path) -> None:
    report = score(cache)
    timing = report["timing"]
    assert report["problem"]["device"] == "cuda:0"
    assert timing["replay"] == "graph"
    assert timing["repeats"] == 20
    assert timing["cold"] is True
    assert timing["rotation"]["calls"] > 100
    assert timing["rotation"]["touched_bytes"] > 2 * timing["rotation"]["l2_bytes"]
    assert 0.3 < timing["gather_share"] < 1.2
    assert 0 < timing["read_share"] < 1
    assert timing["cache_resident"] is False
    assert timing["host_us"] > 0
    assert timing["compile_seconds"] >= 0
    assert report["accuracy"]["top_k"]


def test_score_replays_selections(cache: Path, tmp_path: Path) -> None:
    # 40 keys: fewer than some rows have, more than others.
    options = ("--select", "40", "-o", str(tmp_path / "scores.st"))
    selection = score(cache, *options)["selection"]
    assert selection["backend"] in ("cute", "triton")
    times = selection["times"]
    assert (times["replay"], times["repeats"]) == ("graph", 20)
    assert 0 < times["top_k_us"] < times["scores_and_top_k_us"]
    stored = load_file(tmp_path / "scores.st")
    rows_per_group = stored["scores"].shape[0] // stored["context_lengths"].shape[0]
    expected = reference_top_k(
        stored["scores"], stored["context_lengths"].tolist(), 40, rows_per_group=rows_per_group
    )
    assert torch.equal(stored["top_k_indices"], expected)


def test_hot_replays_are_no_bandwidth_of_the_memory(cache: Path) -> None:
    timing = score(cache, "--hot")["timing"]
    assert timing["cold"] is False
    assert timing["cache_resident"] is True
    assert timing["read_share"] is None
    assert timing["rotation"]["calls"] == 1


def test_scores_on_the_gpu_agree_with_the_cpus(cache: Path) -> None:
    gpu = score(cache, "--device", "cuda")
    cpu = score(cache, "--device", "cpu")
    assert cpu["timing"]["replay"] == "eager"
    for ours, theirs in zip(gpu["accuracy"]["top_k"], cpu["accuracy"]["top_k"], strict=True):
        assert ours["recall"]["mean"] == pytest.approx(theirs["recall"]["mean"], abs=1e-3)


def test_bench(tmp_path: Path) -> None:
    shapes = ("--shape", "4,2,1000,4000", "--shape", "1,1,64")
    words = ("bench", *shapes, "--repeats", "10", "--calls-per-replay", "4", "--check")
    document = json.loads(run(tmp_path, *words, "--json"))
    assert len(document["results"]) == 6
    for result in document["results"]:
        assert result["replay"] == "graph"
        assert result["calls_per_replay"] == 4
        assert result["cold"] or result["rotation"]["calls"] == 512
        assert result["gather_us"] > 0
        assert result["backend"] != "torch"


def test_doctor_selects_on_the_gpu(tmp_path: Path) -> None:
    tests = json.loads(run(tmp_path, "doctor", "--self-test", "--json"))["selection_tests"]
    found = {test["backend"]: test["failure"] for test in tests if test["device"] == "cuda:0"}
    assert {"triton", "torch"} <= set(found)
    assert set(found.values()) == {None}


def test_doctor_says_what_score_does(tmp_path: Path, cache: Path) -> None:
    answers = json.loads(run(tmp_path, "doctor", "--json"))["backends"]
    picked = {
        answer["query_format"]: answer["auto"]
        for answer in answers
        if answer["device"] == "cuda:0" and answer["key_format"] == "nvfp4"
    }
    for query_format, backend in picked.items():
        problem = score(cache, "--query-format", query_format)["problem"]
        assert problem["backend"] == backend
