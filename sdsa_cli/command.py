"""What the commands of `sdsa` have beyond Typer: help to copy from, and no empty arguments."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperOption

from sdsa_quant.errors import InputError

from .help_page import print_help


class SdsaCommand(TyperCommand):
    """A command whose epilog is example commands, one a line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line, of which none may be empty.

        An empty word is what an unset variable of a shell leaves. As a path it would mean the
        current folder.

        Raises
        ------
        InputError
            A word is empty, or nothing follows the ``=`` of an option.
        """
        with_value = {
            name
            for param in self.params
            if isinstance(param, TyperOption) and not param.is_flag
            for name in param.opts
        }
        for before, word in zip(["", *args], args, strict=False):
            name, equals, value = word.partition("=")
            if word == "" or (equals and not value and name in with_value):
                option = name or (before if before in with_value else "an argument")
                raise InputError(f"{option} must not be empty, got ''")
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help as `print_help` lays it out."""
        print_help(self, ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line; required arguments without braces."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]
