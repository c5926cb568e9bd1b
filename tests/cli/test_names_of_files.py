"""Names from files are text: to matplotlib, spreadsheets, browsers, terminals and file systems."""

from __future__ import annotations

import csv
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sdsa_cli.study import plots as study_plots
from sdsa_cli.study.tables import leading_setting
from sdsa_cli.text import as_csv_cell, html_text, visible
from sdsa_quant.study import StudyReport
from support.command_line import Run
from support.studies import FAST

ODD = (
    "l$\\frac{$", "a$x_1$b", "\u5c42.1", "=SUM(A1)", "+cmd", "@x", "-1+2", "\t=tab",
    "ev\u202egnp", "is\u2066ol\u2069", "two\nlines", "cr\rover", "sep\u2028arated", "esc\x1b[31m",
    "bell\x07", "<b>&", "z\u200bw", "x" * 150,
)  # fmt: skip
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of one layer for each odd name."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name in ODD:
        tensors[f"{name}.keys"] = torch.randn(40, 128, generator=generator)
        tensors[f"{name}.queries"] = torch.randn(2, 128, generator=generator)
    path = tmp_path_factory.mktemp("odd") / "odd.safetensors"
    save_file(tensors, path)
    return path


@pytest.fixture
def studied(sdsa: Run, odd: Path, tmp_path: Path) -> Path:
    """A study of them, with pictures."""
    words = ("--keys", "*.keys", "--query-name", "*.queries", "--formats", "bf16,nvfp4,fp8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome = sdsa("study", odd, odd, "-o", tmp_path / "out", "--top-k", "8", *words, *FAST)
    outcome.is_clean()
    assert not OBEYED.search(outcome.stdout)
    return tmp_path / "out"


def test_a_study_of_odd_names_shows_them_as_text(studied: Path) -> None:
    page = (studied / "report.html").read_text()
    assert not OBEYED.search(page)
    assert "esc\\x1b[31m.keys" in page
    assert "&lt;b&gt;&amp;.keys" in page
    table = (studied / "report.csv").read_text()
    assert not OBEYED.search(table)
    rows = list(csv.reader(table.splitlines()))
    layers = {row[0] for row in rows[1:]} - {""}
    assert len(layers) == len(ODD)
    assert {"'=SUM(A1).keys", "'+cmd.keys", "'@x.keys", "'-1+2.keys", "two\\nlines.keys"} <= layers
    assert not any(cell[:1] in "=+@\t\r" for row in rows for cell in row if cell)


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_no_name_fakes_a_line_of_output(
    sdsa: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    name = "k\nvalid  yes\r\u2028error: none\u202e.keys"
    save_file({name: torch.ones(100, 128), "n": torch.zeros(3)}, tmp_path / "k.safetensors")
    cache = tmp_path / "c.safetensors"
    for words in (
        ("inspect", tmp_path / "k.safetensors"),
        ("quantize-cache", tmp_path / "k.safetensors", "-o", cache),
        ("inspect", tmp_path / "k.safetensors", "--json"),
    ):
        outcome = sdsa(*words)
        assert outcome.exit_code == 0
        lines = (outcome.stdout + outcome.stderr).splitlines()
        assert not any(line.startswith(("valid", "error")) for line in lines)
    outcome = sdsa("quantize-cache", tmp_path / "k.safetensors", "--keys", "absent", "-o", "c2")
    outcome.fails_with(2, "absent")
    assert not OBEYED.search(outcome.stderr)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain keys[0]", "plain keys[0]"),
        ("a\nb\r\n", "a\\nb\\r\\n"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("tag\U000e0041", "tag\\U000e0041"),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u200c\u062e"),  # a joiner that Persian needs
        ("\udcff", "\\udcff"),
    ],
)
def test_what_terminals_obey_is_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert html_text(text) == shown


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_cells_of_a_spreadsheet_are_no_formulas(name: str) -> None:
    assert as_csv_cell(name) == f"'{name}"
    assert as_csv_cell(f"x{name}") == f"x{name}"


def test_a_nul_is_refused_by_the_tensors_name(sdsa: Run, tmp_path: Path) -> None:
    save_file({"a\0b": torch.ones(9, 128)}, tmp_path / "nul.safetensors")
    one = sdsa("quantize-cache", tmp_path / "nul.safetensors", "-o", f"{tmp_path}/out/")
    one.fails_with(2, "a\\x00b", "NUL")
    save_file({f"l{i}\0.keys": torch.ones(9, 128) for i in (1, 2)}, tmp_path / "two.safetensors")
    words = ("--keys", "*.keys", "-o", f"{tmp_path}/{{name}}.st")
    sdsa("quantize-cache", tmp_path / "two.safetensors", *words).fails_with(2, "l1\\x00.keys")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"keys": "a\0b.safetensors"}}))
    sdsa("inspect", index).fails_with(2, "keys", "a\\x00b")


