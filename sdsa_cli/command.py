"""What the commands of `sdsa` have beyond Typer: help to copy from."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from .help_page import print_help


class SdsaCommand(TyperCommand):
    """A command whose epilog is example commands, one a line."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help as `print_help` lays it out."""
        print_help(self, ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line; required arguments without braces."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]
