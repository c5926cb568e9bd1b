"""A study in one call: what it returns, writes, resumes and refuses, and its report's fields."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant import study
from sdsa_quant.errors import InputError, SdsaError
from sdsa_quant.files.typed_json import field_docs, json_schema, to_json
from sdsa_quant.study import StudyReport, work
from support.studies import LENGTHS, save_layers


@pytest.fixture
def layers(tmp_path: Path, generator: torch.Generator) -> Path:
    return save_layers(tmp_path / "layers.safetensors", generator)


def run(layers: Path, output: Path, **changes: Any) -> StudyReport:
    options: dict[str, Any] = {"lengths": "*.lengths", "formats": ["nvfp4"], "top_k": [5]}
    return study.run(layers, layers, output, **{**options, **changes})


def same(report: StudyReport) -> StudyReport:
    """The report without what differs from run to run."""
    timing = dataclasses.replace(report.timing, seconds=0.0, workers=1)
    environment = dataclasses.replace(report.environment, date="", command_line="")
    return dataclasses.replace(report, timing=timing, environment=environment)


def test_a_study_in_five_lines(fixtures: Path, tmp_path: Path) -> None:
    path = fixtures / "smollm2-layer12.safetensors"
    report = study.run(str(path), str(path), str(tmp_path), lengths="lengths", formats=["nvfp4"])
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert report == StudyReport.read(tmp_path) == StudyReport.read(tmp_path / "report.json")
    recall = report.results[0].recall(0).mean
    assert recall == pytest.approx(0.8906, abs=5e-5)  # of the rows longer than 64


def test_what_was_measured_is_not_measured_again(
    layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(layers, tmp_path / "whole")
    real, measured = work.measure_unit, []

    def stop_after_seven(*args: Any) -> Any:
        measured.append(args[1])
        if len(measured) == 7:
            raise InputError("stopped")
        return real(*args)

    monkeypatch.setattr(work, "measure_unit", stop_after_seven)
    with pytest.raises(InputError, match="stopped"):
        run(layers, tmp_path / "cut")
    assert len(list((tmp_path / "cut" / "work").glob("layer-*"))) == 6
    continued = run(layers, tmp_path / "cut")
    assert len(measured) - 7 == 3 * len(LENGTHS) - 6
    assert same(continued) == same(whole)
    assert not (tmp_path / "cut" / "work").exists()


def test_a_failed_study_leaves_no_empty_work_folder(layers: Path, tmp_path: Path) -> None:
    with pytest.raises(SdsaError):
        run(layers, tmp_path / "out", positions="*.lengths")
    assert not (tmp_path / "out" / "work").exists()


def test_a_report_is_kept_without_force(layers: Path, tmp_path: Path) -> None:
    run(layers, tmp_path)
    with pytest.raises(InputError, match=r"report.json: exists already; give force=True"):
        run(layers, tmp_path, formats=["fp8"])
    assert StudyReport.read(tmp_path).formats == ["nvfp4"]
    assert run(layers, tmp_path, formats=["fp8"], force=True).formats == ["fp8"]


def test_a_name_alone_is_one_name(layers: Path, tmp_path: Path) -> None:
    report = run(layers, tmp_path, formats="fp8", rotate="hadamard")
    assert (report.formats, report.transforms) == (["fp8"], ["hadamard"])


def test_progress_is_told_from_nothing_to_all(layers: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    run(layers, tmp_path, progress=lambda done, total: told.append((done, total)))
    assert len(told) == 1 + 3 * len(LENGTHS)
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1] == told[0][1]
    assert told == sorted(told)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"formats": ["int4"]}, "format must be one of bf16"),
        ({"formats": []}, "formats must be given, each once"),
        ({"top_k": [5, 5]}, "top_k must be distinct numbers from 1"),
        ({"softmax_scale": 0.0}, "softmax_scale must be positive and finite"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"requests": [0]}, "requests must name the request of each of the"),
        ({"rows_per_group": 3}, "give rows_per_group to say how many rows a group has"),
        ({"queries_pattern": "*.lengths"}, "must be unquantized query rows"),
    ],
)
def test_refuses_in_words_of_python(
    layers: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words) as refused:
        run(layers, tmp_path / "out", **changes)
    assert "--" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [1e30, 2.0**63, 2.0**-80])
def test_squares_beyond_float32_are_measured(tmp_path: Path, size: float) -> None:
    path = tmp_path / "large.safetensors"
    keys = torch.randn(20, 128, generator=torch.Generator().manual_seed(1)) * size
    save_file({"keys": keys, "queries": torch.full((2, 128), 1 / size)}, path)
    options = {"formats": ["nvfp4", "fp8"], "top_k": [5]}
    nvfp4, fp8, *_ = study.run(path, path, tmp_path / "out", **options).results
    assert nvfp4.key_error == pytest.approx(1.0, abs=1e-9)  # all saturated, or all flushed
    assert fp8.key_error == pytest.approx(0.0265, abs=0.002)  # as of keys of any size
    assert fp8.channel_errors is not None


@pytest.mark.parametrize("causal", [False, True])
def test_positions_make_a_study_causal(tmp_path: Path, causal: bool) -> None:
    path = tmp_path / "at.safetensors"
    rows, at = torch.randn(3, 128), torch.tensor([3, 9, 6])
    save_file({"keys": torch.randn(10, 128), "queries": rows, "at": at}, path)
    options = {"positions": "at", "formats": "nvfp4", "top_k": [2]}
    report = study.run(path, path, tmp_path / "out", causal=causal, **options)
    assert report.inputs.causal


# The report.


def test_a_report_is_the_same_after_reading(layers: Path, tmp_path: Path) -> None:
    report = run(layers, tmp_path, rotate=["none", "hadamard"], formats=["nvfp4", "fp8"])
    text = json.loads((tmp_path / "report.json").read_text())
    assert to_json(report) == text
    assert [result.label for result in report.overall] == [
        "nvfp4",
        "fp8",
        "nvfp4, hadamard",
        "fp8, hadamard",
    ]
    assert [each.layer for each in report.by_layer("fp8", "hadamard")] == [
        layer.name for layer in report.layers
    ]


def parts(form: Any, found: dict[str, type]) -> dict[str, type]:
    """Every dataclass that a type is made of, by name."""
    is_part = isinstance(form, type) and dataclasses.is_dataclass(form)
    if is_part and form.__name__ not in found:
        found[form.__name__] = form
        for hint in get_type_hints(form).values():
            parts(hint, found)
    for argument in get_args(form):
        parts(argument, found)
    return found


@pytest.mark.parametrize("part", parts(StudyReport, {}).values(), ids=lambda part: part.__name__)
def test_every_field_has_its_description(part: type) -> None:
    assert list(field_docs(part)) == [field.name for field in dataclasses.fields(part)]


def test_the_schema_of_a_report_names_its_version() -> None:
    schema = json_schema(StudyReport)
    assert schema["properties"]["schema"]["const"] == "sdsa.study/5"
    assert set(schema["$defs"]) == set(parts(StudyReport, {})) - {"StudyReport"}


def test_a_report_is_read_without_torch(layers: Path, tmp_path: Path) -> None:
    run(layers, tmp_path)
    script = (
        "import sys\nfrom sdsa_quant import study\n"
        f"report = study.StudyReport.read({str(tmp_path)!r})\n"
        "print(len(report.results), 'torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "4 False\n"
