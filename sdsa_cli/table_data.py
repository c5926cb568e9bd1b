"""Tables as data, and their two renderers: a terminal of any width, and HTML.

On a terminal nothing is ever cut or left out: names break into lines, and columns that still have
no room go below, as another block of lines that begin with the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from sdsa_quant.files.names import without_common_ends

from .text import broken, html_text, longest_number, visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

Cell = str | Sequence[str]  # text, or the lines of it
Style = Literal["report", "compact", "grid"]
# Spaces between columns: a table on its own, one of a full screen, one of many columns.
_GAPS: dict[Style, int] = {"report": 2, "compact": 2, "grid": 1}
_LEAST_IN_COMMON = 6  # characters, for which it is worth a line of its own
_WIDEST_HEADING = 16  # of a column of numbers; a longer one breaks into lines
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
    shortens: str = ""
    """Heading of a column of long names: where the table has no room for them, they are shown by
    what differs, under a line with what they have in common."""
    not_names: tuple[str, ...] = ("...", "all", "")
    """Cells of that column that are not names."""
    follows: tuple[str, ...] = ()
    """Headings of columns that say nothing without the one before, and stay beside it."""
    rows: list[Row] = field(default_factory=list)
    """The lines, in order."""

    def add_row(self, *cells: Cell, rule_below: bool = False) -> None:
        """Add a row; a cell of several lines is a sequence.

        Raises
        ------
        ValueError
            There are more or fewer cells than columns.
        """
        if len(cells) != len(self.headings):
            raise ValueError(f"a row has {len(self.headings)} cells, got {len(cells)}")
        self.rows.append(Row(tuple(map(_shown, cells)), rule_below=rule_below))

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
            f"<th{kind}>{html_text(heading)}</th>"
            for kind, heading in zip(classes, self.headings, strict=True)
        )
        rows = "".join(f"<tr>{_html_cells(row, classes)}</tr>" for row in self.rows)
        title = f"<p>{html_text(self.title)}</p>" if self.title else ""
        return f'{title}<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the table for a terminal of ``options.max_width`` columns."""
        from rich.text import Text

        room = options.max_width
        pattern, shown = self._with_short_names(room)
        above = (
            []
            if self.title is None
            else [Text(line, style="bold") for line in broken(visible(self.title), room)]
        )
        yield from (*above, *(Text(line) for line in broken(pattern, room) if pattern))
        spaced = self.style != "compact"
        for index, block in enumerate(shown._blocks(room)):
            if index or spaced:
                yield Text()
            for line in shown._block_lines(block):
                line.no_wrap, line.overflow = True, "ignore"
                yield line
        if spaced:
            yield Text()

    def _with_short_names(self, room: int) -> tuple[str, TableData]:
        """The table with room for its names, and a line for what all of them have in common."""
        natural = [self._natural_width(column) for column in range(len(self.headings))]
        if not self.shortens or sum(natural) + self._gaps(len(natural)) <= room:
            return "", self
        column = self.headings.index(self.shortens)
        names = list(dict.fromkeys(r.cells[column] for r in self.rows if not r.is_heading))
        names = [name for name in names if name not in self.not_names]
        if len(names) < 2:
            return "", self
        pattern, short = without_common_ends(names)
        if len(pattern) < _LEAST_IN_COMMON or "" in short:
            return "", self
        by_name = dict(zip(names, short, strict=True))
        rows = [
            row
            if row.is_heading
            else replace(
                row,
                cells=tuple(
                    by_name.get(cell, cell) if index == column else cell
                    for index, cell in enumerate(row.cells)
                ),
            )
            for row in self.rows
        ]
        return f"{self.shortens} *: {pattern}", replace(self, rows=rows, shortens="")

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
            while count > 1 and count < len(others) and self._follows(others[count]):
                count -= 1
            yield self._fitted([*names, *others[:count]], natural, room)
            others = others[count:]

    def _follows(self, column: int) -> bool:
        return self.headings[column] in self.follows

    def _natural_width(self, column: int) -> int:
        """Width at which no cell of a column breaks, nor a heading that reads well in one line."""
        from rich.cells import cell_len

        cells = [row.cells[column] for row in self.rows if not row.is_heading]
        lines = [line for cell in cells for line in cell.splitlines()]
        heading = cell_len(self.headings[column])
        if not self.is_text(column):
            heading = min(heading, _WIDEST_HEADING)
        return max(heading, *map(cell_len, lines), 0)

    def _least_width(self, column: int, natural: Sequence[int]) -> int:
        if not self.is_text(column):
            return natural[column]
        return min(natural[column], max(_LEAST_NAME_WIDTH, self._longest_number(column)))

    def _longest_number(self, column: int) -> int:
        """Columns of the longest number in a column of text, where no line breaks."""
        cells = [row.cells[column] for row in self.rows if not row.is_heading]
        return max(map(longest_number, (self.headings[column], *cells)))

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
        further = {
            column: max(self._longest_number(column), 1)
            if self.is_text(column)
            else natural[column]
            for column in columns
        }
        for least in (well, further, dict.fromkeys(columns, 1)):
            while sum(widths.values()) + self._gaps(len(columns)) > room:
                wide = [column for column in columns if widths[column] > least[column]]
                if not wide:
                    break
                widths[max(wide, key=lambda column: widths[column])] -= 1
        return widths

    def _block_lines(self, widths: dict[int, int]) -> Iterator[Text]:
        from rich.text import Text

        total = sum(widths.values()) + self._gaps(len(widths))
        headings = {column: self.headings[column] for column in widths}
        yield from self._row_lines(widths, headings, "bold")
        yield Text("─" * total)
        for row in self.rows:
            if row.is_heading:
                yield from (Text(line, style="bold") for line in broken(row.cells[0], total))
                continue
            cells = {column: row.cells[column] for column in widths}
            yield from self._row_lines(widths, cells, "")
            if row.rule_below:
                yield Text("─" * total)

    def _row_lines(
        self, widths: dict[int, int], cells: dict[int, str], style: str
    ) -> Iterator[Text]:
        """The lines of a row, as many as its tallest cell has."""
        from rich.text import Text

        lines_of = {
            column: [part for line in cell.split("\n") for part in broken(line, widths[column])]
            for column, cell in cells.items()
        }
        gap = " " * _GAPS[self.style]
        for index in range(max(map(len, lines_of.values()), default=0)):
            parts = []
            for column, lines in lines_of.items():
                part = Text(lines[index] if index < len(lines) else "")
                part.align("left" if self.is_text(column) else "right", widths[column])
                parts.append(part)
            line = Text(gap, style=style).join(parts)
            line.stylize(style)
            line.rstrip()
            yield line