@pytest.mark.parametrize(
    "options",
    [
        ("--formats", "bf16,nvfp4,nvfp4-mixed,nvfp4-4over6,mxfp4,fp8"),
        ("--rotate", "none,hadamard", "--gain", "none,auto,2^-3", "--center", "none,channel"),
        ("--formats", "bf16"),
    ],
    ids=["six formats", "twelve transforms", "bf16 alone"],
)
def test_pictures_of_many_layers_can_be_read(
    sdsa: Run, tmp_path: Path, generator: torch.Generator, options: tuple[str, ...]
) -> None:
    names = [f"model.language_model.layers.{i}.self_attn.indexer" for i in (1, 20, 28, 60)]
    tensors = {f"{name}.keys": torch.randn(40, 128, generator=generator) for name in names}
    tensors |= {f"{name}.queries": torch.randn(2, 128, generator=generator) for name in names}
    path = tmp_path / "k.safetensors"
    save_file(tensors, path)
    sdsa("study", path, path, "-o", tmp_path / "out", "--top-k", "8", "--no-plots", *options, *FAST)
    report = StudyReport.read(tmp_path / "out")
    for make in (
        study_plots.plot_recall_by_layer,
        study_plots.plot_recall_by_bytes,
        study_plots.plot_score_errors,
        study_plots.plot_channel_errors,
        study_plots.plot_block_magnitudes,
    ):
        figure = make(report)
        if figure is not None:
            nothing_overlaps(figure)
            # Names are drawn as text, and nothing else may count on mathematics.
            for axis in figure.axes:
                ticks = (*axis.get_xticklabels(which="both"), *axis.get_yticklabels(which="both"))
                assert not any("$" in each.get_text() for each in ticks)
    by_layer = study_plots.plot_recall_by_layer(report)
    assert [each.get_text() for each in by_layer.axes[0].get_xticklabels()] == [
        "1",
        "20",
        "28",
        "60",
    ]
    channels = study_plots.plot_channel_errors(report)
    labels, rows = study_plots._channel_rows(report)
    assert labels == ["1", "20", "28", "60"]
    assert len(set(rows[0])) > 1, "not blank"
    assert leading_setting(report).label in channels.axes[0].get_title()


def nothing_overlaps(figure: Any) -> None:
    """Assert that legends, titles and labels are in the picture and clear of each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    whole = figure.bbox
    texts = [
        text for axis in figure.axes for text in (axis.title, axis.xaxis.label, axis.yaxis.label)
    ]
    others = (*figure.texts, *figure.legends)
    boxes = [each.get_window_extent() for each in (*texts, *others)]
    boxes = [box for box in boxes if box.width > 1 and box.height > 1]
    for index, box in enumerate(boxes):
        assert box.x0 >= whole.x0 - 1
        assert box.x1 <= whole.x1 + 1
        assert box.y0 >= whole.y0 - 1
        assert box.y1 <= whole.y1 + 1
        assert not any(box.overlaps(other) for other in boxes[index + 1 :])
