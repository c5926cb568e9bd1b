"""The report of `sdsa score`: what a run found out, and the document of it for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sdsa_cli.json_documents import command_document
from sdsa_cli.measurement import measurement_fields
from sdsa_quant.environment import describe_environment

if TYPE_CHECKING:
    from sdsa_kernels.measure.measurement import Measurement
    from sdsa_kernels.scoring.chunks import ChunkScorer
    from sdsa_kernels.scoring.rows import RowScores
    from sdsa_quant.accuracy.summary import Accuracy, TopKSummary
    from sdsa_quant.captures.baseline import Baseline
    from sdsa_quant.files.cache_file import CacheFile
    from sdsa_quant.files.tensor_source import StoredTensor

    from .inputs import ScoreOptions


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreReport:
    """Everything that one run of `sdsa score` found out."""

    options: ScoreOptions
    cache: CacheFile
    scorer: ChunkScorer
    queries: StoredTensor
    baseline: Baseline | None
    rows: Sequence[RowScores]
    accuracy: Accuracy | None
    longer_rows: Sequence[TopKSummary]  # for each k the rows with more than k keys
    timing: Measurement | None
    scores_file_bytes: int | None

    @property
    def rows_invalid(self) -> int:
        """Rows with a non-finite score or, with a baseline, a non-finite baseline score."""
        return sum(not is_valid(row) for row in self.rows)


def is_valid(row: RowScores) -> bool:
    """Whether a row's scores and baseline scores are all finite."""
    return row.nonfinite_scores == 0 and (row.accuracy is None or row.accuracy.valid)


def report_document(report: ScoreReport) -> dict[str, Any]:
    """The JSON document that docs/reference/reports/score.md describes."""
    return command_document(
        "score",
        {
            "inputs": report.options,
            "cache": _cache_fields(report.cache),
            "problem": _problem_fields(report),
            "rows_empty": sum(row.length == 0 for row in report.rows),
            "rows_invalid": report.rows_invalid,
            "baseline": _baseline_fields(report.baseline),
            "accuracy": _accuracy_fields(report),
            "timing": _timing_fields(report),
            "environment": describe_environment(),
            "rows": [_row_fields(row) for row in report.rows],
        },
    )


def _cache_fields(cache: CacheFile) -> dict[str, Any]:
    return {
        "values": cache.header.format,
        "layout": cache.header.layout,
        "scale_order": cache.header.scale_order,
        "rule": cache.header.metadata()["rule"],
        "rotate": cache.header.rotate,
        "gain": cache.header.gain,
        "center": cache.header.center,
        "source": cache.header.source,
        "requests": cache.context_lengths.shape[0],
        "keys": int(cache.context_lengths.sum()),
        "pages": cache.pages,
        "cache_bytes": cache.cache_bytes,
        "file_bytes": cache.file_bytes,
    }


def _problem_fields(report: ScoreReport) -> dict[str, Any]:
    scorer, task = report.scorer, report.scorer.task
    return {
        "rows": task.rows,
        "groups": task.groups,
        "rows_per_group": task.rows_per_group,
        "max_context": task.max_context,
        "query_name": report.queries.name,
        "query_dtype": report.queries.dtype,
        "query_format": task.query_format,
        "key_format": task.paged.format,
        "backend": scorer.backend,
        "device": str(task.device),
        "groups_per_piece": scorer.groups_per_chunk,
        "buffer_bytes": scorer.buffer_bytes,
        "scores_bytes": scorer.whole_bytes,
        "scores_file_bytes": report.scores_file_bytes,
    }


def _accuracy_fields(report: ScoreReport) -> dict[str, Any] | None:
    """The accuracy, led by the rows that can miss a key."""
    if report.accuracy is None:
        return None
    fields = {
        field.name: getattr(report.accuracy, field.name)
        for field in dataclasses.fields(report.accuracy)
    }
    return {"top_k_of_longer_rows": report.longer_rows, **fields}


def _baseline_fields(baseline: Baseline | None) -> dict[str, Any] | None:
    if baseline is None:
        return None
    return {"kind": baseline.kind, "name": baseline.name, "dtype": baseline.dtype}


def _timing_fields(report: ScoreReport) -> dict[str, Any] | None:
    if report.timing is None:
        return None
    return measurement_fields(report.timing)


def _row_fields(row: RowScores) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "row": row.row,
        "group": row.group,
        "request": row.request,
        "length": row.length,
        "valid": is_valid(row),
        "nonfinite_scores": row.nonfinite_scores,
        "minimum": row.minimum,
        "maximum": row.maximum,
        "best_key": row.best_keys[0] if row.best_keys else None,
        "best_keys": row.best_keys,
        "accuracy": None,
    }
    if row.accuracy is not None:
        fields["accuracy"] = {
            "nonfinite_baseline": row.accuracy.nonfinite_baseline,
            "relative_l2": row.accuracy.relative_l2,
            "max_abs": row.accuracy.max_abs,
            "cosine": row.accuracy.cosine,
            "spearman": row.accuracy.spearman,
            "top_k": row.accuracy.top_k,
        }
    return fields
