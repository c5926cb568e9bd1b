"""The part of `sdsa inspect` that reads scores files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdsa_cli.output import Output, fields_table, heading, table
from sdsa_cli.text import byte_count, counted, describe_lengths

from .documents import RowRecord, ScoresDocument

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sdsa_quant.files.scores_file import ScoresFile

_LISTED_ROWS = 16  # on the terminal; JSON has them all
_LISTED_CHOICES = 5  # best keys of each row
_HIDDEN_FIELDS = ("format", "version", "top_k_order")
# Metadata that sdsa score writes, in the order and with the names that a reader sees.
_METADATA_NAMES = {
    "cache": "cache",
    "queries": "queries",
    "query_name": "query tensor",
    "query_format": "query format",
    "key_format": "key format",
    "backend": "backend",
}


def inspect_scores(sink: Output, path: str) -> None:
    """Show a scores file: its sizes, and each row's length, range and best keys."""
    from sdsa_quant.files.scores_file import open_scores

    scores = open_scores(path)
    rows = [_row_record(scores, row) for row in range(scores.shape.rows)]
    document = ScoresDocument(
        path=path,
        rows=scores.shape.rows,
        groups=scores.shape.groups,
        rows_per_group=scores.rows_per_group,
        max_context=scores.shape.max_context,
        top_k=scores.shape.top_k,
        top_k_order=scores.top_k_order,
        file_bytes=scores.file_bytes,
        metadata=scores.metadata,
        row_summaries=rows,
    )
    sink.publish(document, *_report(document, scores.context_lengths.tolist()))


def _row_record(scores: ScoresFile, row: int) -> RowRecord:
    """Length and range of one row; non-finite scores are counted and left out of the range."""
    group = row // scores.rows_per_group
    length = min(int(scores.context_lengths[group]), scores.shape.max_context)
    visible = scores.scores[row, : max(length, 0)]
    finite = visible[visible.isfinite()]
    return RowRecord(
        row=row,
        request=int(scores.requests[group]),
        length=length,
        min=float(finite.min()) if finite.numel() else None,
        max=float(finite.max()) if finite.numel() else None,
        nonfinite=visible.numel() - finite.numel(),
        best_keys=_best_keys(scores, row, length),
    )


def _best_keys(scores: ScoresFile, row: int, length: int) -> list[int]:
    """The first few choices of a row, highest score first."""
    from sdsa_quant.accuracy.top_k import top_k_indices
    from sdsa_quant.files.scores_file import BY_KEY

    chosen = scores.top_k_indices[row]
    count = min(_LISTED_CHOICES, length, chosen.shape[0])
    if scores.top_k_order == BY_KEY and count:
        chosen = top_k_indices(scores.scores[row : row + 1, :length], count)[0]
    return [key for key in chosen[:count].tolist() if key >= 0]


def _report(document: ScoresDocument, lengths: Sequence[int]) -> list[RenderableType]:
    rows = document.row_summaries
    fields = {
        "rows": f"{document.rows:,} ({counted(document.groups, 'group')} of "
        f"{document.rows_per_group})",
        "lengths": describe_lengths(lengths),
        "width": counted(document.max_context, "key"),
        "top-k": f"{document.top_k:,} indices a row, in the order of their {document.top_k_order}",
        "bytes": byte_count(document.file_bytes),
        "non-finite": f"{sum(row.nonfinite for row in rows):,} scores below a length",
    }
    fields |= _describe_metadata(document.metadata)
    listed = table(
        "row", "request", "length", "min", "max", "best keys", numbers_from=0, text=("best keys",)
    )
    for row in rows[:_LISTED_ROWS]:
        low, high = ("-" if end is None else f"{end:.4g}" for end in (row.min, row.max))
        best = " ".join(map(str, row.best_keys))
        listed.add_row(f"{row.row}", f"{row.request}", f"{row.length:,}", low, high, best)
    report: list[RenderableType] = [
        heading(f"{document.path}: scores"),
        fields_table(fields),
        listed,
    ]
    if len(rows) > _LISTED_ROWS:
        report.append(f"... and {len(rows) - _LISTED_ROWS:,} more rows; --json lists them all")
    return report


def _describe_metadata(metadata: dict[str, str]) -> dict[str, str]:
    """Metadata for a reader: what is known by its name, then the rest in alphabetical order."""
    others = sorted(set(metadata) - set(_METADATA_NAMES) - set(_HIDDEN_FIELDS))
    names = _METADATA_NAMES | {name: name for name in others}
    return {shown: metadata[name] for name, shown in names.items() if name in metadata}