@dataclass(frozen=True, slots=True)
class Fields:
    """Names and what they are, in two columns without headings; lines of a value stay together."""

    fields: Mapping[str, str]
    """Values by name."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a line for each field; where names take half of the room, values go below them."""
        from rich.cells import cell_len, set_cell_size
        from rich.text import Text

        room, gap = options.max_width, _GAPS["report"]
        names = {name: visible(name) for name in self.fields}
        width = max(map(cell_len, names.values()), default=0)
        beside = width + gap <= room // 2
        indent = width + gap if beside else gap
        for name, value in self.fields.items():
            lines = broken(visible(value), max(room - indent, 1))
            if beside:
                first = (set_cell_size(names[name], indent), lines.pop(0))
                yield _line(Text.assemble((first[0], "dim"), first[1]))
            else:
                yield from (_line(Text(part, style="dim")) for part in broken(names[name], room))
            yield from (_line(Text(" " * indent + line)) for line in lines)


def _line(text: Text) -> Text:
    """A line that is as wide as it has to be."""
    text.rstrip()
    text.no_wrap, text.overflow = True, "ignore"
    return text


def _shown(cell: Cell) -> str:
    """A cell's text, its own line breaks written out, the lines of a sequence below each other."""
    return visible(cell) if isinstance(cell, str) else "\n".join(map(visible, cell))


def _html_cells(row: Row, classes: Sequence[str]) -> str:
    cells = [html_text(cell.replace("\n", " ")) for cell in row.cells]
    if row.is_heading:
        return f'<td class="text" colspan="{len(classes)}"><b>{cells[0]}</b></td>'
    return "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(classes, cells, strict=True))
