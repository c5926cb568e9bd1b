"""The part of `sdsa inspect` that reads a folder of caches, such as one for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdsa_cli.json_documents import command_document
from sdsa_cli.output import Output, heading, table
from sdsa_cli.text import counted

from .cache import check_cache


def cache_files(folder: str) -> list[Path]:
    """The caches among the ``*.safetensors`` files of a folder, in natural order."""
    from sdsa_quant.files.cache_header import FORMAT
    from sdsa_quant.files.safetensors_reader import header_metadata
    from sdsa_quant.files.tensor_source import natural_order

    files = sorted(Path(folder).glob("*.safetensors"), key=lambda file: natural_order(file.name))
    return [file for file in files if header_metadata(file).get("format") == FORMAT]


def inspect_folder(out: Output, folder: str, files: Sequence[Path]) -> None:
    """Show and check the caches of a folder, a line each.

    Raises
    ------
    CheckFailedError
        Some are not valid; all have been shown.
    """
    from sdsa_quant.errors import CheckFailedError

    records = [check_cache(str(file)) for file in files]
    out.result(*_report(folder, files, records))
    fields = {"kind": "caches", "path": folder, "caches": records}
    out.document(command_document("inspect", fields))
    bad = [record["reason"] for record in records if not record["valid"]]
    if bad:
        raise CheckFailedError(f"{len(bad)} of {counted(len(files), 'cache')} not valid: {bad[0]}")


def _report(folder: str, files: Sequence[Path], records: Sequence[dict[str, Any]]) -> list[Any]:
    from sdsa_quant.files.tensor_source import without_common_ends

    pattern, names = without_common_ends([file.name for file in files])
    total = sum(record.get("file_bytes", 0) for record in records)
    title = f"{folder}: {counted(len(files), 'cache')}, {total:,} bytes"
    rows = table("*", "values", "requests", "keys", "pages", "bytes", "valid")
    rows.padding, rows.pad_edge = (0, 1, 0, 0), False
    for column in rows.columns[1:]:
        column.no_wrap = True
    rows.columns[0].overflow = "fold"
    for name, record in zip(names, records, strict=True):
        numbers = (
            f"{record[field]:,}" if field in record else "-"
            for field in ("requests", "keys", "pages", "cache_bytes")
        )
        values = record["header"].get("values", "-")
        rows.add_row(name, values, *numbers, "yes" if record["valid"] else "no")
    report = [heading(title), f"files  {pattern}", rows]
    others = len(list(Path(folder).glob("*.safetensors"))) - len(files)
    if others:
        report.append(f"{counted(others, 'other file')} of the folder left out: no cache")
    return report
