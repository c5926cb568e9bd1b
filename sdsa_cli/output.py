"""The one sink of the command line: the result goes to stdout, everything else to stderr.

A command makes one `Output` and gives it everything that it has to say. With ``as_json`` the only
thing on stdout is the document, and there is no progress bar; without it there is a progress bar
only where stderr is a terminal. Text is printed as it is: tensor names such as ``keys[0]`` are
never taken for markup.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from .interrupts import stop_if_interrupted
from .json_documents import strict_json

_PIPE_WIDTH = 100  # columns of output that no terminal shows
# Control characters but the line break: names in files may hold them, and terminals obey them.
# Halves of surrogate pairs stand for the bytes of a file name that is no text.
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class Output:
    """Where one command writes.

    Parameters
    ----------
    as_json : bool
        Print JSON documents instead of tables and text.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    @property
    def width(self) -> int:
        """Columns of stdout's terminal; ``COLUMNS`` or 100 where it is none."""
        return _console(sys.stdout).width

    def result(self, *renderables: Any) -> None:
        """Print text or rich renderables, the result for a reader, to stdout; silent with JSON.

        Lines of text are left to the terminal to wrap, so that paths in them can be copied. In
        files and pipes, lines have no spaces at their ends.
        """
        if self.as_json:
            return
        from rich.text import Text

        console = _console(sys.stdout)
        with console.capture() as capture:
            for renderable in renderables:
                soft_wrap = isinstance(renderable, str | Text)
                console.print(_Visible(renderable), soft_wrap=soft_wrap)
        shown = capture.get()
        if not console.is_terminal:
            shown = "\n".join(line.rstrip(" ") for line in shown.split("\n"))
        sys.stdout.write(shown)

    def document(self, document: object) -> None:
        """Print a document, the result for a program, to stdout; silent without JSON."""
        if self.as_json:
            print(strict_json(document))

    def note(self, message: str) -> None:
        """Print one remark to stderr."""
        _console(sys.stderr).print(visible(message), soft_wrap=True)

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show progress on stderr while the body runs; yields ``advance(steps)``."""
        stop_if_interrupted()
        console = _console(sys.stderr)
        if self.as_json or not console.is_terminal:
            yield lambda steps: None
            return
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(description, total=total)
            yield lambda steps: bar.advance(task, steps)


def print_error(message: str) -> None:
    """Print one line to stderr: ``error: message``, its line breaks made spaces."""
    from rich.text import Text

    line = Text.assemble(("error: ", "bold red"), visible(" ".join(message.split())))
    _console(sys.stderr).print(line, soft_wrap=True)


def visible(text: str) -> str:
    r"""`text` with its control characters, all but line breaks, written out as ``\x1b``."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def abandon_stdout() -> None:
    """Let what is left in stdout's buffer go nowhere, after a write to it has failed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class _Visible:
    """A renderable whose text, but not its style, goes through `visible`."""

    def __init__(self, renderable: Any) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def table(
    *headings: str,
    title: str | None = None,
    numbers_from: int = 1,
    optional: Sequence[str] = (),
) -> Any:
    """Empty rich table in the project's one look.

    Parameters
    ----------
    headings : str
        Column headings.
    title : str, optional
        Line above the table.
    numbers_from : int
        First column that is aligned to the right.
    optional : sequence of str
        Columns that a narrow terminal does without, the first one first; numbers of such a table
        are never cut.
    """
    from rich import box
    from rich.table import Table

    from .fitted_table import FittedTable

    kind = FittedTable if optional else Table
    result = kind(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    if isinstance(result, FittedTable):
        result.optional = optional
    for index, heading in enumerate(headings):
        result.add_column(heading, justify="right" if index >= numbers_from else "left")
    return result


def heading(text: str) -> Any:
    """Bold line of text, such as the file that a table is about."""
    from rich.text import Text

    return Text(text, style="bold")


def fields_table(fields: Mapping[str, str]) -> Any:
    """Rich table of two columns without headings: names and what they are."""
    from rich.table import Table

    result = Table.grid(padding=(0, 2))
    result.add_column(style="dim")
    result.add_column(overflow="fold")
    for name, value in fields.items():
        result.add_row(name, value)
    return result


def _console(file: TextIO) -> Any:
    from rich.console import Console

    console = Console(file=file, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console
