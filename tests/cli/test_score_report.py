"""What `sdsa score` shows in a terminal, and the fields of its report."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from support.caches import write_cache
from support.command_line import read_document
from support.score_files import Files

REPORT_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "reports" / "score.md"


def table_rows(shown: str, first: str) -> list[list[str]]:
    """Cells of the table whose first heading is `first`, of columns two spaces apart or more."""
    lines = shown.splitlines()
    pairs = enumerate(itertools.pairwise(lines))
    start = next(i for i, (head, rule) in pairs if head.startswith(first) and rule[:1] == "─")
    cells = (re.split(r"  +", line.strip()) for line in itertools.chain(lines[start:], [""]))
    return [row for row in itertools.takewhile(lambda row: row != [""], cells) if len(row) > 1]


def test_rows_that_keep_every_key_are_not_in_the_table(files: Files) -> None:
    options = ("--baseline", files.keys, "--top-k", "64,90,249")
    report = files.report(*options)
    longer = report["accuracy"]["top_k"]
    assert [each["recall"]["rows"] for each in longer] == [6, 4, 0]
    recalls = [
        row["accuracy"]["top_k"][1]["recall"] for row in report["rows"] if row["length"] > 90
    ]
    assert sum(recalls) < 4
    assert longer[1]["recall"]["mean"] == pytest.approx(sum(recalls) / 4)
    assert longer[1]["chance"] == pytest.approx((90 / 100 + 90 / 249) / 2)
    assert longer[2]["recall"]["mean"] is None

    shown = files.score(*options).stdout
    heads, *rows = table_rows(shown, "top-k")
    assert [row[:2] for row in rows] == [["64", "6 of 6"], ["90", "4 of 6"], ["249", "0 of 6"]]
    assert set(rows[2][2:]) == {"-"}
    assert rows[1][heads.index("recall")] == f"{longer[1]['recall']['mean']:.4f}"
    assert len(set(heads)) == len(heads), "two columns have one name"
    assert "249: no row is longer, so every key is kept in any case." in shown


def test_the_worst_percent_stands_where_it_differs_from_the_worst_row(files: Files) -> None:
    options = ("--baseline", files.keys, "--top-k", 64)
    assert "worst 1%" not in files.score(*options).stdout
    files.save_queries(files.query_values.repeat(17, 1))
    shown = files.score(*options).stdout
    assert all("worst 1%" in table_rows(shown, first)[0] for first in ("top-k", "scores"))


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80, None])
def test_no_number_is_cut(
    files: Files, monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    # Errors of a BF16 cache are tiny, lengths are long.
    keys = files.key_values[:400].repeat(2500, 1)
    save_file({"keys": keys}, files.keys)
    write_cache(files.cache, keys, [1_000_000], "bf16")
    files.save_queries(files.query_values[:1])
    if columns is None:
        monkeypatch.delenv("COLUMNS")
    else:
        monkeypatch.setenv("COLUMNS", str(columns))
    options = ("--rows-per-group", 1, "--graph-replay", 2)
    shown = files.score("--baseline", files.keys, *options).stdout
    assert "…" not in shown
    tables = {first: table_rows(shown, first) for first in ("top-k", "scores", "time")}
    for heads, *rows in tables.values():
        for row in rows:
            assert len(row) == len(heads)
            numbers = " ".join(row[1:])
            assert re.fullmatch(r"(>?\d[\d,.]*(e-\d\d)?|of|-| )+", numbers), numbers
    assert re.fullmatch(r"\d\.\d\de-0\d", tables["scores"][1][1])
    if columns != 40:
        assert tables["scores"][1][-1] == "1,000,000"
        assert tables["top-k"][0][-1] == "same set"
    assert all(line == line.rstrip() for line in shown.splitlines())
    tables_only = [line for line in shown.splitlines() if line.startswith("─") or "  " in line]
    assert max(map(len, tables_only)) <= (columns or 100)


def test_the_requests_that_are_assumed_are_said(files: Files) -> None:
    assumed = "assumed: row 0-1 of request 0, 2-3 of 1, 4-5 of 2"
    assert assumed in files.score().stdout
    assert "assumed" not in files.score("--requests", "0,1,2").stdout
    lengths = [20] * 6
    write_cache(files.cache, files.key_values[:120], lengths)
    shown = files.score("--rows-per-group", 1).stdout
    assert "assumed: row 0 of request 0, 1 of 1, ..., 5 of 5" in shown
    write_cache(files.cache, files.key_values[:120], [120])
    assert "assumed" not in files.score().stdout


def test_the_best_keys_are_shown_without_a_baseline(files: Files) -> None:
    report = files.report("--top-k", 3)
    output = files.folder / "scores.st"
    shown = files.score("--top-k", 3).stdout
    assert "each row's top 3 keys go to a file with -o FILE" in shown
    assert "-o FILE" not in files.score("--top-k", 3, "-o", output).stdout
    for row, choices in enumerate(load_file(output)["top_k_indices"].tolist()):
        assert report["rows"][row]["best_keys"] == choices
        assert report["rows"][row]["best_key"] == choices[0]
        assert " ".join(map(str, choices)) in table_rows(shown, "row")[row + 1]


@pytest.mark.parametrize("options", [("--json",), ("--json", "--top-k", "8")])
def test_json_is_a_flag_anywhere_on_the_line(files: Files, options: tuple[str, ...]) -> None:
    outcome = files.score(*options)
    outcome.is_clean()
    assert outcome.document["command"] == "score"


def field_names(document: Any) -> set[str]:
    """Names of every field of a document, at any depth."""
    if isinstance(document, dict):
        return set(document).union(*map(field_names, document.values()))
    if isinstance(document, list):
        return set().union(*map(field_names, document))
    return set()


def test_every_field_of_the_report_is_documented(files: Files) -> None:
    report = files.report("--baseline", files.keys, "--graph-replay", 2)
    assert report["environment"].pop("packages")
    documented = set(re.findall(r"`(\w+)`", REPORT_PAGE.read_text()))
    assert field_names(report) - documented == set()


def test_the_report_in_a_file_is_the_one_on_stdout(files: Files) -> None:
    written = files.folder / "report.json"
    options = ("--baseline", files.keys)
    files.score(*options, "--report", written).is_clean()
    assert json.dumps(read_document(written)) == json.dumps(files.report(*options))
