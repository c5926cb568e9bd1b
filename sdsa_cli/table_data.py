"""Tables as data, and their two renderers: a terminal of any width, and HTML.

On a terminal nothing is ever cut or left out: names break into lines, and columns that still have
no room go below, as another block of lines that begin with the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Literal

from .text import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

Style = Literal["report", "compact", "grid"]
# Spaces between columns: a table on its own, one of a full screen, one of many columns.
_GAPS: dict[Style, int] = {"report": 2, "compact": 2, "grid": 1}
_LEAST_NAME_WIDTH = 12  # of a column of text that breaks into lines, where its cells are longer


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table, or a heading over the lines that follow it."""

    cells: tuple[str, ...]
    """Text of each column; of a heading only the first, which may be as wide as the table."""
    is_heading: bool = False
    """Whether the line is a heading."""
    rule_below: bool = False
    """Whether a rule parts the line from the next one."""


@dataclass(slots=True)
class TableData:
    """A table: its headings, its lines, and which of its columns are text."""

    headings: tuple[str, ...]
    """Text over each column."""
    title: str | None = None
    """Line above the table."""
    numbers_from: int = 1
    """First column of numbers, which are aligned to the right; names are those before it."""
    text: tuple[str, ...] = ()
    """Headings of later columns that are text all the same."""
    style: Style = "report"
    """How much room the table takes: ``report``, ``compact`` (no blank lines) or ``grid``."""
    rows: list[Row] = field(default_factory=list)
    """The lines, in order."""

    def add_row(self, *cells: str, rule_below: bool = False) -> None:
        """Add a line.

        Raises
        ------
        ValueError
            There are more or fewer cells than columns.
        """
        if len(cells) != len(self.headings):
            raise ValueError(f"a row has {len(self.headings)} cells, got {len(cells)}")
        self.rows.append(Row(tuple(map(visible, cells)), rule_below=rule_below))

    def add_heading(self, text: str) -> None:
        """Add a heading over the lines that follow."""
        self.rows.append(Row((visible(text),), is_heading=True))

    def is_text(self, column: int) -> bool:
        """Whether a column is aligned to the left, and may break its cells into lines."""
        return column < self.numbers_from or self.headings[column] in self.text

    def html(self) -> str:
        """The table as HTML: the same cells, numbers to the right, and a title as a paragraph."""
        classes = [
            ' class="text"' if self.is_text(column) else "" for column in range(len(self.headings))
        ]
        head = "".join(
            f"<th{kind}>{escape(heading)}</th>"
            for kind, heading in zip(classes, self.headings, strict=True)
        )
        rows = "".join(f"<tr>{_html_cells(row, classes)}</tr>" for row in self.rows)
        title = f"<p>{escape(self.title)}</p>" if self.title else ""
        return f'{title}<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the table for a terminal of ``options.max_width`` columns."""
        from rich.text import Text

        if self.title is not None:
            yield Text(self.title, style="bold")
        spaced = self.style != "compact"
        for index, block in enumerate(self._blocks(options.max_width)):
            if index or spaced:
                yield Text()
            for line in self._block_lines(console, block):
                line.no_wrap, line.overflow = True, "ignore"
                yield line
        if spaced:
            yield Text()

    def _blocks(self, room: int) -> Iterator[dict[int, int]]:
        """Columns side by side and their widths, one block below the other.

        Every block begins with the columns of names, or the first column where there are none, and
        has at least one more.
        """
        natural = [self._natural_width(column) for column in range(len(self.headings))]
        names = list(range(min(max(self.numbers_from, 1), len(self.headings))))
        others = list(range(len(names), len(self.headings)))
        if not others:
            yield self._fitted(names, natural, room)
        while others:
            count = len(others)
            while count > 1 and not self._fits([*names, *others[:count]], natural, room):
                count -= 1
            yield self._fitted([*names, *others[:count]], natural, room)
            others = others[count:]

    def _natural_width(self, column: int) -> int:
        """Width at which no cell of a column breaks other than where it says."""
        from rich.cells import cell_len

        cells = [row.cells[column] for row in self.rows if not row.is_heading]
        lines = [line for cell in cells for line in cell.splitlines()]
        return max(map(cell_len, (self.headings[column], *lines)))

    def _least_width(self, column: int, natural: Sequence[int]) -> int:
        if not self.is_text(column):
            return natural[column]
        return min(natural[column], _LEAST_NAME_WIDTH)

    def _gaps(self, count: int) -> int:
        return _GAPS[self.style] * (count - 1)

    def _fits(self, columns: Sequence[int], natural: Sequence[int], room: int) -> bool:
        least = sum(self._least_width(column, natural) for column in columns)
        return least + self._gaps(len(columns)) <= room

    def _fitted(self, columns: Sequence[int], natural: Sequence[int], room: int) -> dict[int, int]:
        """The columns' widths: natural ones, narrowed where the room asks for it.

        The widest text first, as far as it reads well; then further; and numbers only where a
        terminal has no room for one number, whose digits then go on in the next line.
        """
        widths = {column: natural[column] for column in columns}
        well = {column: self._least_width(column, natural) for column in columns}
        further = {column: 1 if self.is_text(column) else natural[column] for column in columns}
        for least in (well, further, dict.fromkeys(columns, 1)):
            while sum(widths.values()) + self._gaps(len(columns)) > room:
                wide = [column for column in columns if widths[column] > least[column]]
                if not wide:
                    break
                widths[max(wide, key=lambda column: widths[column])] -= 1
        return widths

    def _block_lines(self, console: Console, widths: dict[int, int]) -> Iterator[Text]:
        from rich.text import Text

        total = sum(widths.values()) + self._gaps(len(widths))
        headings = {column: self.headings[column] for column in widths}
        yield from self._row_lines(console, widths, headings, "bold")
        yield Text("─" * total)
        for row in self.rows:
            if row.is_heading:
                yield from Text(row.cells[0], style="bold").wrap(console, total, overflow="fold")
                continue
            cells = {column: row.cells[column] for column in widths}
            yield from self._row_lines(console, widths, cells, "")
            if row.rule_below:
                yield Text("─" * total)

    def _row_lines(
        self, console: Console, widths: dict[int, int], cells: dict[int, str], style: str
    ) -> Iterator[Text]:
        """The lines of a row, as many as its tallest cell has."""
        from rich.text import Text

        broken = {
            column: list(Text(cell).wrap(console, widths[column], overflow="fold"))
            for column, cell in cells.items()
        }
        gap = " " * _GAPS[self.style]
        for index in range(max(map(len, broken.values()), default=0)):
            parts = []
            for column, lines in broken.items():
                part = lines[index].copy() if index < len(lines) else Text()
                part.align("left" if self.is_text(column) else "right", widths[column])
                parts.append(part)
            line = Text(gap, style=style).join(parts)
            line.stylize(style)
            line.rstrip()
            yield line


def _html_cells(row: Row, classes: Sequence[str]) -> str:
    if row.is_heading:
        return f'<td class="text" colspan="{len(classes)}"><b>{escape(row.cells[0])}</b></td>'
    return "".join(
        f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(classes, row.cells, strict=True)
    )
