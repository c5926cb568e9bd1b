"""What the commands of `sdsa` have beyond Typer: ``--json`` without a file, help to copy from."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from typer.core import TyperCommand, TyperOption

from .output import Output, heading
from .output_paths import STDOUT

_JSON = "--json"


class SdsaCommand(TyperCommand):
    """A command whose ``--json`` may always stand alone, and whose epilog is example commands.

    Where ``--json`` takes a file, it means stdout at the end of the line or before another option,
    as in the commands where it is a flag.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command's name."""
        takes_file = any(_JSON in option.opts and not option.is_flag for option in _options(self))
        return super().parse_args(ctx, fill_in_stdout(args) if takes_file else args)

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


def fill_in_stdout(words: Sequence[str]) -> list[str]:
    """The words with ``-`` after each ``--json`` that no file follows."""
    filled = []
    for word, following in zip_longest(words, words[1:]):
        filled.append(word)
        if word == _JSON and (following is None or (following[:1] == "-" and following != STDOUT)):
            filled.append(STDOUT)
    return filled


def _options(command: TyperCommand) -> list[TyperOption]:
    return [param for param in command.params if isinstance(param, TyperOption)]
