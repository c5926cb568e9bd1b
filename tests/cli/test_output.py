"""Where output goes: results to stdout, the rest to stderr, bars only to terminals."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from sdsa_cli.output import Output, fields_table, heading, print_error, table
from sdsa_cli.table_data import Style, TableData
from sdsa_cli.text import error_size
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


def test_a_calm_bar_has_no_thread_beside_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stderr := Terminal())
    before = threading.active_count()
    with Output().progress("timing 100 runs", 2, calm=True) as advance:
        assert threading.active_count() == before
        advance(1)
        advance.describe("drawing")
    assert "timing 100 runs" in stderr.getvalue()
    assert "50%" in stderr.getvalue()
    assert "drawing" in stderr.getvalue()


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


def wide_table(style: Style) -> TableData:
    """A table as wide as those of many columns, with names and numbers of many digits."""
    rows = table(
        "layer", "format", *(f"number {index}" for index in range(9)), "remark",
        title="A title of some words", numbers_from=2, text=("remark",), style=style,
    )  # fmt: skip
    for line in range(3):
        name = f"model.layers.{line}.attention.indexer.keys"
        numbers = (f"{line}{index},{line:03},{index:03}.25" for index in range(9))
        rows.add_row(name, "nvfp4-4over6", *numbers, f"remark {line} in several words")
    rows.add_heading("over what follows")
    rows.add_row("short", "bf16", *map(str, range(9)), "", rule_below=True)
    return rows


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
@pytest.mark.parametrize("style", ["report", "compact", "grid"])
def test_no_width_cuts_a_number_or_drops_a_name(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: int,
    style: Style,
) -> None:
    rows = wide_table(style)
    monkeypatch.setenv("COLUMNS", str(columns))
    Output().result(rows)
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert "\u2026" not in shown
    assert max(map(len, lines)) <= columns
    words = shown.split()
    for row in rows.rows[:3]:
        for number in row.cells[2:11]:
            assert number in words
        assert words.count("nvfp4-4over6") % 3 == 0
    assert shown.count("over what follows") >= 1
    for heading_text in rows.headings[2:]:
        assert heading_text in shown
    # Each block begins with the names, whole again when the parts that lines broke are joined.
    starts = [index for index, line in enumerate(lines) if line.startswith("layer ")]
    assert starts
    for start in starts:
        width = lines[start].index("format")
        block = itertools.takewhile(bool, lines[start + 2 :])
        names = "".join(line[:width].strip() for line in block if not line.startswith("over"))
        for line in range(3):
            assert f"model.layers.{line}.attention.indexer.keys" in names
        assert names.rstrip("\u2500").endswith("short")


def test_columns_without_room_go_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table("name", "first", "second", style="compact")
    rows.add_row("a" * 10, "1" * 10, "2" * 10)
    for columns, blocks in ((60, ["a12"]), (30, ["a1", "a2"]), (16, None), (8, None)):
        monkeypatch.setenv("COLUMNS", str(columns))
        Output().result(rows)
        bodies = [part.split("\u2500\n")[1] for part in capsys.readouterr().out.split("\n\n")]
        found = ["".join(word[0] for word in body.split()) for body in bodies]
        assert found == blocks or blocks is None
        assert "".join(bodies).count("1") == "".join(bodies).count("2") == 10
        if columns > 8:
            assert "".join(bodies).count("1" * 10) == "".join(bodies).count("2" * 10) == 1


@pytest.mark.parametrize("columns", [24, 32, 40, 60, 80])
def test_a_column_stays_beside_the_one_that_it_is_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    rows = table("", "bytes", *(text for k in (8, 64, 512) for text in (f"@{k}", "p1")))
    rows.follows = ("p1",)
    rows.add_row("nvfp4", "72", *(f"0.{index}111" for index in range(6)))
    monkeypatch.setenv("COLUMNS", str(columns))
    Output().result(rows)
    heads = [line for line in capsys.readouterr().out.splitlines() if "p1" in line or "@" in line]
    assert sum(head.split().count("p1") for head in heads) == 3
    for head in heads:
        words = [word for word in head.split() if word != "bytes"]
        assert [word == "p1" for word in words] == [False, True] * (len(words) // 2)


def test_a_row_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a row has 2 cells, got 1"):
        table("a", "b").add_row("1")


def test_wide_and_odd_characters_stay_in_their_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    rows = table("name", "n", style="compact")
    rows.add_row("\u5c42" * 20, "1")
    rows.add_row("esc\x1b[31m", "2")
    Output().result(rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= 30
    assert sum(line.count("\u5c42") for line in lines) == 20
    assert "esc\\x1b[31m" in lines[-1]


def test_a_table_in_html_has_the_same_cells() -> None:
    rows = table("name", "count", "use", title="A & B", text=("use",))
    rows.add_heading("group")
    rows.add_row("<keys>", "7", "keys")
    page = rows.html()
    assert page.startswith('<p>A &amp; B</p><div class="wide"><table>')
    assert '<th class="text">name</th><th>count</th><th class="text">use</th>' in page
    assert '<td class="text" colspan="3"><b>group</b></td>' in page
    assert '<td class="text">&lt;keys&gt;</td><td>7</td><td class="text">keys</td>' in page


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


def test_blank_lines_between_tables_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table("a", "b")
    rows.add_row("1", "2")
    Output().result(rows, "", rows, "", "", "end")
    shown = capsys.readouterr().out
    assert "\n\n\n" not in shown
    assert shown.count("\n\n") == 2
