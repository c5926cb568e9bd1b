"""The one sink of the command line: the result goes to stdout, everything else to stderr.

A command makes one `Output`, its sink, and gives it everything that it has to say. With ``as_json``
the only thing on stdout is the document, and there is no progress bar; without it there is a
progress bar only where stderr is a terminal. Text is printed as it is: tensor names such as
``keys[0]`` are never taken for markup.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from sdsa_quant.files.outputs import check_outputs

from .interrupts import remark_on_interrupt, stop_if_interrupted
from .json_documents import json_for, strict_json, write_document
from .output_paths import file_output
from .table_data import Fields, Style, TableData
from .text import broken, encodable, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID
    from rich.text import Text

_PROGRESS_STEPS = 1000
_PIPE_WIDTH = 100  # columns of output that no terminal shows
_BLANK_LINES = re.compile("\n{3,}")


class ReaderLeftError(Exception):
    """Who reads stdout has left before the end, as ``head`` does."""


class Output:
    """Where one command writes.

    Parameters
    ----------
    as_json : bool
        Print the JSON document instead of tables and text.
    report_file : Path, optional
        Write the JSON document to this file too.
    force : bool
        Whether `report_file` may exist.
    """

    def __init__(
        self, *, as_json: bool = False, report_file: Path | None = None, force: bool = False
    ) -> None:
        self.as_json = as_json
        self.report_file = report_file
        self.force = force

    @property
    def width(self) -> int:
        """Columns of stdout's terminal; ``COLUMNS`` or 100 where it is not one."""
        return _console(sys.stdout).width

    def publish(self, document: object, *renderables: RenderableType) -> None:
        """Give a command's whole result: the document to the report file, then one or the other.

        The file is written first, so that it is there even if nobody reads stdout.
        """
        if self.report_file is not None:
            write_document(self.report_file, document, force=self.force)
        self.result(*renderables)
        self.document(document)

    def result(self, *renderables: RenderableType) -> None:
        """Print text and tables, the result for a reader, to stdout; silent with JSON.

        A text is one line, whatever names are in it: what would break it, or turn its direction, is
        written out. On a terminal it breaks between words, so that no number is cut; a path stays
        whole, so that it can be copied. In a file or a pipe the line stays whole, and no line has
        spaces at its end.
        """
        if self.as_json:
            return
        console = _console(sys.stdout)
        with console.capture() as capture:
            for renderable in renderables:
                for line in _lines(renderable, console):
                    console.print(line, soft_wrap=True)
        shown = capture.get()
        if not console.is_terminal:
            shown = "\n".join(line.rstrip(" ") for line in shown.split("\n"))
        # Tables keep a blank line on either side, and texts between them may ask for one too.
        _write(encodable(_BLANK_LINES.sub("\n\n", shown), sys.stdout.encoding))

    def document(self, document: object) -> None:
        """Print a document, the result for a program, to stdout; silent without JSON."""
        if self.as_json:
            _write(json_for(strict_json(document), sys.stdout.encoding) + "\n")

    def note(self, message: str) -> None:
        """Print one remark to stderr."""
        _console(sys.stderr).print(visible(message), soft_wrap=True)

    @contextmanager
    def progress(self, description: str, total: int, *, calm: bool = False) -> Iterator[Bar]:
        """Show progress on stderr while the body runs; yields ``advance(steps)``.

        Parameters
        ----------
        description : str
            What is done.
        total : int
            All steps.
        calm : bool
            Whether the bar moves only when it is told to, so that nothing runs beside what is
            timed.
        """
        stop_if_interrupted()
        console = _console(sys.stderr)
        if self.as_json or not console.is_terminal:
            yield Bar()
            return
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            *(() if calm else (TimeElapsedColumn(), TimeRemainingColumn())),
        )
        bar = Progress(*columns, console=console, transient=True, auto_refresh=not calm)
        with bar:
            yield Bar(bar, bar.add_task(description, total=total))

    @contextmanager
    def progress_of(
        self, description: str, *, goes_on: bool = False
    ) -> Iterator[Callable[[int, int], None]]:
        """As `progress`; yields ``show(done, total)``: how much is done, and how much there is.

        Parameters
        ----------
        description : str
            What is done.
        goes_on : bool
            Whether the same command goes on from where it was interrupted, which is said then.
        """
        with self.progress("starting" if goes_on else description, _PROGRESS_STEPS) as advance:
            shown = 0

            def show(done: int, total: int) -> None:
                nonlocal shown
                steps = _PROGRESS_STEPS * done // max(total, 1)
                if goes_on:
                    percent = 100 * steps // _PROGRESS_STEPS
                    remark_on_interrupt(f"the same command goes on from {percent} %")
                    if done:
                        advance.describe("writing the report" if done == total else description)
                advance(steps - shown)
                shown = steps

            yield show
            remark_on_interrupt("")


