"""Option types that several commands share, and the look of the examples in their help."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from .interrupts import stop_if_interrupted
from .output_paths import STDOUT, file_output

_EXAMPLE_WIDTH = 78

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document to stdout instead of tables.")
]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Write the report as one JSON document to FILE. Without FILE, at the end of the line "
        "or before another option: print it to stdout instead of tables.",
    ),
]
ForceFlag = Annotated[bool, typer.Option("--force", help="Replace an output that exists.")]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N; auto takes a GPU if any."
    ),
]
SoftmaxScaleOption = Annotated[
    float | None,
    typer.Option(
        "--softmax-scale",
        metavar="SCALE",
        help="Multiplies a score before the softmax of mass@k; default: 1/sqrt(128).",
    ),
]
BackendOption = Annotated[
    Literal["auto", "torch", "triton", "cute"],
    typer.Option(
        "--backend",
        metavar="NAME",
        help="What computes the scores: torch, triton, cute, or auto for the first that can.",
    ),
]


def examples(*lines: str) -> str:
    """Epilog of a command's help: example commands, as they would be typed, long ones continued."""
    return "\n\n".join("\n".join(continued_lines(line)) for line in lines)


def continued_lines(command: str) -> list[str]:
    """A command in lines of at most 78 columns, which a shell reads as one: they end with ``\\``.

    A line breaks only before an option, so that every option stays with its value.
    """
    first, *options = re.split(r" (?=--?\w)", command)
    lines = [first]
    for option in options:
        if len(f"{lines[-1]} {option}") <= _EXAMPLE_WIDTH - len(" \\"):
            lines[-1] += f" {option}"
        else:
            lines[-1] += " \\"
            lines.append(f"    {option}")
    return lines


def help_text(function: Callable[..., None]) -> str:
    """A command's docstring as its help: paragraphs without line breaks, brackets as they are."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    return "\n\n".join(_literal(" ".join(paragraph.split())) for paragraph in paragraphs)


def _literal(text: str) -> str:
    """`text` with nothing in it that Typer would take for rich markup."""
    return text.replace("[", "\\[")


def json_file(given: str | None) -> Path | None:
    """The file of ``--json FILE``; None without the option, and for stdout.

    Raises
    ------
    InputError
        It names a folder.
    """
    return None if given is None or given == STDOUT else file_output("--json", given)


def choose_device(name: str) -> str:
    """Name of the torch device that ``--device`` means: ``auto`` is ``cuda`` if there is one.

    Raises
    ------
    InputError
        `name` is no device.
    UnsupportedError
        This process has no such device.
    """
    import torch

    from sdsa_quant.errors import InputError, UnsupportedError

    stop_if_interrupted()  # an import as large as that of torch may have swallowed it
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= found:
            raise UnsupportedError(f"--device {name}: this process sees {found} CUDA devices")
    return name
