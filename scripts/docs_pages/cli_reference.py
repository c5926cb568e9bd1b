"""The reference of the command line, from the options as the command itself has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from .markdown import table


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
    words = [one.metavar if one.required else f"[{one.metavar}]" for one in arguments]
    yield f"    {' '.join([name, *words, '[OPTIONS]'])}"
    if arguments:
        yield table(
            ["argument", "what it is"],
            [[f"`{one.metavar}`", _sentence(one.help)] for one in arguments],
        )
    yield table(
        ["option", "what it does", "default"], [_option(one) for one in _shown(command, "Option")]
    )
    if command.epilog:
        examples = command.epilog.replace("\n\n", "\n").splitlines()
        yield "\n".join(f"    {line}" for line in examples)


def _shown(command: Any, kind: str) -> list[Any]:
    """The parameters of a kind that the help shows."""
    return [one for one in command.params if type(one).__name__.endswith(kind) and not one.hidden]


def _option(option: Any) -> list[str]:
    names = ", ".join(sorted([*option.opts, *option.secondary_opts], key=len))
    spelled = f"`{names}`" if option.is_flag else f"`{names} {_metavar(option)}`"
    return [spelled, _sentence(option.help), _default(option)]


def _metavar(option: Any) -> str:
    if option.metavar:
        return str(option.metavar)
    annotation = option.type_descriptor.annotation
    choices = getattr(annotation, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    return str(option.name).upper()


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return option.show_default
    if not option.show_default or option.default in (None, False, (), ""):
        return ""
    return f"`{option.default}`"


def _prose(text: str | None) -> str:
    """Help as Markdown: rich's escapes undone."""
    return (text or "").replace("\\[", "[").strip()


def _sentence(text: str | None) -> str:
    return _prose(text).rstrip(".")