class Bar:
    """A progress bar, or none; called with the steps that were done."""

    def __init__(self, bar: Progress | None = None, task: TaskID | None = None) -> None:
        self._bar = bar
        self._task = task

    def __call__(self, steps: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=steps, refresh=True)

    def describe(self, description: str) -> None:
        """Say what is done from now on."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=description, refresh=True)


def report_sink(
    as_json: bool,
    report: str | None,
    *,
    outputs: Sequence[Path] = (),
    inputs: Sequence[Path] = (),
    force: bool = False,
) -> Output:
    """The sink of a command with ``--json`` and ``--report FILE``.

    Parameters
    ----------
    as_json : bool
        Whether ``--json`` was given.
    report : str, optional
        The file of ``--report``.
    outputs : sequence of Path
        Other files that the command writes.
    inputs : sequence of Path
        What the command reads.
    force : bool
        Whether outputs may exist.

    Raises
    ------
    InputError
        An output cannot be written, as `check_outputs` has it.
    """
    report_file = None if report is None else file_output("--report", report)
    files = [*outputs, *([] if report_file is None else [report_file])]
    if files:
        check_outputs(files, inputs, force=force)
    return Output(as_json=as_json, report_file=report_file, force=force)


def print_error(message: str) -> None:
    """Print one line to stderr: ``error: message``, its line breaks made spaces."""
    from rich.text import Text

    line = Text.assemble(("error: ", "bold red"), visible(" ".join(message.split())))
    _console(sys.stderr).print(line, soft_wrap=True)


def abandon_stdout() -> None:
    """Let what is left in stdout's buffer go nowhere, after a write to it has failed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
    except BrokenPipeError:
        # The command line's library would end the process with 1 for it, which is a failed check.
        raise ReaderLeftError from None


def _lines(renderable: RenderableType, console: Console) -> Iterator[RenderableType]:
    """Text in the lines that a terminal has room for; a table as it is."""
    from rich.text import Text

    if not isinstance(renderable, str | Text):
        yield renderable
        return
    text = renderable if isinstance(renderable, Text) else Text(renderable)
    shown = visible(text.plain)
    known = console.is_terminal or "COLUMNS" in os.environ
    lines = broken(shown, console.width, within_words=False) if known else [shown]
    yield from (Text(line, style=text.style) for line in lines)


def table(
    *headings: str,
    title: str | None = None,
    numbers_from: int = 1,
    text: tuple[str, ...] = (),
    style: Style = "report",
    shortens: str = "",
) -> TableData:
    """Empty table in the project's one look.

    Parameters
    ----------
    headings : str
        Column headings.
    title : str, optional
        Line above the table.
    numbers_from : int
        First column that is aligned to the right.
    text : tuple of str
        Headings of columns from there on that are text all the same.
    style : str
        ``report`` for a table on its own, ``compact`` for one of several on a screen, ``grid`` for
        one of many columns.
    shortens : str
        Heading of a column of long names, which may be shown by what differs.
    """
    return TableData(headings, title, numbers_from, text, style, shortens)


def heading(text: str) -> Text:
    """Bold line of text, such as the file that a table is about."""
    from rich.text import Text

    return Text(text, style="bold")


def fields_table(fields: Mapping[str, str]) -> Fields:
    """Names and what they are, in two columns without headings."""
    return Fields(fields)


def _console(file: TextIO) -> Console:
    from rich.console import Console

    console = Console(file=file, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console
