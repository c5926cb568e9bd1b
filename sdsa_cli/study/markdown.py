"""A study's answer and tables in Markdown, to paste into an issue or a pull request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sdsa_cli.table_data import TableData
from sdsa_cli.text import visible

from .tables import errors_table, layers_table, recall_table, suggestion_lines, verdict_lines
from .verdict import Serving, choices_table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from sdsa_quant.study.report import StudyReport


@dataclass(frozen=True, slots=True)
class Markdown:
    """Lines that stay whole at any width."""

    lines: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield each line as it is."""
        from rich.text import Text

        for line in self.lines:
            yield Text(line, no_wrap=True, overflow="ignore")


def study_markdown(report: StudyReport, serving: Serving) -> Markdown:
    """The answer and the tables of a study, every layer in them."""
    tables = [
        recall_table(report),
        choices_table(report),
        layers_table(report, whole=True) if len(report.layers) > 1 else None,
        errors_table(report),
    ]
    lines: list[str] = []
    for line in verdict_lines(report, serving):
        lines += [visible(line), ""]
    for each in tables:
        lines += [] if each is None else [*_table_lines(each), ""]
    for line in suggestion_lines(report):
        lines += [f"- {visible(line)}"]
    return Markdown(tuple(lines))


def _table_lines(data: TableData) -> list[str]:
    """A table as GitHub shows it; headings over lines become lines of their own in bold."""
    width = len(data.headings)
    rules = ["---" if data.is_text(column) else "---:" for column in range(width)]
    rows = [
        [f"**{row.cells[0]}**", *[""] * (width - 1)] if row.is_heading else row.cells
        for row in data.rows
    ]
    title = [] if data.title is None else [data.title, ""]
    return [*title, *map(_line, [data.headings, rules, *rows])]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.strip().replace("|", "\\|") for cell in cells) + " |"
