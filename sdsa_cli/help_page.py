"""What ``--help`` prints: usage, description, arguments, options, commands and examples.

Texts are shown as they are written, brackets and all, and no name is cut. An entry's text stands
beside its name where there is room for it, and below it on a narrow screen or after a long name.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .output import Output, heading

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_WIDEST = 100  # columns; longer lines are hard to read
_TEXT_COLUMN = 28  # of an entry whose text stands beside its name
_NARROW = 80  # columns; below this, texts stand below their names
_INDENT_BELOW = 6
_TIE = "\u00a0"  # a space at which no line breaks


def print_help(command: Any, context: Any) -> None:
    """Print the help of a command, or of the group of all commands."""
    sink = Output()
    width = min(sink.width, _WIDEST) - 1
    parts: list[RenderableType] = ["", " " + command.get_usage(context), ""]
    for paragraph in (command.help or "").split("\n\n"):
        parts += [*_wrapped(paragraph, width, 1), ""]
    for title, entries in _sections(command, context):
        parts += [heading(f" {title}"), *_entry_lines(entries, width), ""]
    if command.epilog:
        parts += [heading(" Examples"), ""]
        for example in command.epilog.splitlines():
            parts += [*(f" {line}" for line in continued_lines(example, width - 1)), ""]
    sink.result(*parts[:-1])


def _sections(command: Any, context: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Titles, each with names and texts: arguments, options and, of a group, commands."""
    params = [each for each in command.get_params(context) if not getattr(each, "hidden", False)]
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        shown = [each for each in params if each.param_type_name == kind]
        if shown:
            yield title, [(_name(each), _description(each)) for each in shown]
    commands = getattr(command, "commands", {})
    if commands:
        yield (
            "Commands",
            [(name, each.help.partition("\n\n")[0]) for name, each in commands.items()],
        )


def _name(param: Any) -> str:
    return value_name(param) if param.param_type_name == "argument" else option_names(param)


def _description(param: Any) -> str:
    default = default_text(param)
    after = "[required]" if param.required else f"[default:{_TIE}{default}]" if default else ""
    return f"{param.help or ''} {after}".strip()


def option_names(option: Any) -> str:
    """An option as it is typed: ``-o, --output CACHE``, ``--force``, ``--plots, --no-plots``."""
    names = ", ".join(sorted([*option.opts, *option.secondary_opts], key=_is_long))
    return names if option.is_flag else f"{names} {value_name(option)}"


def _is_long(name: str) -> bool:
    return name.startswith("--")


def value_name(param: Any) -> str:
    """What stands for the value of an option or an argument: ``FILE``, or its choices."""
    if param.metavar:
        return str(param.metavar)
    choices = _choices(param)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    return str(param.name).upper()


def _choices(param: Any) -> tuple[Any, ...]:
    if hasattr(param, "type_descriptor"):
        return getattr(param.type_descriptor.annotation, "__args__", ())
    return tuple(getattr(param.type, "choices", ()))  # typer 0.27


def default_text(param: Any) -> str:
    """The default of an option as it would be typed; empty where there is none to show."""
    if param.required or not param.show_default or param.default in (None, False, (), ""):
        return ""
    return str(param.opts[0] if param.default is True else param.default)


def continued_lines(command: str, width: int) -> list[str]:
    r"""A command in lines that a shell reads as one: all except the last end with ``\``.

    A line breaks only before an option, so that every option stays with its value.
    """
    first, *options = re.split(r" (?=--?\w)", command)
    lines = [first]
    for option in options:
        if len(f"{lines[-1]} {option}") <= width - len(" \\"):
            lines[-1] += f" {option}"
        else:
            lines[-1] += " \\"
            lines.append(f"    {option}")
    return lines


def _entry_lines(entries: Sequence[tuple[str, str]], width: int) -> Iterator[Text]:
    from rich.text import Text

    indent = _INDENT_BELOW if width < _NARROW - 1 else _TEXT_COLUMN
    for name, text in entries:
        lines = _wrapped(text, width, indent)
        shown = f"  {name}"
        first = ""
        if len(shown) + 2 <= indent and lines:
            first = lines.pop(0)[len(shown) :]
        yield Text.assemble((shown, "bold cyan"), first)
        yield from map(Text, lines)


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    """`text` in lines of at most `width` columns, words whole, each begun by `indent` spaces."""
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_TIE, " ") for line in lines]
