"""Standard streams that break, are full or closed, and text that a terminal would obey."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_cli.json_documents import strict_json
from sdsa_cli.output import Output, print_error, table
from support.command_line import Run, program

pytestmark = pytest.mark.slow  # each starts a shell and the real program

SaveKeys = Callable[..., Path]
BENCH = ("bench", "--shape", "1,1,64", "--repeats", "1", "--device", "cpu")


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line in which ``sdsa`` is the real program; pipefail, so that its exit code counts."""
    line = f'set -o pipefail; sdsa() {{ {" ".join(program())} "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", ["inspect keys.safetensors", "inspect keys.safetensors --json",
                                     "score --help", "--version"])  # fmt: skip
def test_a_full_disk_under_stdout_is_one_line(
    save_keys: SaveKeys, tmp_path: Path, command: str
) -> None:
    save_keys()
    answer = shell(f"sdsa {command} >/dev/full", tmp_path)
    line = "error: stdout: cannot be written: No space left on device\n"
    assert (answer.returncode, answer.stderr) == (1, line)


@pytest.mark.parametrize("reader", ["true", "head -1"])
def test_a_reader_that_leaves_ends_the_run_quietly(tmp_path: Path, reader: str) -> None:
    names = [f"layers.{layer}.keys" for layer in range(2000)]
    save_file({name: torch.zeros(1, 128) for name in names}, tmp_path / "keys.safetensors")
    answer = shell(f"sdsa inspect keys.safetensors --json | {reader}", tmp_path)
    # 0 where all of it went into the pipe before the reader left.
    assert (answer.returncode in (0, 141), answer.stderr) == (True, "")


@pytest.mark.parametrize("words", ["--json", "", "--json --top-k 8,16"])
def test_a_reader_of_scores_that_leaves_is_no_failed_check(
    save_keys: SaveKeys, tmp_path: Path, words: str
) -> None:
    save_keys()
    shell("sdsa quantize-cache keys.safetensors -o c.safetensors", tmp_path)
    save_file({"queries": torch.randn(900, 128)}, tmp_path / "q.safetensors")
    line = f"sdsa score c.safetensors --queries q.safetensors --device cpu {words} | true"
    answer = shell(line, tmp_path)
    # 0 where all of it went into the pipe before the reader left.
    assert (answer.returncode in (0, 141), answer.stderr) == (True, "")


@pytest.mark.parametrize("stdout", [">/dev/full", "| true"])
def test_the_report_is_written_although_stdout_breaks(tmp_path: Path, stdout: str) -> None:
    shell(f"sdsa {' '.join(BENCH)} --report report.json {stdout}", tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["command"] == "bench"


@pytest.mark.parametrize(("closed", "stdout"), [("2>&-", ""), (">&-", "")])
def test_what_goes_to_a_closed_stream_goes_nowhere(
    tmp_path: Path, closed: str, stdout: str
) -> None:
    answer = shell(f"sdsa inspect nothing {closed}", tmp_path)
    assert (answer.returncode, answer.stdout) == (2, stdout)
    assert answer.stderr.startswith("error: nothing: ") == (closed == ">&-")


HOSTILE = "a\x1b]0;title\x0eb\x9bc\x7f"
SHOWN = "a\\x1b]0;title\\x0eb\\x9bc\\x7f"


def test_control_characters_are_written_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    rows = table("name")
    rows.add_row(HOSTILE)
    Output().result(HOSTILE, rows)
    Output().note(HOSTILE)
    print_error(HOSTILE)
    stdout, stderr = capsys.readouterr()
    assert stdout.count(SHOWN) == 2
    assert stderr.count(SHOWN) == 2
    assert not [sign for sign in stdout + stderr if sign != "\n" and not sign.isprintable()]


def test_a_document_keeps_them_and_is_safe_to_print() -> None:
    text = strict_json({"name": HOSTILE + "\udcff"})
    assert json.loads(text)["name"] == HOSTILE + "\udcff"
    assert not [sign for sign in text if sign != "\n" and not sign.isprintable()]


def test_names_in_files_do_not_reach_the_terminal(sdsa: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys.safetensors"
    save_file({HOSTILE: torch.zeros(1, 128)}, path, {"note": HOSTILE})
    answer = sdsa("inspect", path)
    answer.is_clean()
    assert answer.stdout.count(SHOWN) == 2
    assert "\x1b" not in answer.stdout
    error = sdsa("inspect", path, "--page", "\x1b[2J")
    assert "\x1b" not in error.stderr
