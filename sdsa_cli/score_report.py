"""The report of `sdsa score`: one document for programs, one screen of tables for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .environment import describe_environment
from .json_documents import command_document
from .measurement import LONGEST_US, measurement_fields, rotation_words, share_text
from .output import fields_table, table
from .text import describe_transform, error_size, similarity

if TYPE_CHECKING:
    from sdsa_kernels.measure import Measurement
    from sdsa_kernels.score_cache import PieceScorer
    from sdsa_kernels.score_rows import RowScores
    from sdsa_quant.accuracy import Accuracy, Summary
    from sdsa_quant.baseline_file import Baseline
    from sdsa_quant.cache_file import CacheFile

    from .score_inputs import ScoreOptions

_ROWS_SHOWN = 8  # of the table of scores, which stands where there is no accuracy


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreReport:
    """Everything that one run of `sdsa score` found out."""

    options: ScoreOptions
    cache: CacheFile
    scorer: PieceScorer
    query_name: str
    query_dtype: str
    baseline: Baseline | None
    rows: Sequence[RowScores]
    accuracy: Accuracy | None
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
    """The JSON document that docs/report.md describes."""
    return command_document(
        "score",
        {
            "inputs": report.options,
            "cache": _cache_fields(report.cache),
            "problem": _problem_fields(report),
            "rows_empty": sum(row.length == 0 for row in report.rows),
            "rows_invalid": report.rows_invalid,
            "baseline": _baseline_fields(report.baseline),
            "accuracy": report.accuracy,
            "timing": _timing_fields(report),
            "environment": describe_environment(),
            "rows": [_row_fields(row) for row in report.rows],
        },
    )


def _cache_fields(cache: CacheFile) -> dict[str, Any]:
    return {
        "values": cache.header.values,
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
        "query_name": report.query_name,
        "query_dtype": report.query_dtype,
        "query_format": task.query_format,
        "key_format": task.paged.values,
        "backend": scorer.backend,
        "device": str(task.device),
        "groups_per_piece": scorer.groups_per_piece,
        "buffer_bytes": scorer.buffer_bytes,
        "scores_bytes": scorer.whole_bytes,
        "scores_file_bytes": report.scores_file_bytes,
    }


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
        "best_key": row.best_key,
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


def report_tables(report: ScoreReport) -> list[Any]:
    """What a terminal shows: recall first, then errors, then timing."""
    parts: list[Any] = [fields_table(_summary_fields(report))]
    if report.accuracy is None:
        parts += ["", _scores_table(report.rows)]
    else:
        parts += ["", _top_k_table(report.accuracy), _row_counts(report.accuracy)]
        parts += ["", _errors_table(report.accuracy)]
    if report.timing is not None:
        parts += ["", _timing_table(report.timing)]
        if report.timing.rotation is not None:
            parts.append(fields_table(_roof_fields(report.timing)))
    return parts


def _summary_fields(report: ScoreReport) -> Mapping[str, str]:
    scorer, task = report.scorer, report.scorer.task
    pieces = f", --chunk {scorer.groups_per_piece}" if scorer.in_pieces else ""
    keys, requests = int(report.cache.context_lengths.sum()), report.cache.context_lengths.shape[0]
    fields = {
        "cache": f"{report.options.cache.name}: {task.paged.values}, {_count(keys, 'key')} of "
        f"{_count(requests, 'request')}",
        "queries": f"{report.query_name}: {task.query_format}, {_count(task.rows, 'row')} in "
        f"{_count(task.groups, 'group')}, up to {_count(task.max_context, 'key')} each",
        "scores": f"{scorer.whole_bytes:,} bytes, by {scorer.backend} on {task.device}{pieces}",
    }
    if report.cache.header.is_transformed:
        fields["transform"] = describe_transform(report.cache.header)
    left_out = _rows_left_out(report)
    if left_out:
        fields["left out"] = left_out
    return fields


def _rows_left_out(report: ScoreReport) -> str:
    """The rows that no measure counts; empty where there are none."""
    empty = sum(row.length == 0 for row in report.rows)
    parts = []
    if empty:
        parts.append(f"{_count(empty, 'row')} of length 0")
    if report.rows_invalid:
        parts.append(
            f"{_count(report.rows_invalid, 'INVALID row')}, with scores that are not finite"
        )
    return ", ".join(parts)


def _compact_table(*headings: str, title: str | None = None) -> Any:
    """A table without the blank lines around it, so that the report fits one screen."""
    result = table(*headings, title=title)
    result.show_edge = False
    return result


def _top_k_table(accuracy: Accuracy) -> Any:
    result = _compact_table(
        "top-k", "recall", "median", "worst 1%", "worst", "chance", "mass", "worst",
        title="Recall of the unquantized keys' top-k, and the softmax mass kept",
    )  # fmt: skip
    for each in accuracy.top_k:
        recall, mass = each.recall, each.mass
        result.add_row(
            f"{each.k:,}",
            similarity(recall.mean),
            similarity(recall.median),
            similarity(recall.p1),
            similarity(recall.minimum),
            similarity(each.chance),
            similarity(mass.mean),
            similarity(mass.minimum),
        )
    return result


def _row_counts(accuracy: Accuracy) -> str:
    """One line that says of how many rows each top-k is the baseline's, and what ties there are."""
    top_k = accuracy.top_k
    counts = {
        "longer than k": [each.rows_longer_than_k for each in top_k],
        "same set": [each.rows_with_same_set for each in top_k],
        "same scores": [each.rows_with_same_scores for each in top_k],
        "ties": [each.rows_with_ties for each in top_k],
    }
    line = ", ".join(f"{name} {_slashed(numbers)}" for name, numbers in counts.items())
    widest = max(each.most_ties_left_out for each in top_k)
    ties = f" (up to {widest:,} equals left out)" if widest else ""
    return f"Of {_count(accuracy.rows_measured, 'row')}: {line}{ties}"


