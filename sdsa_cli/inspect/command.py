"""`sdsa inspect`: what a keys, cache or scores file holds, and whether a cache is valid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sdsa_cli.json_documents import command_document
from sdsa_cli.options import JsonFlag, examples
from sdsa_cli.output import Output, fields_table, heading, table
from sdsa_cli.text import counted
from sdsa_quant.errors import InputError

if TYPE_CHECKING:
    from sdsa_quant.files.tensor_source import StoredTensor, TensorSource

COMMAND = "inspect"
EXAMPLES = examples(
    "sdsa inspect cache.safetensors",
    "sdsa inspect cache.safetensors --page 3 --key 17",
    "sdsa inspect keys.safetensors --json",
)
_LISTED_TENSORS = 40  # on the terminal; JSON has them all
_OTHER_COLUMNS_WIDTH = 50  # of the table of tensors, about; longer names are shown by what differs


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
        typer.Option("--page", metavar="N", min=0, help="Show the keys of one page of a cache."),
    ] = None,
    key: Annotated[
        int | None,
        typer.Option(
            "--key", metavar="K", min=0, max=63, help="Show only this key of the page, in full."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what a keys, cache or scores file holds.

    A cache is validated: sizes, table entries within its pages, scales that are numbers. If a file
    is a cache by its header but not a valid one (cut short, for example), the exit code is 1, and
    stderr and the JSON document say why. If the header cannot be read, or --page is asked of a
    cache that cannot be opened, it is 2, and there is no document.
    """
    from sdsa_quant.files.cache_header import FORMAT as CACHE_FORMAT
    from sdsa_quant.files.safetensors_reader import header_metadata
    from sdsa_quant.files.scores_file import FORMAT as SCORES_FORMAT
    from sdsa_quant.files.tensor_source import open_tensors

    from .cache import inspect_cache
    from .folder import cache_files, inspect_folder
    from .page import inspect_page
    from .scores import inspect_scores

    out = Output(as_json=as_json)
    if page is None and key is not None:
        raise InputError(f"--key {key} needs --page")
    # Asked of the header alone, so that a damaged cache is still known as a cache.
    kind = header_metadata(path).get("format")
    if kind == CACHE_FORMAT and page is not None:
        inspect_page(out, path, page, key)
    elif page is not None:
        raise InputError(f"{path}: --page needs a cache file, this is not one")
    elif kind == CACHE_FORMAT:
        inspect_cache(out, path)
    elif kind == SCORES_FORMAT:
        inspect_scores(out, path)
    elif caches := cache_files(path):
        inspect_folder(out, path, caches)
    else:
        _inspect_tensors(out, open_tensors(path))


def _inspect_tensors(out: Output, source: TensorSource) -> None:
    """Show the tensors of a file of captured keys, and what they can be."""
    uses = {tensor.name: _use(tensor) for tensor in source}
    out.result(*_tensor_report(source, uses, out.width))
    tensors = [_tensor_record(tensor, uses[tensor.name]) for tensor in source]
    fields = {"kind": "tensors", "path": source.path, "files": source.files}
    out.document(
        command_document(COMMAND, {**fields, "tensors": tensors, "metadata": source.metadata})
    )


def _use(tensor: StoredTensor) -> str:
    """What a tensor can be, by dtype and shape; queries are told from keys by their name."""
    from sdsa_quant.captures.keys import are_queries, can_be_keys, can_be_lengths

    if are_queries(tensor):
        return "queries"
    return "keys" if can_be_keys(tensor) else "lengths" if can_be_lengths(tensor) else ""


def _tensor_record(tensor: StoredTensor, use: str) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "bytes": tensor.bytes,
        "file": tensor.path,
        "use": use or None,
    }


def _tensor_report(source: TensorSource, uses: dict[str, str], width: int) -> Sequence[Any]:
    from sdsa_quant.files.tensor_source import without_common_ends

    names = [tensor.name for tensor in source]
    pattern = "*"
    if max(map(len, names), default=0) > width - _OTHER_COLUMNS_WIDTH:
        pattern, names = without_common_ends(names)
    rows = table(
        "tensor" if pattern == "*" else "*", "dtype", "shape", "bytes", "can be", numbers_from=3
    )
    rows.columns[0].overflow = "fold"
    rows.columns[4].justify = "left"
    for name, tensor in list(zip(names, source, strict=True))[:_LISTED_TENSORS]:
        shape = " x ".join(f"{size:,}" for size in tensor.shape) or "scalar"
        rows.add_row(name, tensor.dtype, shape, f"{tensor.bytes:,}", uses[tensor.name])
    files = "" if len(source.files) == 1 else f" in {len(source.files)} files"
    total = sum(tensor.bytes for tensor in source)
    report = [
        heading(f"{source.path}: {counted(len(source), 'tensor')}{files}, {total:,} bytes"),
        *([] if pattern == "*" else [f"tensors  {pattern}"]),
        rows,
    ]
    if len(source) > _LISTED_TENSORS:
        report.append(f"... and {len(source) - _LISTED_TENSORS} more; --json lists them all")
    if source.metadata:
        report += [heading("metadata"), fields_table(dict(sorted(source.metadata.items())))]
    return report
