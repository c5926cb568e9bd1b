"""Outputs never destroy inputs or each other, and a failed run leaves no folder behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.errors import InputError
from sdsa_quant.files.outputs import check_outputs, folders_made
from support.caches import write_cache
from support.command_line import Run

SaveKeys = Callable[..., Path]


@pytest.fixture
def index(save_keys: SaveKeys, tmp_path: Path) -> Path:
    """A folder ``model`` with an index, its one shard, and a file that the index does not name."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("shard.safetensors", "other.safetensors"):
        save_keys().rename(folder / name)
    places = {"weight_map": {"keys": "shard.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    return folder / "model.safetensors.index.json"


def test_two_outputs_are_compared_as_real_files(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for other in ("x", "link", "a/../x"):
        with pytest.raises(InputError, match="two outputs cannot go to the same file"):
            check_outputs([tmp_path / "x", tmp_path / other], [], force=True)


@pytest.mark.parametrize("named", ["folder", "index"])
@pytest.mark.parametrize("output", ["shard.safetensors", "model.safetensors.index.json"])
def test_files_behind_a_folder_or_an_index_are_inputs(
    sdsa: Run, index: Path, named: str, output: str
) -> None:
    path = index.parent / output
    before = path.read_bytes()
    source = index if named == "index" else index.parent
    sdsa("quantize-cache", source, "-o", path, "--force").fails_with(2, str(path), "is the input")
    assert path.read_bytes() == before


def test_files_that_an_index_leaves_out_are_no_inputs(sdsa: Run, index: Path) -> None:
    output = index.parent / "other.safetensors"
    sdsa("quantize-cache", index.parent, "-o", output, "--force").is_clean()


@pytest.mark.parametrize("option", ["-o", "--report"])
@pytest.mark.parametrize("kind", ["--queries", "--baseline"])
def test_score_keeps_the_files_of_its_folders(
    sdsa: Run, save_keys: SaveKeys, tmp_path: Path, option: str, kind: str
) -> None:
    keys = save_keys(count=100)
    write_cache(tmp_path / "c.safetensors", torch.ones(100, 128).bfloat16(), [100])
    folder = tmp_path / "folder"
    folder.mkdir()
    inside = folder / "q.safetensors"
    keys.rename(inside)
    inputs = {"--queries": inside, "--baseline": inside, kind: folder}
    words = [word for pair in inputs.items() for word in pair]
    before = inside.read_bytes()
    outcome = sdsa("score", tmp_path / "c.safetensors", *words, option, inside, "--force")
    outcome.fails_with(2, "q.safetensors: is the input")
    assert inside.read_bytes() == before


@pytest.mark.parametrize("name", ["report.json", "report.html"])
def test_study_keeps_its_inputs(sdsa: Run, index: Path, name: str) -> None:
    keys = index.rename(index.parent / name) if name == "report.json" else index.parent / name
    if name == "report.html":
        save_file({"keys": torch.ones(4, 128), "queries": torch.ones(1, 128)}, keys)
    before = keys.read_bytes()
    outcome = sdsa("study", keys, keys, "-o", index.parent, "--no-plots", "--force")
    outcome.fails_with(2, f"{name}: is the input")
    assert keys.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantize-cache", "k", "-o", "-"), "-o -: cannot be written to stdout"),
        (("quantize-cache", "k", "-o", ""), "-o must not be empty"),
        (("score", "k", "--queries", "k", "-o", "-"), "-o -: cannot be written to stdout"),
        (("study", "k", "k", "-o", "-"), "-o -: cannot be written to stdout"),
        (("score", "k", "--queries", "k", "-o", "new/"), "-o new/: must name a file"),
        (("score", "k", "--queries", "k", "--report", "new/"), "--report new/: must name a file"),
        (("bench", "--report", "new/"), "--report new/: must name a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_name_that_is_no_file_is_refused(
    sdsa: Run,
    save_keys: SaveKeys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    save_keys("k")
    monkeypatch.chdir(tmp_path)
    options = ("--no-plots",) if arguments[0] == "study" else ()
    sdsa(*arguments, *options).fails_with(2, message)
    assert os.listdir() == ["k"]


@pytest.mark.parametrize("fault", ["nan", "no-device"])
def test_a_failed_run_leaves_no_folder(sdsa: Run, tmp_path: Path, fault: str) -> None:
    if fault == "no-device" and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    keys = tmp_path / "k.safetensors"
    save_file({"keys": torch.full((64, 128), float("nan") if fault == "nan" else 1.0)}, keys)
    options = () if fault == "nan" else ("--device", "cuda")
    outcome = sdsa("quantize-cache", keys, "-o", tmp_path / "a" / "b" / "c", *options)
    assert outcome.exit_code in (2, 3)
    assert os.listdir(tmp_path) == ["k.safetensors"]


def test_a_study_that_measured_nothing_leaves_no_folder(sdsa: Run, tmp_path: Path) -> None:
    path = tmp_path / "k.safetensors"
    save_file({"keys": torch.ones(64, 128), "queries": torch.full((1, 128), torch.nan)}, path)
    options = ("--no-plots", "--workers", "1", "--device", "cpu")
    outcome = sdsa("study", path, path, "-o", tmp_path / "a" / "b", *options)
    outcome.fails_with(2, "must be finite")
    assert os.listdir(tmp_path) == ["k.safetensors"]


def test_folders_that_were_there_or_hold_something_stay(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    places = [tmp_path / "old" / "x", tmp_path / "new" / "x", tmp_path / "used" / "deep" / "x"]
    with pytest.raises(RuntimeError), folders_made(places):
        (tmp_path / "used" / "note").write_text("")
        raise RuntimeError
    assert sorted(os.listdir(tmp_path)) == ["old", "used"]
    assert os.listdir(tmp_path / "used") == ["note"]
