"""Every argument that an error of the library can name is something that the command line takes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from sdsa_cli import flags
from sdsa_cli.app import app
from sdsa_cli.flags import flag_spelling

ROOT = Path(__file__).parents[2]
# What no command calls yet: their tensors are not words of a command line.
PYTHON_ONLY = ("kernels/prefill/", "kernels/selection/", "quant/selection/")


def named_arguments() -> Iterator[tuple[str, str]]:
    """File and name of every ``argument="..."`` and ``Hint("...")`` of the library."""
    for path in (*ROOT.glob("quant/**/*.py"), *ROOT.glob("kernels/**/*.py")):
        if path.relative_to(ROOT).as_posix().startswith(PYTHON_ONLY):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            given = [word.value for word in call.keywords if word.arg == "argument"]
            if isinstance(call.func, ast.Name) and call.func.id == "Hint":
                given += call.args[:1]
            for value in given:
                for part in ast.walk(value):  # also both sides of a condition
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield path.relative_to(ROOT).as_posix(), part.value


def spellings_of_the_commands() -> set[str]:
    """Every option of every command, and the word of every argument."""
    words = {"--debug", "--version"}
    group = typer.main.get_command(app)
    for command in group.commands.values():  # type: ignore[attr-defined]
        for parameter in command.params:
            words.update(parameter.opts, parameter.secondary_opts)
            words.add(parameter.metavar or "")
    return words


@pytest.mark.parametrize("name", sorted({name for _, name in named_arguments()}))
def test_an_argument_in_an_error_is_one_of_the_command_line(name: str) -> None:
    files = sorted({file for file, other in named_arguments() if other == name})
    assert flag_spelling(name, None) in spellings_of_the_commands(), files


def test_the_table_has_only_what_differs_from_the_rule() -> None:
    library = "".join(path.read_text() for path in ROOT.glob("quant/**/*.py"))
    for name, flag in flags._SPELLINGS.items():
        assert flag != "--" + name.replace("_", "-"), name
        assert f'"{name}"' in library, f"{name} is not named by the library any more"
