"""The part of `sdsa inspect` that lists the tensors of captured keys, and what they can be."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from sdsa_cli.output import Output, fields_table, heading, table
from sdsa_cli.text import counted
from sdsa_quant.errors import CheckFailedError

from .documents import CaptureFinding, TensorRecord, TensorsDocument

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sdsa_quant.files.tensor_source import StoredTensor, TensorSource

Use = Literal["keys", "queries", "lengths", "weights", "requests", "positions", "selected"] | None
_OF_ROWS: tuple[Literal["requests", "positions", "selected"], ...] = (
    "requests",
    "positions",
    "selected",
)  # integers beside query rows
_LISTED_TENSORS = 40  # on the terminal; JSON has them all
_OTHER_COLUMNS_WIDTH = 50  # of the table of tensors, about; longer names are shown by what differs


def inspect_tensors(sink: Output, source: TensorSource, *, check: bool = False) -> None:
    """Show the tensors of a file of captured keys, and what they can be.

    Raises
    ------
    CheckFailedError
        With `check`, faults of a capture were seen; they have been shown.
    """
    findings = _findings(source) if check else None
    records = [
        TensorRecord(
            tensor.name, tensor.dtype, tensor.shape, tensor.bytes, tensor.path, _use(tensor)
        )
        for tensor in source
    ]
    document = TensorsDocument(
        path=source.path,
        files=list(source.files),
        tensors=records,
        metadata=source.metadata,
        findings=findings,
    )
    sink.publish(document, *_tensor_report(document, sink.width))
    if findings:
        raise CheckFailedError(
            f"{source.path}: {counted(len(findings), 'fault')} of the capture, the first in tensor "
            f"{findings[0].tensor}"
        )


def _findings(source: TensorSource) -> list[CaptureFinding]:
    from sdsa_quant.captures.check import check_capture

    return [CaptureFinding(each.tensor, each.path, each.text) for each in check_capture(source)]


def _use(tensor: StoredTensor) -> Use:
    """What a tensor can be, by dtype and shape; those of a row are told by their names."""
    from sdsa_quant.captures.keys import are_queries, can_be_keys, can_be_lengths
    from sdsa_quant.captures.names import FLOAT_DTYPES, INTEGER_DTYPES

    name = tensor.name_in_file.rpartition(".")[2]
    if name == "weights" and tensor.dtype in FLOAT_DTYPES and len(tensor.shape) == 2:
        return "weights"
    for each in _OF_ROWS:
        if name == each and tensor.dtype in INTEGER_DTYPES:
            return each
    if are_queries(tensor):
        return "queries"
    return "keys" if can_be_keys(tensor) else "lengths" if can_be_lengths(tensor) else None


def _shown_metadata(metadata: Mapping[str, str], files: int) -> dict[str, str]:
    """Header fields in order; once what all files have alike, and the texts of a capture by number.

    Of several files, names are ``file:field``.
    """
    values: dict[str, list[str]] = {}
    for name, value in metadata.items():
        values.setdefault(name.rpartition(":")[2] if files > 1 else name, []).append(value)
    common = {
        name: found[0] for name, found in values.items() if found == found[:1] * max(files, 1)
    }
    others = {
        name: value
        for name, value in metadata.items()
        if (name.rpartition(":")[2] if files > 1 else name) not in common
    }
    if common.get("format") == "sdsa-capture" and "texts" in common:
        with contextlib.suppress(ValueError, TypeError, LookupError):
            tokens = [int(text[2]) for text in json.loads(common["texts"])]
            common["texts"] = f"{counted(len(tokens), 'text')}, {sum(tokens):,} tokens"
    return dict(sorted(common.items())) | dict(sorted(others.items()))


def _tensor_report(document: TensorsDocument, width: int) -> list[RenderableType]:
    from sdsa_quant.files.names import without_common_ends

    tensors = document.tensors
    names = [tensor.name for tensor in tensors]
    pattern = "*"
    if max(map(len, names), default=0) > width - _OTHER_COLUMNS_WIDTH:
        pattern, names = without_common_ends(names)
    rows = table(
        "tensor" if pattern == "*" else "*", "dtype", "shape", "bytes", "can be",
        numbers_from=3, text=("can be",),
    )  # fmt: skip
    for name, tensor in list(zip(names, tensors, strict=True))[:_LISTED_TENSORS]:
        shape = " x ".join(f"{size:,}" for size in tensor.shape) or "scalar"
        rows.add_row(name, tensor.dtype, shape, f"{tensor.bytes:,}", tensor.use or "")
    files = "" if len(document.files) == 1 else f" in {len(document.files)} files"
    total = sum(tensor.bytes for tensor in tensors)
    report: list[RenderableType] = [
        heading(f"{document.path}: {counted(len(tensors), 'tensor')}{files}, {total:,} bytes"),
        *([] if pattern == "*" else [f"tensors  {pattern}"]),
        rows,
    ]
    if len(tensors) > _LISTED_TENSORS:
        report.append(f"... and {len(tensors) - _LISTED_TENSORS} more; --json lists them all")
    if document.findings is not None:
        report.append(heading("check"))
        lines = [f"{each.tensor}: {each.text}" for each in document.findings]
        report += lines or ["nothing was seen that a right capture does not have"]
    if document.metadata:
        report += [
            heading("metadata"),
            fields_table(_shown_metadata(document.metadata, len(document.files))),
        ]
    return report