def _slashed(numbers: Sequence[int]) -> str:
    return "/".join(f"{number}" for number in numbers)


def _errors_table(accuracy: Accuracy) -> Any:
    result = _compact_table(
        "scores", "mean", "median", "worst 1%", "worst", "row", "request", "keys"
    )
    measures: tuple[tuple[str, Summary, bool], ...] = (
        ("relative L2", accuracy.relative_l2, True),
        ("max abs", accuracy.max_abs, True),
        ("cosine", accuracy.cosine, False),
        ("Spearman", accuracy.spearman, False),
    )
    for name, summary, is_error in measures:
        show = error_size if is_error else similarity
        worst = summary.worst
        result.add_row(
            name,
            show(summary.mean),
            show(summary.median),
            show(summary.p99 if is_error else summary.p1),
            show(None if worst is None else worst.value),
            *(
                ("-", "-", "-")
                if worst is None
                else (str(worst.row), str(worst.request), f"{worst.length:,}")
            ),
        )
    return result


def _scores_table(rows: Sequence[RowScores]) -> Any:
    title = "Scores" if len(rows) <= _ROWS_SHOWN else f"Scores of the first {_ROWS_SHOWN} rows"
    result = _compact_table("row", "request", "keys", "best key", "highest", "lowest", title=title)
    for row in rows[:_ROWS_SHOWN]:
        result.add_row(
            str(row.row),
            str(row.request),
            f"{row.length:,}",
            "-" if row.best_key is None else f"{row.best_key:,}",
            error_size(row.maximum),
            error_size(row.minimum),
        )
    return result


def _timing_table(measurement: Measurement) -> Any:
    timing = measurement.timing
    unit, unit_us = ("us", 1.0) if timing.median_us < LONGEST_US else ("ms", 1e3)
    result = _compact_table(
        "time", "runs", f"median {unit}", f"p10 {unit}", f"p90 {unit}", "bytes moved", "GB/s"
    )
    times = (timing.median_us, timing.p10_us, timing.p90_us)
    result.add_row(
        f"replay: {timing.replay}",
        f"{len(timing.samples_us):,}",
        *(f"{microseconds / unit_us:,.1f}" for microseconds in times),
        f"{measurement.traffic.total_bytes:,}",
        f"{measurement.gigabytes_per_second:,.4g}",
    )
    return result


def _roof_fields(measurement: Measurement) -> Mapping[str, str]:
    """What stands beside a GPU's time: the roofs, how cold it was, and what a replay leaves out."""
    gather, read = measurement.gather, measurement.read_bytes_per_second
    assert gather is not None
    assert read is not None
    share = share_text(measurement.gather_share)
    return {
        "page-gather roof": f"{gather.median_us:,.1f} us, share {share}",
        "read roof": f"{read / 1e9:,.0f} GB/s, share {share_text(measurement.read_share)}",
        "pages": rotation_words(measurement),
        "first call": f"{measurement.compile_seconds:.3g} s more than the second",
        "eager call": f"{measurement.host_us:.3g} us of the host's time",
    }


def _count(number: int, noun: str) -> str:
    """``1 request``, ``4 requests``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
