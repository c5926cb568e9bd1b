"""`sdsa inspect`: what a keys, cache or scores file holds, and whether a cache is valid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sdsa_quant.errors import InputError

from .json_documents import command_document
from .options import JsonFlag, examples
from .output import Output, fields_table, heading, table

if TYPE_CHECKING:
    from sdsa_quant.tensor_source import StoredTensor, TensorSource

COMMAND = "inspect"
EXAMPLES = examples(
    "sdsa inspect cache.safetensors",
    "sdsa inspect cache.safetensors --page 3 --key 17",
    "sdsa inspect keys.safetensors --json",
)
_LISTED_TENSORS = 40  # on the terminal; JSON has them all


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A cache or scores file, or keys in a file, a folder or a sharded index.",
        ),
    ],
    page: Annotated[
        int | None,
        typer.Option("--page", metavar="N", min=0, help="Decode a page of a cache: keys, scales."),
    ] = None,
    key: Annotated[
        int | None,
        typer.Option(
            "--key", metavar="K", min=0, max=63, help="The key of the page to print in full. [0]"
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what a keys, cache or scores file holds.

    A cache is validated: sizes, table entries within its pages, scales that are numbers. If it is
    not valid, the exit code is 1 and stderr says why.
    """
    from sdsa_quant.cache_header import FORMAT as CACHE_FORMAT
    from sdsa_quant.scores_file import FORMAT as SCORES_FORMAT
    from sdsa_quant.tensor_source import header_metadata, open_tensors

    from .inspect_cache import inspect_cache, inspect_page
    from .inspect_scores import inspect_scores

    out = Output(as_json=as_json)
    if page is None and key is not None:
        raise InputError(f"--key {key} needs --page")
    # Asked of the header alone, so that a damaged cache is still known as a cache.
    kind = header_metadata(path).get("format")
    if kind == CACHE_FORMAT and page is not None:
        inspect_page(out, path, page, key or 0)
    elif page is not None:
        raise InputError(f"{path}: --page needs a cache file, this is not one")
    elif kind == CACHE_FORMAT:
        inspect_cache(out, path)
    elif kind == SCORES_FORMAT:
        inspect_scores(out, path)
    else:
        _inspect_tensors(out, open_tensors(path))


def _inspect_tensors(out: Output, source: TensorSource) -> None:
    """Show the tensors of a file of captured keys, and which can be keys or lengths."""
    from sdsa_quant.key_selection import can_be_keys, lengths_candidates

    lengths = lengths_candidates(source)
    uses = {
        tensor.name: "keys" if can_be_keys(tensor) else "lengths" if tensor.name in lengths else ""
        for tensor in source
    }
    out.result(*_tensor_report(source, uses))
    tensors = [_tensor_record(tensor, uses[tensor.name]) for tensor in source]
    fields = {"kind": "tensors", "path": source.path, "files": source.files}
    out.document(
        command_document(COMMAND, {**fields, "tensors": tensors, "metadata": source.metadata})
    )


def _tensor_record(tensor: StoredTensor, use: str) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "bytes": tensor.bytes,
        "file": tensor.path,
        "use": use or None,
    }


def _tensor_report(source: TensorSource, uses: dict[str, str]) -> Sequence[Any]:
    rows = table("tensor", "dtype", "shape", "bytes", "can be", numbers_from=3)
    rows.columns[0].overflow = "fold"
    rows.columns[4].justify = "left"
    for tensor in list(source)[:_LISTED_TENSORS]:
        shape = " x ".join(f"{size:,}" for size in tensor.shape) or "scalar"
        rows.add_row(tensor.name, tensor.dtype, shape, f"{tensor.bytes:,}", uses[tensor.name])
    files = "" if len(source.files) == 1 else f" in {len(source.files)} files"
    total = sum(tensor.bytes for tensor in source)
    report = [heading(f"{source.path}: {len(source)} tensors{files}, {total:,} bytes"), rows]
    if len(source) > _LISTED_TENSORS:
        report.append(f"... and {len(source) - _LISTED_TENSORS} more; --json lists them all")
    if source.metadata:
        report += [heading("metadata"), fields_table(dict(sorted(source.metadata.items())))]
    return report
