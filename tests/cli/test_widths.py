"""Every table of every command at four widths: no number is cut, and no name is lost."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from safetensors.torch import save_file
from typer.testing import CliRunner

from sdsa_cli.app import app
from sdsa_cli.bench.document import BenchResult
from sdsa_cli.bench.shapes import parse_shape
from sdsa_cli.bench.tables import bench_tables
from sdsa_cli.output import Output
from sdsa_cli.table_data import Fields, TableData
from sdsa_cli.text import broken
from sdsa_kernels.measure.measurement import Measurement
from sdsa_kernels.measure.timing import Rotation, Timing
from sdsa_kernels.measure.traffic import Traffic
from support.command_line import parse_document

COLUMNS = (60, 80, 120, 200)
WIDE = "100000"  # columns in which nothing breaks
SIX = "bf16,nvfp4,nvfp4-mixed,nvfp4-4over6,mxfp4,fp8"
LAYERS = 61
LAYER = "model.language_model.layers.{}.self_attn.indexer.{}"
NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]\d+)?%?")
QUICK = ("--device", "cpu", "--top-k", "8,12345678")


@dataclass
class Shown:
    """What a run gave to print, and its document."""

    parts: list[Any] = field(default_factory=list)
    document: Any = None

    def tables(self) -> list[TableData]:
        return [part for part in self.parts if isinstance(part, TableData)]


@pytest.fixture(scope="module")
def ran() -> dict[str, Shown]:
    """What commands gave whose results are laid out for every width alike, by name."""
    return {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of 61 layers with long names, and what every command makes of it."""
    folder = tmp_path_factory.mktemp("widths")
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for layer in range(LAYERS):
        tensors[LAYER.format(layer, "keys")] = torch.randn(40, 128, generator=generator)
        tensors[LAYER.format(layer, "queries")] = torch.randn(2, 128, generator=generator)
    save_file(tensors, folder / "capture.safetensors")
    keys = torch.randn(700, 128, generator=generator)
    save_file({"keys": keys, "lengths": torch.tensor([500, 0, 200])}, folder / "keys.safetensors")
    save_file({"queries": torch.randn(6, 128, generator=generator)}, folder / "rows.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in (
            "quantize-cache keys.safetensors --lengths lengths -o cache.safetensors",
            "quantize-cache capture.safetensors --keys *.keys -o caches/",
            f"study capture.safetensors capture.safetensors -o study --formats {SIX} --top-k 8 "
            "--workers 1 --device cpu --no-plots",
            "score cache.safetensors --queries rows.safetensors --device cpu -o scores.safetensors",
        ):
            answer = CliRunner().invoke(app, words.split())
            assert answer.exit_code == 0, answer.stderr
    report = (folder / "study" / "report.json").read_text()
    (folder / "other.json").write_text(re.sub(r'"p1": 0\.\d+', '"p1": 0.0123', report))
    return folder


COMMANDS = {
    "quantize-cache": "quantize-cache keys.safetensors --lengths lengths -o c.safetensors --force",
    "quantize-cache-folder": "quantize-cache capture.safetensors --keys *.keys -o caches/ --force",
    "score": "score cache.safetensors --queries rows.safetensors --device cpu",
    "score-baseline": "score cache.safetensors --queries rows.safetensors --device cpu "
    "--baseline keys.safetensors --top-k 8,12345678 --graph-replay 3",
    "inspect-capture": "inspect capture.safetensors",
    "inspect-cache": "inspect cache.safetensors",
    "inspect-folder": "inspect caches",
    "inspect-page": "inspect cache.safetensors --page 1",
    "inspect-key": "inspect cache.safetensors --page 1 --key 3",
    "inspect-scores": "inspect scores.safetensors",
    "bench": "bench --shape 3,2,100,300 --shape 1,8,12345 --repeats 2 --backend torch,auto "
    "--device cpu",
    "report": "report study --no-plots",
    "compare": "compare study other.json --tolerance 2",
    "calibrate": "calibrate capture.safetensors capture.safetensors -o s.safetensors --force",
    "doctor": "doctor --self-test",
}
# What of a command's document has to be on its screen, or else the words that it is left out by.
NAMES: dict[str, tuple[Callable[[Any], Iterable[str]], str]] = {
    "quantize-cache-folder": (lambda d: (c["tensor"] for c in d["caches"]), ""),
    "inspect-capture": (lambda d: (t["name"] for t in d["tensors"]), "more; --json lists them all"),
    "inspect-folder": (lambda d: (Path(c["path"]).name for c in d["caches"]), ""),
    "report": (lambda d: (layer["name"] for layer in d["layers"]), "of 61 layers left out"),
    "compare": (lambda d: (c["layer"] for c in d["changes"] if c["layer"]), "smaller changes"),
    "calibrate": (lambda d: (layer["name"] for layer in d["layers"]), ""),
    "doctor": (lambda d: (a["device"] for a in d["backends"]), ""),
}


