"""The files of a report folder: pages that no study made stay, those of an earlier study go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.command_line import Run
from support.studies import FAST, PICTURES, Studies


@pytest.fixture
def studies(sdsa: Run, tmp_path: Path, generator: torch.Generator) -> Studies:
    return Studies(sdsa, tmp_path, generator)


@pytest.mark.parametrize("name", ["report.csv", "report.html", "score-errors.png"])
@pytest.mark.parametrize("command", ["study", "report"])
def test_files_of_others_are_replaced_by_force_alone(
    studies: Studies, sdsa: Run, tmp_path: Path, name: str, command: str
) -> None:
    folder = tmp_path / "out"
    if command == "report":
        studies.run("out", "--formats", "nvfp4").is_clean()
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"mine")

    def run(*options: str) -> tuple[int, str]:
        if command == "study":
            outcome = studies.run("out", "--formats", "nvfp4", *options)
        else:
            outcome = sdsa("report", folder, "--no-plots", *options)
        return outcome.exit_code, outcome.stderr

    code, error = run()
    assert (code, f"{name}: is not a page of a study; give --force" in error) == (2, True)
    assert (folder / name).read_bytes() == b"mine"
    assert run("--force")[0] == 0


def test_links_are_not_followed(studies: Studies, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "precious.html").write_text("<title>sdsa study</title>")
    (tmp_path / "out" / "report.html").symlink_to(tmp_path / "precious.html")
    assert studies.run("out", "--formats", "nvfp4").exit_code == 2
    assert (tmp_path / "precious.html").read_text() == "<title>sdsa study</title>"


def test_pictures_of_the_study_before_go(studies: Studies, sdsa: Run, tmp_path: Path) -> None:
    sdsa(*studies.arguments("out", *FAST, "--formats", "nvfp4,fp8", "--top-k", "5")).is_clean()
    pictures = {f"{name}.png" for name in PICTURES}
    assert pictures <= {path.name for path in (tmp_path / "out").iterdir()}
    studies.run("out", "--formats", "nvfp4", "--force").is_clean()
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"report.json", "report.csv", "report.html"}
