"""The reference of the command line, from the options as the command itself has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from sdsa_cli.help_page import continued_lines, default_text, option_names, value_name

from .markdown import table

_EXAMPLE_WIDTH = 78


def cli_reference() -> str:
    """A section for each command: what it does, its arguments and options, examples."""
    from sdsa_cli.app import app

    root = typer.main.get_command(app)
    sections = ["\n\n".join(_options_of_all(root))]
    sections += ["\n\n".join(_section(name, command)) for name, command in _commands(root, "sdsa")]
    return "\n\n".join(sections)


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def _options_of_all(root: Any) -> Iterator[str]:
    yield "## `sdsa`"
    yield _prose(root.help)
    yield table(["option", "what it does"], [_option(one)[:2] for one in _shown(root, "Option")])


def _section(name: str, command: Any) -> Iterator[str]:
    yield f"## `{name}`"
    yield _prose(command.help)
    arguments = _shown(command, "Argument")
    words = [value_name(one) if one.required else f"[{value_name(one)}]" for one in arguments]
    yield f"    {' '.join([name, *words, '[OPTIONS]'])}"
    if arguments:
        yield table(
            ["argument", "what it is"],
            [[f"`{value_name(one)}`", _sentence(one.help)] for one in arguments],
        )
    yield table(
        ["option", "what it does", "default"], [_option(one) for one in _shown(command, "Option")]
    )
    if command.epilog:
        examples = command.epilog.splitlines()
        lines = [line for one in examples for line in continued_lines(one, _EXAMPLE_WIDTH)]
        yield "\n".join(f"    {line}" for line in lines)


def _shown(command: Any, kind: str) -> list[Any]:
    """The parameters of a kind that the help shows."""
    return [one for one in command.params if type(one).__name__.endswith(kind) and not one.hidden]


def _option(option: Any) -> list[str]:
    default = default_text(option)
    shown = f"`{default}`" if default else "required" if option.required else ""
    return [f"`{option_names(option)}`", _sentence(option.help), shown]


def _prose(text: str | None) -> str:
    return (text or "").strip()


def _sentence(text: str | None) -> str:
    return _prose(text).rstrip(".")