def run(folder: Path, words: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What a command prints on a terminal of so many columns, before it is laid out."""
    shown = Shown()

    def keep(sink: Output, *parts: Any) -> None:
        shown.parts += parts

    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(columns))
    with monkeypatch.context() as patch:
        patch.setattr(Output, "result", keep)
        patch.setattr(
            Output, "document", lambda sink, document: setattr(shown, "document", document)
        )
        answer = CliRunner().invoke(app, words.split())
    assert answer.exit_code == 0, answer.stderr
    return shown


def laid_out(
    parts: Iterable[Any],
    columns: int | str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    capsys.readouterr()
    Output().result(*parts)
    return capsys.readouterr().out


def numbers(text: str) -> Counter[str]:
    words = (word.strip("()[],;:") for word in text.split())
    return Counter(word for word in words if NUMBER.fullmatch(word))


def cells_on_screen(table: TableData, columns: int) -> list[tuple[str, ...]]:
    """The cells of a table put together again from the columns of its lines."""
    pattern, shown = table._with_short_names(columns)
    if pattern:
        begin, end = pattern.partition(": ")[2].split("*")
        assert "".join(broken(pattern, columns)).replace(" ", "") == pattern.replace(" ", "")
        column = table.headings.index(table.shortens)
    rows = [row for row in shown.rows if not row.is_heading]
    cells = [[""] * len(table.headings) for _ in rows]
    for block in shown._blocks(columns):
        assert sum(block.values()) + shown._gaps(len(block)) <= columns
        for index, row in enumerate(rows):
            lines = list(shown._row_lines(block, {c: row.cells[c] for c in block}, ""))
            start = 0
            for number, width in block.items():
                parts = [line.plain[start : start + width].strip() for line in lines]
                cells[index][number] = "".join(parts)
                start += width + shown._gaps(2)
    if pattern:
        for row_cells in cells:
            if row_cells[column] not in table.not_names:
                row_cells[column] = begin + row_cells[column] + end
    return [tuple(row_cells) for row_cells in cells]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_cut_or_lost(
    folder: Path,
    ran: dict[str, Shown],
    name: str,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = ran.get(name) or run(folder, COMMANDS[name], columns, monkeypatch)
    if name not in ("inspect-capture", "inspect-page", "inspect-key"):  # these ask for the width
        ran[name] = shown
    text = laid_out(shown.parts, columns, monkeypatch, capsys)
    whole = laid_out(shown.parts, WIDE, monkeypatch, capsys)
    assert "\u2026" not in text
    for line in text.splitlines():
        assert cell_len(line) <= columns or " " not in line.strip()
    assert not numbers(whole) - numbers(text), "cut or lost"
    for table in shown.tables():
        expected = [row.cells for row in table.rows if not row.is_heading]
        assert squeezed(cells_on_screen(table, columns)) == squeezed(expected)
    names, left_out = NAMES.get(name, (lambda document: (), ""))
    document = parse_document(as_json(shown.document)) if shown.document is not None else None
    if name == "report":
        document = parse_document((folder / "study" / "report.json").read_text())
    missing = [each for each in names(document) if each not in on_screen(shown, columns)]
    assert not missing or (left_out and left_out in " ".join(whole.split()))


def squeezed(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Cells without spaces, some of which become line breaks."""
    return [tuple("".join(cell.split()) for cell in row) for row in rows]


def as_json(document: Any) -> str:
    from sdsa_cli.json_documents import strict_json

    return strict_json(document)


def on_screen(shown: Shown, columns: int) -> str:
    """All cells, fields and lines of a screen, put together again."""
    parts = []
    pattern = "*"
    for part in shown.parts:
        if isinstance(part, TableData):
            begin, _, end = pattern.partition("*")
            for row in cells_on_screen(part, columns):
                parts += [*row, begin + row[0] + end]
        elif isinstance(part, Fields):
            parts += [*part.fields, *part.fields.values()]
        else:
            parts.append(str(part))
            found = re.match(r"(?:keys|files|tensors) +(\S*\*\S*)", str(part))
            pattern = found[1] if found else pattern
    return "\n".join(parts)


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_gpus_bench_tables(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timing = Timing("graph", (12345678.9,))
    cold = Rotation(3, 300, 100)
    measured = Measurement(timing, Traffic(1, 10**9, 0, 0), 1, cold, timing, 4e12, 1.0, 2345678.9)
    shape = parse_shape("12345678,8,7654321,87654321")
    results = [
        BenchResult(shape, pair, backend, measured, True, 12345678.9, 87654321.1)
        for pair in ("nvfp4", "mixed", "bf16")
        for backend in ("cute", "triton")
    ]
    parts = bench_tables(results)
    text = laid_out(parts, columns, monkeypatch, capsys)
    whole = laid_out(parts, WIDE, monkeypatch, capsys)
    assert not numbers(whole) - numbers(text)
    tables = [part for part in parts if isinstance(part, TableData)]
    assert len(tables) == 2
    for table in tables:
        found = [
            tuple("".join(cell.split()) for cell in row) for row in cells_on_screen(table, columns)
        ]
        assert found == [tuple("".join(cell.split()) for cell in row.cells) for row in table.rows]


@pytest.mark.parametrize("width", [1, 3, 12, 13, 40])
@pytest.mark.parametrize(
    "text",
    [
        LAYER.format(28, "keys"),
        "recall of 0.9834 and 12,345,678 keys at 1.23e-04",
        "\u5c42" * 9 + "12345678" + "\u5c42" * 9,
        "/a/very/long/path/of/2026-12-01/report.json",
        "x" * 90,
        "    an indented line of 7,654,321 words",
    ],
)
def test_text_breaks_around_numbers(text: str, width: int) -> None:
    lines = broken(text, width)
    assert max(map(cell_len, lines)) <= max(width, 2)  # a wide character has two columns
    assert "".join("".join(lines).split()) == "".join(text.split())
    for number in re.findall(r"\d[\d,.]*\d", text):
        if len(number) <= width - (4 if text.startswith(" ") else 0):
            assert any(number in line for line in lines)


def test_a_pipe_keeps_its_sentences_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", out := io.StringIO())
    sentence = "At 72 bytes a key: " + "words " * 40
    Output().result(sentence)
    assert out.getvalue().splitlines() == [sentence.rstrip()]
