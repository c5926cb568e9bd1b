"""A rich table that leaves out columns, rather than digits, where a terminal is narrow."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

_ANY_WIDTH = 1 << 16


class FittedTable(Table):
    """A table whose optional columns go where there is no room for all columns.

    Cells that still have no room break into lines, so that no digit is ever lost.

    Attributes
    ----------
    optional : sequence of str
        Headings of the columns that may be left out; the first one goes first.
    """

    optional: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the form with the most columns that fits."""
        fitted = copy.copy(self)
        for column in fitted.columns:
            column.overflow = "fold"
        unlimited = options.update_width(_ANY_WIDTH)
        for heading in self.optional:
            if Measurement.get(console, unlimited, fitted).maximum <= options.max_width:
                break
            fitted.columns = [column for column in fitted.columns if column.header != heading]
        yield from Table.__rich_console__(fitted, console, options)
