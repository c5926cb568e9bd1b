"""Where output goes: results to stdout, the rest to stderr, bars only to terminals."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sdsa_cli.command import fill_in_stdout
from sdsa_cli.output import Output, fields_table, heading, print_error, table
from sdsa_cli.text import error_size, power_of_two
from support.command_line import program


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def test_results_are_for_readers_or_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    for out in (Output(), Output(as_json=True)):
        out.result("text [with] brackets", table("a", "b"))
        out.document({"number": 1.5})
        out.note("a remark :smile:")
    stdout, stderr = capsys.readouterr()
    text, _, document = stdout.partition("{")
    assert text.startswith("text [with] brackets\n")
    assert document == '\n  "number": 1.5\n}\n'
    assert stderr == "a remark :smile:\n" * 2


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("stream", [io.StringIO, Terminal], ids=["pipe", "terminal"])
def test_progress_only_on_a_terminal_and_never_with_json(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
    stream: type[io.StringIO],
) -> None:
    stderr = stream()
    monkeypatch.setattr("sys.stderr", stderr)
    with Output(as_json=as_json).progress("counting [keys]", 10) as advance:
        for _ in range(10):
            advance(1)
    shown = stderr.getvalue()
    assert ("counting [keys]" in shown) == (stream is Terminal and not as_json)
    if stream is io.StringIO or as_json:
        assert shown == ""
    assert capsys.readouterr().out == ""


def test_the_program_keeps_its_bar_off_stdout(
    save_keys: Callable[..., Path], tmp_path: Path
) -> None:
    reader, terminal = os.openpty()
    arguments = ("quantize-cache", save_keys(count=100_000), "-o", tmp_path / "c.safetensors")
    answer = subprocess.run(
        program(*arguments), stdout=subprocess.PIPE, stderr=terminal, text=True, check=True
    )
    os.close(terminal)
    shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert "quantizing" in shown
    assert "\x1b" not in answer.stdout
    assert "quantizing" not in answer.stdout


def test_errors_are_one_line_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("[tensor]\n" + "long " * 50)
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr == "error: [tensor] " + ("long " * 50).strip() + "\n"


def test_tables_align_numbers_and_keep_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table("name", "count", title="title")
    rows.add_row("keys[0]", "7")
    Output().result(heading("long/" * 30), rows, fields_table({"name": "value [x]"}))
    path, *lines = capsys.readouterr().out.splitlines()
    assert path == "long/" * 30
    assert lines[0].rstrip() == "title"
    assert any(line.split() == ["keys[0]", "7"] for line in lines)
    assert lines[-1].split() == ["name", "value", "[x]"]


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "123")
    assert Output().width == 123


def test_a_narrow_table_leaves_out_columns_and_no_digits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table("name", "first", "second", optional=("second", "first"))
    rows.add_row("a" * 10, "1" * 10, "2" * 10)
    for columns, shown in ((60, "a12"), (30, "a1"), (16, "a")):
        monkeypatch.setenv("COLUMNS", str(columns))
        Output().result(rows)
        assert capsys.readouterr().out.split()[-len(shown) :] == [each * 10 for each in shown]
    monkeypatch.setenv("COLUMNS", "8")
    Output().result(rows)
    assert capsys.readouterr().out.count("a") == 10 + 1, "the heading has one, too"


def test_a_pipe_has_its_own_width_and_no_spaces_at_line_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS")
    assert Output().width == 100
    rows = table("name", "text")
    rows.add_row("a", "b")
    Output().result(fields_table({"a": "b", "longer": "c  "}), rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (5.0564e-8, "5.06e-08"),
        (0.00012345, "1.23e-04"),
        (0.0012345, "0.001234"),
        (-359.31, "-359.3"),
        (9999.4, "9999"),
        (9999.6, "1.00e+04"),
        (1234567.0, "1.23e+06"),
    ],
)
def test_sizes_of_errors_are_short(value: float | None, text: str) -> None:
    assert error_size(value) == text


@pytest.mark.parametrize(
    ("line", "filled"),
    [
        ("--json", "--json -"),
        ("cache --json --top-k 8", "cache --json - --top-k 8"),
        ("--json -o file", "--json - -o file"),
        ("--json -", "--json -"),
        ("--json file --force", "--json file --force"),
        ("--json=file", "--json=file"),
    ],
)
def test_json_without_a_file_means_stdout(line: str, filled: str) -> None:
    assert fill_in_stdout(line.split()) == filled.split()


@pytest.mark.parametrize(
    ("value", "text"),
    [(128.0, "128"), (0.125, "0.125"), (2.0**21, "2^21"), (2.0**-40, "2^-40")],
    ids=["whole", "fraction", "large", "small"],
)
def test_powers_of_two_are_exact(value: float, text: str) -> None:
    assert power_of_two(value) == text
