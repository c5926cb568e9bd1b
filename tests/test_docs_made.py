"""`scripts/docs`: what it makes follows the figures, the options and the docstrings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer.main

from docs_pages import charts, diagrams, measurements
from docs_pages.cli_reference import cli_reference
from docs_pages.numpy_docstrings import as_markdown
from docs_pages.pages import make
from docs_pages.python_reference import python_reference, signature_text
from docs_pages.report_reference import report_fields
from sdsa_quant.files.typed_json import json_schema

PAGE = "before\n<!-- made by scripts/docs: part -->\nold\n<!-- end -->\nafter\n"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_a_part_is_put_where_the_page_names_it(page: Path) -> None:
    made = make(page.parent, [page], {"part": lambda: "new\n"}, {"file.svg": lambda: "<svg/>"})
    assert made.faults == []
    differences = made.differences()
    assert len(differences) == 2
    assert "-old" in differences[0]
    assert "+new" in differences[0]
    assert made.write() == [page, page.parent / "file.svg"]
    assert page.read_text() == PAGE.replace("old", "new")
    assert made.differences() == []
    assert made.write() == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (PAGE.replace(": part", ": other"), "nothing makes 'other'"),
        (PAGE.replace("<!-- end -->", ""), "does not end with"),
        ("nothing made\n", "no page has the part 'part'"),
    ],
    ids=["unknown part", "no end", "part on no page"],
)
def test_wrong_marks_are_faults(page: Path, text: str, fault: str) -> None:
    page.write_text(text)
    made = make(page.parent, [page], {"part": lambda: "new"}, {})
    assert any(fault in one for one in made.faults)


@pytest.fixture
def own_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the recorded measurements that a test may change."""
    folder = tmp_path / "results"
    shutil.copytree(measurements.RESULTS, folder)
    monkeypatch.setattr(measurements, "RESULTS", folder)
    measurements.results.cache_clear()
    yield folder
    measurements.results.cache_clear()


def change(folder: Path, run: str, **changes: object) -> None:
    """Change fields of a run's result for BF16, 32 requests of 64K keys, its first backend."""
    path = folder / f"{run}.jsonl"
    lines = path.read_text().splitlines()
    for index, line in enumerate(lines):
        result = json.loads(line)
        if (result["shape"]["name"], result["format_pair"]) == ("(32,1,64K)", "bf16"):
            lines[index] = json.dumps({**result, **changes})
            break
    path.write_text("\n".join(lines) + "\n")
    measurements.results.cache_clear()


def test_tables_and_pictures_follow_the_figures(own_results: Path) -> None:
    makers = {
        measurements.BACKENDS: (
            measurements.readme_table,
            measurements.backends_table,
            measurements.backends_gains,
            charts.roof_shares,
        ),
        measurements.TRITON: (measurements.triton_table,),
    }
    for run, functions in makers.items():
        before = [function() for function in functions]
        change(own_results, run, median_us=101.7, gather_share=0.51, read_share=0.42)
        after = [function() for function in functions]
        assert all(one != other for one, other in zip(before, after, strict=True))
    assert "| BF16 | 101.7 | 0.51 | 0.42 |" in measurements.readme_table()


def test_the_budget_follows_the_stored_one(own_results: Path) -> None:
    before = measurements.tcgen05_budget()
    path = own_results / "tcgen05-budget.md"
    path.write_text(path.read_text().replace("| issue slots | 102 |", "| issue slots | 103 |", 1))
    assert measurements.tcgen05_budget() == before.replace("| 102 |", "| 103 |")
    assert measurements.tcgen05_budget() != before


def test_a_result_that_was_not_checked_is_not_shown(own_results: Path) -> None:
    change(own_results, measurements.BACKENDS, checked=False)
    with pytest.raises(ValueError, match="not compared with float64"):
        measurements.backends_table()


def test_the_headline_is_the_fastest_backend(own_results: Path) -> None:
    change(own_results, measurements.BACKENDS, median_us=1e6)
    assert measurements.headline("bf16").backend == "triton"


def test_the_command_line_page_follows_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from sdsa_cli import app as module

    command = typer.main.get_command(module.app)
    bench = command.commands["bench"]  # type: ignore[attr-defined]
    option = next(one for one in bench.params if "--seed" in one.opts)
    before = cli_reference()
    monkeypatch.setattr(option, "help", "Another seed.")
    monkeypatch.setattr(typer.main, "get_command", lambda app: command)
    after = cli_reference()
    assert before != after
    assert "Another seed" in after


