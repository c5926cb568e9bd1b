"""The answer of a study: its first line, the goal, the choice by layer, the command it gives."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.errors import InputError
from sdsa_quant.study import Goal, StudyReport
from support.command_line import Run
from support.studies import FAST

LAYERS, K = (0, 3, 11), 32
OPTIONS = (
    *("--formats", "bf16,nvfp4,nvfp4-search,fp8,mxfp4", "--center", "none,channel"),
    *("--top-k", f"8,{K}", "--no-plots", *FAST),
)


@pytest.fixture
def capture(tmp_path: Path, generator: torch.Generator) -> Path:
    """Layers of growing difficulty: the larger a common offset, the fewer bits are left."""
    tensors = {}
    for index, layer in enumerate(LAYERS):
        keys = torch.randn(400, 128, generator=generator)
        keys += 6 * index * torch.randn(128, generator=generator)
        tensors[f"layers.{layer}.keys"] = keys.bfloat16()
        tensors[f"layers.{layer}.queries"] = torch.randn(16, 128, generator=generator).bfloat16()
    save_file(tensors, tmp_path / "capture.safetensors")
    return tmp_path / "capture.safetensors"


def _study(sdsa: Run, capture: Path, *options: str) -> tuple[str, StudyReport]:
    output = capture.parent / "report"
    files = ("study", str(capture), str(capture), "-o", str(output))
    done = sdsa(*files, *OPTIONS, "--force", *options)
    assert done.exit_code == 0, done.stderr
    return done.stdout, StudyReport.read(output)


def _mean(report: StudyReport, layer: str | None, label: str) -> float:
    (found,) = (each for each in report.of_layer(layer) if each.label == label)
    mean = found.recall(1).mean
    assert mean is not None
    return mean


def test_the_first_line_is_the_answer(sdsa: Run, capture: Path) -> None:
    stdout, report = _study(sdsa, capture)
    verdict = report.verdict
    assert verdict.setting is not None
    assert verdict.fp8 is not None
    assert (verdict.k, verdict.goal, verdict.reaches_goal, verdict.by_layer) == (K, None, None, ())
    assert verdict.setting.format.startswith("nvfp4")
    assert (verdict.fp8.label, verdict.fp8.bytes_per_key) == ("fp8", 132)
    for each in (verdict.setting, verdict.fp8):
        means = {layer.name: _mean(report, layer.name, each.label) for layer in report.layers}
        assert each.recall == _mean(report, None, each.label)
        assert each.worst_recall == min(means.values()) == means[each.worst_layer]
    sentence = stdout.replace("\n", " ").partition(".  ")[0]
    assert stdout.startswith(f"Take {verdict.setting.label} (72 bytes a key) keeps recall@{K}")
    assert f"in the worst layer, {verdict.fp8.worst_layer}" in sentence
    html = (capture.parent / "report" / "report.html").read_text()
    assert html.index(f"Take {verdict.setting.label}") < html.index("<table")


def test_the_command_of_the_answer_builds_caches(
    sdsa: Run, capture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(capture.parent)
    monkeypatch.setenv("COLUMNS", "500")
    stdout, _ = _study(sdsa, capture, "--goal", f"recall@{K}=0.5")
    (line,) = (line for line in stdout.splitlines() if line.startswith("Build it: "))
    done = sdsa(*shlex.split(line.removeprefix("Build it: "))[1:])
    assert done.exit_code == 0, done.stderr
    made = sorted(path.name for path in (capture.parent / "caches").iterdir())
    assert made == [f"layers.{layer}.keys.safetensors" for layer in (0, 11, 3)]


def test_a_goal_chooses_for_each_layer(sdsa: Run, capture: Path) -> None:
    _, report = _study(sdsa, capture)
    settings = [each for each in report.overall if each.format.startswith(("nvfp4", "fp8"))]
    bars = {0.5, 0.999999, *(_mean(report, layer.name, "fp8") for layer in report.layers)}
    chosen = set()
    for bar in sorted(bars):
        verdict = report.judged(Goal(K, bar)).verdict
        reaching = [
            each.bytes_per_key
            for each in settings
            if all(_mean(report, layer.name, each.label) >= bar for layer in report.layers)
        ]
        assert verdict.reaches_goal == bool(reaching)
        assert verdict.setting is not None
        if reaching:
            assert verdict.setting.bytes_per_key == min(reaching)
            assert verdict.setting.worst_recall >= bar
        for choice in verdict.by_layer:
            fitting = [
                each.bytes_per_key
                for each in settings
                if _mean(report, choice.layer, each.label) >= bar
            ]
            assert choice.bytes_per_key == min(fitting, default=256)
            assert choice.format == "bf16" or choice.recall == _mean(
                report, choice.layer, choice.label
            )
        chosen |= {choice.format for choice in verdict.by_layer}
        assert verdict.key_bytes("chosen") == sum(each.bytes_per_key for each in verdict.by_layer)
    assert {"fp8", "bf16"} < chosen, "bars are meant to need more than NVFP4 in some layer"
    with pytest.raises(InputError, match="goal must be of a k that is studied, 8, 32, got 64"):
        report.judged(Goal(64, 0.9))


def test_goals_of_the_command_line(sdsa: Run, capture: Path) -> None:
    missed, report = _study(sdsa, capture, "--goal", f"recall@{K}=1")
    assert report.verdict.goal == Goal(K, 1.0)
    assert missed.startswith(f"Goal missed, recall@{K} of 1 in every layer: nothing measured does")
    assert "it costs 1.45 GiB more than FP8" in " ".join(missed.split())
    folder = capture.parent / "report"
    before = (folder / "report.json").read_bytes()
    options = ("--no-plots", "--batch", "2", "--context", "1024")
    met = sdsa("report", str(folder), "--goal", f"recall@{K}=0.01", *options).stdout
    assert met.startswith(f"Goal met, recall@{K} of 0.01 in every layer")
    text = " ".join(met.split())
    assert "For 2 requests of 1,024 keys in 3 layers: 432 KiB, where FP8 takes 792 KiB" in text
    assert "it saves 360 KiB over FP8" in text
    assert (folder / "report.json").read_bytes() == before
    for goal, fault in (
        ("recall@64=0.9", "k must be one of those studied, 8, 32, got 64"),
        ("recall@32=2", "--goal must be like recall@2048=0.98, up to 1"),
        ("recall@32=1.2.3", "--goal must be like"),
        ("mass@32=0.9", "--goal must be like"),
    ):
        refused = sdsa("report", str(folder), "--no-plots", "--goal", goal)
        assert refused.exit_code == 2
        assert fault in refused.stderr
    assert sdsa("report", str(folder), "--no-plots", "--batch", "0").exit_code == 2


@pytest.mark.parametrize("more", [(), ("--markdown",)])
def test_a_goal_that_no_row_is_long_enough_for_chooses_nothing(
    sdsa: Run, capture: Path, more: tuple[str, ...]
) -> None:
    output = capture.parent / "short"
    options = ("--formats", "nvfp4", "--top-k", "2048", "--no-plots", *FAST, *more)
    goal = ("--goal", "recall@2048=0.5")
    done = sdsa("study", str(capture), str(capture), "-o", str(output), *options, *goal)
    said = "No choice: recall@2,048 is undefined, no row is longer than 2,048 keys."
    assert done.stdout.startswith(said), done.stderr
    for word in ("Choice by layer", "Smallest setting", "saves"):
        assert word not in done.stdout
    assert said in (output / "report.html").read_text()
    verdict = StudyReport.read(output).verdict
    assert (verdict.setting, verdict.reaches_goal, verdict.by_layer) == (None, None, ())
    again = sdsa("report", str(output), "--no-plots", *goal, *more[:1])
    assert again.stdout.startswith(said), again.stderr


def test_means_of_more_keys_than_any_request_has_are_refused(
    sdsa: Run, tmp_path: Path, generator: torch.Generator
) -> None:
    tensors = {
        "keys": torch.randn(400, 128, generator=generator).bfloat16(),
        "queries": torch.randn(8, 2, 128, generator=generator).bfloat16(),
    }
    path, output = tmp_path / "heads.safetensors", tmp_path / "pooled"
    save_file(tensors, path)
    options = (*OPTIONS, "--score", "relu-sum", "--causal", "--mean-pool", "401")
    done = sdsa("study", str(path), str(path), "-o", str(output), *options)
    assert done.exit_code == 2
    message = " ".join(done.stderr.split())
    assert "--mean-pool is larger than every request: 401, where the longest has 400" in message


def test_statistics_of_a_file_called_as_the_studied_one_are_remarked_on(
    sdsa: Run, capture: Path
) -> None:
    files, statistics = (str(capture), str(capture)), str(capture.parent / "statistics.safetensors")
    assert sdsa("calibrate", *files, "-o", statistics).exit_code == 0
    options = ("--formats", "nvfp4-covariance", "--top-k", "8", "--no-plots", *FAST)
    output = ("-o", str(capture.parent / "report"))
    done = sdsa("study", *files, *output, *options, "--calibration", statistics)
    assert done.exit_code == 0, done.stderr
    note = " ".join(done.stderr.split())
    assert "was made from capture.safetensors, as what is studied is called" in note
    folder = capture.parent / "folder"
    folder.mkdir()
    capture.rename(folder / capture.name)
    inside = sdsa(
        "study", *[str(folder)] * 2, *output, *options, "--force", "--calibration", statistics
    )
    assert "was made from capture.safetensors" in " ".join(inside.stderr.split())


def test_markdown(sdsa: Run, capture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # lines stay whole
    stdout, report = _study(sdsa, capture, "--markdown", "--goal", f"recall@{K}=0.9")
    tables: list[list[str]] = [[]]
    for line in stdout.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
            tables[-1].append(line)
        elif tables[-1]:
            tables.append([])
    tables = [each for each in tables if each]
    assert [len({line.count(" | ") for line in each}) for each in tables] == [1] * 4
    values: Any = [line.split(" | ") for line in tables[1][2:]]
    assert [cells[0].removeprefix("| ") for cells in values] == [
        f"layers.{layer}.keys" for layer in LAYERS
    ]
    assert len(tables[2]) == 2 + len(report.layers)


def test_shards_are_merged_with_a_goal(sdsa: Run, capture: Path) -> None:
    _, whole = _study(sdsa, capture, "--goal", f"recall@{K}=0.9")
    output = capture.parent / "sharded"
    arguments = ("study", str(capture), str(capture), "-o", str(output), *OPTIONS)
    for shard in (1, 0):
        done = sdsa(*arguments, "--shard", f"{shard}/2")
        assert done.exit_code == 0, done.stderr
        assert re.match(r"Measured: [12] units? of 3\. Once every shard has been: ", done.stdout)
        assert done.stderr == ""
    merged = sdsa("study", "--merge", str(output), "--no-plots", "--goal", f"recall@{K}=0.9")
    assert merged.exit_code == 0, merged.stderr
    assert merged.stdout.startswith("Goal ")
    report = StudyReport.read(output)
    assert (report.results, report.verdict) == (whole.results, whole.verdict)
    again = sdsa("study", "--merge", str(output))
    assert again.exit_code == 2
    assert "give --shard 0/8 to measure a part of one first" in again.stderr
    for options, fault in (
        (("study", "--merge", str(output), str(capture)), "--merge stands without"),
        (("study", str(capture)), "KEYS, QUERIES and -o must be given"),
        ((*arguments, "--shard", "2/2"), "--shard must be a number from 0 and a count"),
        ((*arguments, "--shard", "0/2", "--force"), "--shard stands without --force"),
    ):
        refused = sdsa(*options)
        assert refused.exit_code == 2
        assert fault in refused.stderr
