"""What the commands of `sdsa` have beyond Typer: help to copy from."""

from __future__ import annotations

import textwrap
from typing import Any

from typer.core import TyperCommand, TyperOption

from .output import Output, heading


class SdsaCommand(TyperCommand):
    """A command whose epilog is example commands."""

    def get_params(self, ctx: Any) -> Any:
        """The parameters, as `without_flag_types` has them."""
        return without_flag_types(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; the examples last, without the spaces that Typer ends lines with.

        A space after a line's ``\\`` would part it from the next line where it is pasted.
        """
        examples, self.epilog = self.epilog, None
        super().format_help(ctx, formatter)
        self.epilog = examples
        if examples:
            Output().result(heading(" Examples"), "", textwrap.indent(examples, " "), "")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line; required arguments without braces."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


def without_flag_types(params: list[Any]) -> list[Any]:
    """The parameters; the help of flags without Typer's ``<bool>``, which no one types."""
    for param in params:
        if isinstance(param, TyperOption) and param.is_flag:
            param.metavar = ""
    return params
