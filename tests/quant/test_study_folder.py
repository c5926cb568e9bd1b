"""The work folder of a study: whose results are taken, replaced and removed, and whose are not."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdsa_quant import study
from sdsa_quant.errors import InputError
from sdsa_quant.files.tensor_source import INDEX_SUFFIX
from sdsa_quant.study import records
from sdsa_quant.study.inputs import StudyInputs
from sdsa_quant.study.settings import StudySettings
from sdsa_quant.study.work import Study, measure_units, open_study

SETTINGS = StudySettings(formats=("nvfp4",), top_k=(5,))
LENGTHS = [40, 60]


@pytest.fixture
def capture(tmp_path: Path, generator: torch.Generator) -> Path:
    """A folder with keys, lengths, query rows and their requests, each in a file of its own."""
    folder = tmp_path / "capture"
    folder.mkdir()
    keys = torch.randn(100, 128, generator=generator)
    rows = torch.randn(4, 128, generator=generator)
    save_file({"keys": keys}, folder / "keys.safetensors")
    save_file({"lengths": torch.tensor(LENGTHS)}, folder / "lengths.safetensors")
    save_file({"queries": rows}, folder / "queries.safetensors")
    save_file({"requests": torch.tensor([0, 0, 1, 1])}, folder / "requests.safetensors")
    return folder


def interrupted(capture: Path, folder: Path) -> Study:
    """A study of which one of two units is measured."""
    opened = reopened(capture, folder)
    opened.folder.prepare(restart=False)
    measure_units(opened, opened.units()[:1])
    return opened


def reopened(capture: Path, folder: Path) -> Study:
    inputs = StudyInputs(capture, capture, lengths="lengths", requests="requests")
    return open_study(inputs, SETTINGS, folder)


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change a file's tensors, and keep its size and times."""
    status = path.stat()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lengths", lambda tensors: tensors["lengths"].copy_(torch.tensor([60, 40]))),
        ("keys", lambda tensors: tensors["keys"][50].neg_()),
        ("queries", lambda tensors: tensors["queries"].neg_()),
        ("requests", lambda tensors: tensors["requests"].copy_(torch.tensor([1, 1, 0, 0]))),
    ],
)
def test_every_input_belongs_to_the_identity_of_results(
    capture: Path,
    tmp_path: Path,
    name: str,
    change: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    interrupted(capture, tmp_path / "work")
    rewritten(capture / f"{name}.safetensors", change)
    with pytest.raises(InputError, match=r"unfinished study .*\(different files\)"):
        reopened(capture, tmp_path / "work").folder.prepare(restart=False)


def test_an_index_belongs_to_the_identity_of_results(capture: Path, tmp_path: Path) -> None:
    index = capture / f"model{INDEX_SUFFIX}"
    names = ("keys", "lengths", "queries", "requests")
    files = {name: f"{name}.safetensors" for name in names}
    index.write_text(json.dumps({"weight_map": files}))
    interrupted(capture, tmp_path / "work")
    index.write_text(json.dumps({"weight_map": files, "metadata": {}}))
    with pytest.raises(InputError, match=r"\(different files\)"):
        reopened(capture, tmp_path / "work").folder.prepare(restart=False)


@pytest.mark.parametrize("part", ["sdsa", "torch"])
def test_versions_belong_to_the_identity_of_results(
    capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    interrupted(capture, tmp_path / "work")
    if part == "sdsa":
        monkeypatch.setattr(records, "__version__", "0.0.0")
    else:
        monkeypatch.setattr(records, "installed_version", lambda name: "1.0")
    with pytest.raises(InputError, match=r"\(different versions\)"):
        reopened(capture, tmp_path / "work").folder.prepare(restart=False)


def test_a_large_file_is_sampled_from_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "keys.safetensors"
    with path.open("wb") as file:
        file.truncate(64 << 20)

    def described() -> list[object]:
        return records._describe_file(path)[3:]

    before = described()
    for offset in (9, (64 << 20) - 1):
        with path.open("r+b") as changed:
            changed.seek(offset)
            changed.write(b"x")
        assert described() != before
        before = described()


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_is_measured_again(capture: Path, tmp_path: Path, bit: int) -> None:
    opened = interrupted(capture, tmp_path / "work")
    whole = opened.folder.read(0, 0)
    path = next((tmp_path / "work").glob("layer-*"))
    data = bytearray(path.read_bytes())
    data[-1 - 8 * bit] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(InputError, match="is damaged"):
        opened.folder.read(0, 0)
    assert not opened.folder.has(0, 0)
    measure_units(opened, opened.units())
    assert torch.equal(opened.folder.read(0, 0).rows.nan_to_num(), whole.rows.nan_to_num())


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "name", ["layer-3.request-7.safetensors", "layer-0000.request-000000.safetensors"]
)
def test_files_of_others_are_neither_taken_nor_removed(
    capture: Path, tmp_path: Path, name: str, force: bool
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    save_file({"keys": torch.ones(9, 128)}, work / name)
    before = (work / name).read_bytes()
    with pytest.raises(InputError, match=f"{name}: is not a result file of this study"):
        reopened(capture, work).folder.prepare(restart=force)
    assert (work / name).read_bytes() == before


def test_a_result_file_that_is_a_link_is_left_alone(capture: Path, tmp_path: Path) -> None:
    opened = interrupted(capture, tmp_path / "work")
    path = next((tmp_path / "work").glob("layer-*"))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is not a result file of this study"):
        opened.folder.prepare(restart=True)
    assert (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("content", [b"{}", b"[1]", b"\xff", b"{", b'"mine"'])
def test_a_description_of_others_is_left_alone(
    capture: Path, tmp_path: Path, content: bytes
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "study.json").write_bytes(content)
    for force in (False, True):
        with pytest.raises(InputError, match=r"study\.json: is not the description of a study"):
            reopened(capture, work).folder.prepare(restart=force)
    assert (work / "study.json").read_bytes() == content


def test_a_description_that_is_a_pipe_is_not_waited_for(capture: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    os.mkfifo(tmp_path / "work" / "study.json")
    with pytest.raises(InputError, match="is not the description"):
        reopened(capture, tmp_path / "work").folder.prepare(restart=True)


def test_one_run_at_a_time(capture: Path, tmp_path: Path) -> None:
    with reopened(capture, tmp_path / "out" / "work").folder.held():
        for force in (False, True):
            with pytest.raises(InputError, match="another run is at work in it"):
                study.run(capture, capture, tmp_path / "out", lengths="lengths", force=force)
    study.run(capture, capture, tmp_path / "out", lengths="lengths", formats="nvfp4")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.json"]


def test_without_locks_a_study_runs(
    capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    study.run(capture, capture, tmp_path / "out", lengths="lengths", formats="nvfp4")


def test_a_study_stopped_after_its_report_goes_on(capture: Path, tmp_path: Path) -> None:
    def fail(report: study.StudyReport) -> None:
        raise InputError("no pictures today")

    options = {"lengths": "lengths", "formats": "nvfp4"}
    with pytest.raises(InputError, match="no pictures"):
        study.run(capture, capture, tmp_path / "out", **options, finish=fail)
    assert (tmp_path / "out" / "report.json").exists()
    seen: list[study.StudyReport] = []
    report = study.run(capture, capture, tmp_path / "out", **options, finish=seen.append)
    assert seen == [report]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.json"]
    with pytest.raises(InputError, match="exists already"):
        study.run(capture, capture, tmp_path / "out", **options)