def test_every_command_and_option_is_on_the_command_line_page() -> None:
    from sdsa_cli.app import app

    text = cli_reference()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f"## `sdsa {name}`" in text
        for one in command.params:
            if one.opts[0].startswith("--") and one.name != "help":
                assert one.opts[0] in text, (name, one.opts)


def test_the_python_page_follows_signatures_and_docstrings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sdsa_kernels

    before = python_reference()

    def indexer_scores(query: int, *, other: str | None = None) -> None:
        """Another contract."""

    monkeypatch.setattr(sdsa_kernels, "indexer_scores", indexer_scores)
    after = python_reference()
    assert before != after
    assert "indexer_scores(query: int, *, other: str | None = None) -> None" in after
    assert "Another contract." in after


def test_a_default_that_is_a_function_has_its_name() -> None:
    def function(measure: object = signature_text) -> None:
        """Nothing."""

    assert signature_text("f", function) == "f(measure: object = signature_text) -> None"


def test_long_signatures_have_a_parameter_a_line() -> None:
    def function(
        first: dict[str, list[tuple[int, ...]]], second: str = "a word that is long", *, third: bool
    ) -> list[int]:
        """Nothing."""
        return []

    assert signature_text("function", function).splitlines() == [
        "function(",
        "    first: dict[str, list[tuple[int, ...]]],",
        "    second: str = 'a word that is long',",
        "    *,",
        "    third: bool,",
        ") -> list[int]",
    ]


def test_docstrings_become_markdown() -> None:
    text = as_markdown(
        """``x`` doubled.

        Words.

        Parameters
        ----------
        x : int
            Input,
            in bytes.

        Raises
        ------
        ValueError
            It is odd.
        """
    )
    assert text.split("\n\n") == [
        ["`x` doubled.", "Words."][0],
        "Words.",
        "**Parameters**",
        "- `x` (int): Input, in bytes.",
        "**Raises**",
        "- `ValueError`: It is odd.",
    ]


@pytest.mark.parametrize(
    "picture",
    [
        diagrams.overview,
        diagrams.page_record,
        diagrams.tiled_scales,
        diagrams.block_table,
        diagrams.shares,
        charts.roof_shares,
        charts.recall_by_bytes,
    ],
    ids=lambda picture: picture.__name__,
)
def test_pictures_are_drawn_the_same_each_time_and_keep_within_their_frame(
    picture: Callable[[], str],
) -> None:
    text = picture()
    assert text == picture()
    root = ElementTree.fromstring(text)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for shape in root.iter():
        if "x" in shape.attrib:
            assert 0 <= float(shape.attrib["x"]) <= width
            assert 0 <= float(shape.attrib["y"]) <= height


SCHEMA = {
    "type": "object",
    "properties": {
        "command": {"const": "study", "description": "The ``command``."},
        "results": {
            "type": "array",
            "items": {"$ref": "#/$defs/Result"},
            "description": "One for each.",
        },
    },
    "$defs": {
        "Unused": {"type": "object", "properties": {}},
        "Result": {
            "type": "object",
            "description": "A setting.",
            "properties": {
                "layer": {"type": ["string", "null"], "description": "Its layer."},
                "size": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/Size"}]},
            },
        },
        "Size": {"type": "object", "properties": {"kind": {"enum": ["a", None]}}},
    },
}


def test_report_fields_become_tables() -> None:
    assert report_fields(SCHEMA).split("\n\n") == [
        "| field | type | what |\n| --- | --- | --- |\n"
        '| `command` | `"study"` | The `command`. |\n'
        "| `results` | list of [Result](#result) | One for each. |",
        "### Result",
        "A setting.",
        "| field | type | what |\n| --- | --- | --- |\n"
        "| `layer` | string or null | Its layer. |\n"
        "| `size` | integer or [Size](#size) |  |",
        "### Size",
        '| field | type | what |\n| --- | --- | --- |\n| `kind` | `"a"`, null |  |',
    ]


def test_the_report_pages_follow_the_fields() -> None:
    @dataclass
    class Report:
        """A report."""

        rows: int
        """Rows of it."""

    @dataclass
    class LongerReport:
        """A report."""

        rows: int
        """Rows of it."""

        keys: int
        """Keys of it."""

    before, after = (report_fields(json_schema(each)) for each in (Report, LongerReport))
    assert "| `rows` | integer | Rows of it. |" in before
    assert after == before + "\n| `keys` | integer | Keys of it. |"
