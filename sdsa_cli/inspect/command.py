"""`sdsa inspect`: what a keys, cache or scores file holds, and whether a cache is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdsa_cli.options import ForceFlag, JsonFlag, ReportOption, examples
from sdsa_cli.output import report_sink
from sdsa_quant.errors import InputError

COMMAND = "inspect"
EXAMPLES = examples(
    "sdsa inspect cache.safetensors",
    "sdsa inspect cache.safetensors --page 3 --key 17",
    "sdsa inspect keys.safetensors --check",
    "sdsa inspect keys.safetensors --json",
)


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A cache or scores file, a folder of caches, or keys in a file, a folder or a "
            "sharded index.",
        ),
    ],
    page: Annotated[
        int | None,
        typer.Option(
            "--page", metavar="N", min=0, help="Show the keys of one page of a cache, from 0."
        ),
    ] = None,
    key: Annotated[
        int | None,
        typer.Option(
            "--key",
            metavar="K",
            min=0,
            max=63,
            help="Show only this key of the page, 0 to 63, in full.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Read all keys and query rows of a capture and look for faults: zeros, repeated "
            "and constant rows, lengths that do not fit, heads, values rounded to FP8.",
        ),
    ] = False,
    json: JsonFlag = False,
    report: ReportOption = None,
    force: ForceFlag = False,
) -> None:
    """Show what a keys, cache or scores file holds.

    A cache is validated: sizes, table entries within its pages, scales that are numbers. If a file
    is a cache by its header but not a valid one (cut short, for example), the exit code is 1, and
    stderr and the JSON document say why. If the header cannot be read, or --page is asked of a
    cache that cannot be opened, it is 2, and there is no document. With --check it is 1 too if a
    capture has faults.
    """
    from sdsa_quant.files.kinds import CACHE, SCORES
    from sdsa_quant.files.safetensors_reader import header_metadata
    from sdsa_quant.files.tensor_source import open_tensors

    from .cache import cache_files, inspect_cache, inspect_folder
    from .page import inspect_page
    from .scores import inspect_scores
    from .tensors import inspect_tensors

    if page is None and key is not None:
        raise InputError(f"--key {key} needs --page")
    # Asked of the header alone, so that a damaged cache is still known as a cache.
    file_format = header_metadata(path).get("format")
    sink = report_sink(json, report, inputs=[Path(path)], force=force)
    if file_format == CACHE and page is not None:
        inspect_page(sink, path, page, key)
    elif page is not None:
        raise InputError(f"{path}: --page needs a cache file, and this is not one")
    elif file_format == CACHE:
        inspect_cache(sink, path)
    elif file_format == SCORES:
        inspect_scores(sink, path)
    elif caches := cache_files(path):
        inspect_folder(sink, path, caches)
    else:
        inspect_tensors(sink, open_tensors(path), check=check)
