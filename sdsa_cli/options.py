"""Options that several commands share, and the parsers of their values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from sdsa_quant.errors import InputError
from sdsa_quant.files.text import INT32_MAX, whole_number
from sdsa_quant.layout import DEFAULT_SOFTMAX_SCALE, DEFAULT_TOP_K

from .completion import tensors_of_keys, tensors_of_queries, words
from .interrupts import stop_if_interrupted
from .text import shortened

DEFAULT_TOP_K_TEXT = ",".join(map(str, DEFAULT_TOP_K))

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document to stdout instead of tables.")
]
ReportOption = Annotated[
    str | None,
    typer.Option("--report", metavar="FILE", help="Also write the JSON document to a file."),
]
ForceFlag = Annotated[bool, typer.Option("--force", help="Replace an output that exists.")]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N; auto takes a GPU if any."
    ),
]
BackendName = Literal["auto", "cute", "triton", "torch"]
BackendOption = Annotated[
    BackendName,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="What computes the scores: torch, triton, cute, or auto for the first that can.",
    ),
]
BackendListOption = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="LIST",
        help="Of auto, cute, triton and torch.",
        autocompletion=words("auto", "cute", "triton", "torch"),
    ),
]
CapturedKeysArgument = Annotated[
    Path,
    typer.Argument(
        metavar="KEYS", help="Unquantized keys: a safetensors file, a folder of them, or an index."
    ),
]
CapturedQueriesArgument = Annotated[
    Path,
    typer.Argument(metavar="QUERIES", help="Query rows, likewise; both may be the same files."),
]
KeysOption = Annotated[
    str | None,
    typer.Option(
        "--keys",
        metavar="NAME",
        autocompletion=tensors_of_keys,
        help="Tensor of unquantized keys; for several caches or layers a pattern such as "
        "'layers.*.keys'. Default: keys, key or k (in a study also *.keys, *:keys and so on), or "
        "the only float tensor of 128 columns.",
    ),
]
QueryNameOption = Annotated[
    str | None,
    typer.Option(
        "--query-name",
        metavar="NAME",
        autocompletion=tensors_of_queries,
        help="Tensor of query rows; for several layers a pattern. Default: queries, query or q, "
        "or the only one.",
    ),
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="NAME",
        autocompletion=tensors_of_keys,
        help="Integer tensor of each request's length, or of offsets from 0 as in cu_seqlens; or "
        "a pattern, such as 'layers.*.lengths' for each layer's own; none for one request. "
        "Default: one of a usual name beside the keys (such as lengths, seq_lens, cu_seqlens), "
        "else none.",
    ),
]
RowsPerGroupOption = Annotated[
    int | None,
    typer.Option(
        "--rows-per-group",
        metavar="ROWS",
        help="Consecutive rows that see the same keys, 1 to 8; default: what the queries file "
        "says (its shape, or rows_per_group in its metadata), else 1.",
    ),
]
RequestsOption = Annotated[
    str | None,
    typer.Option(
        "--requests",
        metavar="LIST|NAME",
        autocompletion=tensors_of_queries,
        help="Request of each group: 0,0,1, or a tensor of the queries file; default: groups are "
        "spread evenly over the requests.",
    ),
]
TopKOption = Annotated[
    str,
    typer.Option(
        "--top-k",
        metavar="LIST",
        help="Numbers of keys that an indexer selects; recall is of each.",
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
RotateOption = Annotated[
    Literal["none", "hadamard"],
    typer.Option("--rotate", help="Rotate keys, and by scoring the query rows alike."),
]
GainOption = Annotated[
    str,
    typer.Option(
        "--gain",
        metavar="FACTOR",
        help="Multiply keys by a power of two: none, auto (the largest that saturates no scale "
        "of any rule), 64, 2^-3.",
    ),
]
CenterOption = Annotated[
    Literal["none", "channel"],
    typer.Option("--center", help="Subtract the mean key, which is stored beside the pages."),
]
# The same three in a study, which tries every one of a list.
RotateListOption = Annotated[
    str,
    typer.Option(
        "--rotate",
        metavar="LIST",
        help="Rotations to try: none, hadamard.",
        autocompletion=words("none", "hadamard"),
    ),
]
GainListOption = Annotated[
    str,
    typer.Option(
        "--gain",
        metavar="LIST",
        help="Gains to try: none, auto, or powers of two such as 64 and 2^-3.",
        autocompletion=words("none", "auto"),
    ),
]
CenterListOption = Annotated[
    str,
    typer.Option(
        "--center",
        metavar="LIST",
        autocompletion=words("none", "channel"),
        help="Centers to try: none, or channel to subtract each layer's mean key. That shifts all "
        "scores of a row alike, so it changes no ranking by itself.",
    ),
]


def parse_top_k(text: str) -> tuple[int, ...]:
    """The k of a list such as ``64,256,2048``, in ascending order, each once.

    Raises
    ------
    InputError
        The text is not a list of numbers from 1 to 2^31 - 1.
    """
    numbers = parse_numbers(text)
    if not numbers or min(numbers) < 1:
        raise InputError(
            f"--top-k must be numbers from 1 to {INT32_MAX} such as 64,256, got {shortened(text)!r}"
        )
    return tuple(sorted(set(numbers)))


def parse_numbers(text: str) -> list[int]:
    """Numbers, 0 to 2^31 - 1, of a list such as ``0,0,1``; empty for any other text."""
    numbers = [whole_number(part) for part in text.split(",")]
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) else []


def parse_choices(option: str, text: str, choices: Sequence[str]) -> tuple[str, ...]:
    """The words of a list such as ``bf16,nvfp4``.

    Raises
    ------
    InputError
        A word is not one of `choices`.
    """
    chosen = listed(text)
    for word in chosen:
        if word not in choices:
            raise InputError(f"{option} must be of {', '.join(choices)}, got {word!r}")
    return chosen


def listed(text: str) -> tuple[str, ...]:
    """The words of a list such as ``none,hadamard``."""
    return tuple(word.strip() for word in text.split(","))


def at_least_one(option: str, given: int | None) -> int | None:
    """The number that an option was given, None where it was left out.

    Raises
    ------
    InputError
        It is less than 1 or more than 2^31 - 1.
    """
    if given is not None and given < 1:
        raise InputError(f"{option} must be at least 1, got {given}")
    if given is not None and given > INT32_MAX:
        raise InputError(f"{option} must be at most {INT32_MAX}, got {shortened(str(given))}")
    return given


def choose_softmax_scale(given: float | None) -> float:
    """The scale of ``--softmax-scale``, 1/sqrt(128) by default.

    Raises
    ------
    InputError
        It is not positive and finite.
    """
    scale = DEFAULT_SOFTMAX_SCALE if given is None else given
    if not 0 < scale < float("inf"):
        raise InputError(f"--softmax-scale must be positive and finite, got {scale}")
    return scale


def choose_device(name: str) -> str:
    """Name of the torch device that ``--device`` means: ``auto`` is ``cuda`` if there is one.

    Raises
    ------
    InputError
        `name` is not a device.
    UnsupportedError
        This process has no such device.
    """
    import torch

    from sdsa_quant.devices import known_device

    stop_if_interrupted()  # an import as large as that of torch may have swallowed it
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        known_device(name)
    except InputError:
        raise InputError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    return name


def examples(*lines: str) -> str:
    """Epilog of a command's help: example commands as they would be typed, one a line."""
    return "\n".join(lines)


def help_text(function: Callable[..., None]) -> str:
    """A command's docstring as its help: paragraphs without line breaks."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
