"""The screen of `sdsa score`: what people see of its report, recall first, then errors and time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sdsa_cli.measurement import (
    LONGEST_US,
    clock_words,
    measurement_remarks,
    rotation_words,
    share_text,
)
from sdsa_cli.output import fields_table, heading, table
from sdsa_cli.selection import selection_remarks
from sdsa_cli.table_data import TableData
from sdsa_cli.text import counted, error_size, percent, similarity, ties_decide
from sdsa_quant.layout import HIGH_QUERY_ERROR

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sdsa_kernels.measure.measurement import Measurement
    from sdsa_kernels.measure.selected import SelectionMeasurement
    from sdsa_quant.accuracy.query_loss import QueryLoss
    from sdsa_quant.accuracy.summary import Accuracy, Summary, TopKSummary

    from .document import ScoreReport

_TOP_K_TITLE = "Rows longer than k: recall of the unquantized keys' top-k, softmax mass kept"
_ROWS_SHOWN = 8  # of the table of scores, which stands where there is no accuracy
_REQUESTS_SHOWN = 4  # of those that rows were taken to belong to
_ROWS_OF_PERCENTILES = 100  # with fewer, the worst 1 % is the worst row


def report_tables(report: ScoreReport) -> list[RenderableType]:
    """What a terminal shows: recall first, then errors, then timing."""
    parts: list[RenderableType] = [fields_table(_summary_fields(report))]
    if report.accuracy is None:
        parts += ["", *_scores(report)]
    else:
        parts += ["", heading(_TOP_K_TITLE), _top_k_table(report.accuracy)]
        parts += [*_top_k_remarks(report.accuracy.top_k), "", _errors_table(report.accuracy)]
    if report.timing is not None:
        parts += ["", _timing_table(report.timing, report.selection)]
        parts += measurement_remarks(report.timing)
        if report.selection is not None:
            parts += selection_remarks(report.selection)
        if report.timing.rotation is not None:
            parts.append(fields_table(_roof_fields(report.timing)))
    return parts


def _summary_fields(report: ScoreReport) -> Mapping[str, str]:
    scorer, task = report.scorer, report.scorer.task
    chunks = f", --chunk {scorer.groups_per_chunk}" if scorer.in_chunks else ""
    keys, requests = int(report.cache.context_lengths.sum()), report.cache.context_lengths.shape[0]
    fields = {
        "cache": f"{report.options.cache.name}: {task.paged.format}, {counted(keys, 'key')} of "
        f"{counted(requests, 'request')}",
        "queries": f"{report.queries.path.name}: {report.queries.name}, {task.query_format}, "
        f"{counted(task.rows, 'row')} in {counted(task.groups, 'group')}",
        "scores": f"{scorer.whole_bytes:,} bytes, up to {counted(task.max_context, 'key')} a row, "
        f"by {scorer.backend} on {task.device}{chunks}",
    }
    if report.options.select is not None:
        fields["selection"] = (
            f"{counted(report.options.select, 'key')} of each row, by {scorer.select_backend}"
        )
    if report.options.requests is None and requests > 1:
        fields["requests"] = f"assumed: {_assumed_requests(report)}"
    if report.cache.header.is_transformed:
        fields["transform"] = report.cache.header.transform_label
    left_out = _rows_left_out(report)
    if left_out:
        fields["left out"] = left_out
    return fields


def _assumed_requests(report: ScoreReport) -> str:
    """Which rows belong to which request: ``row 0-1 of request 0, 2-3 of 1, ..., 14-15 of 7``."""
    parts = []
    for request, of_request in itertools.groupby(report.rows, key=lambda row: row.request):
        rows = [row.row for row in of_request]
        numbers = f"{rows[0]}" if len(rows) == 1 else f"{rows[0]}-{rows[-1]}"
        parts.append(f"{numbers} of {request}")
    if len(parts) > _REQUESTS_SHOWN:
        parts = [*parts[: _REQUESTS_SHOWN - 2], "...", parts[-1]]
    return "row " + ", ".join(parts).replace(" of ", " of request ", 1)


def query_loss_words(loss: QueryLoss, rows: int) -> str:
    """What NVFP4 lost of the query rows, and what would keep it."""
    return (
        f"NVFP4 loses more than {HIGH_QUERY_ERROR} of the norm of {loss.rows_lost:,} of "
        f"{counted(rows, 'query row')} (the first is row {loss.first_lost}): "
        f"{percent(loss.share(loss.flushed))} of their blocks flushed to zero, "
        f"{percent(loss.share(loss.saturated))} saturated; --query-format bf16 keeps them, and so "
        f"do rows multiplied by a power of two, which changes no ranking"
    )


def _rows_left_out(report: ScoreReport) -> str:
    """The rows that no measure counts; empty where there are none."""
    empty = sum(row.length == 0 for row in report.rows)
    parts = []
    if empty:
        parts.append(f"{counted(empty, 'row')} of length 0")
    if report.rows_invalid:
        parts.append(
            f"{counted(report.rows_invalid, 'INVALID row')}, with scores that are not finite"
        )
    if report.accuracy is not None and report.accuracy.rows_constant:
        parts.append(f"{counted(report.accuracy.rows_constant, 'CONSTANT row')}, of one score")
    return ", ".join(parts)


def _top_k_table(accuracy: Accuracy) -> TableData:
    percentiles = any(each.recall.rows >= _ROWS_OF_PERCENTILES for each in accuracy.top_k)
    result = table(
        "top-k", "rows", "recall", "median", *(["worst 1%"] if percentiles else []), "worst",
        "chance", "mass", "worst mass", "same set",
        style="compact",
    )  # fmt: skip
    for each in accuracy.top_k:
        recall, mass = each.recall, each.mass
        result.add_row(
            f"{each.k:,}",
            f"{recall.rows:,} of {accuracy.rows_measured:,}",
            similarity(recall.mean),
            similarity(recall.median),
            *([similarity(recall.p1)] if percentiles else []),
            similarity(recall.minimum),
            similarity(each.chance),
            similarity(mass.mean),
            similarity(mass.minimum),
            f"{each.rows_with_same_set:,}" if recall.rows else "-",
        )
    return result


def _top_k_remarks(top_k: Sequence[TopKSummary]) -> list[str]:
    """A sentence about each k that no row is longer than, or that ties decided."""
    remarks = []
    for each in top_k:
        if not each.recall.rows:
            remarks.append(f"{each.k:,}: no row is longer, so every key is kept in any case.")
        elif each.rows_decided_by_ties:
            text = ties_decide(each.rows_decided_by_ties, each.most_ties_left_out)
            remarks.append(f"{each.k:,}: {text}")
        elif each.rows_with_ties:
            remarks.append(
                f"{each.k:,}: {counted(each.rows_with_ties, 'row')} left out keys that equal the "
                f"last one chosen, up to {each.most_ties_left_out:,}; no recall is lost by that."
            )
    return remarks


def _errors_table(accuracy: Accuracy) -> TableData:
    measures: tuple[tuple[str, Summary, bool], ...] = (
        ("relative L2", accuracy.relative_l2, True),
        ("max abs", accuracy.max_abs, True),
        ("cosine", accuracy.cosine, False),
        ("Spearman", accuracy.spearman, False),
    )
    percentiles = any(summary.rows >= _ROWS_OF_PERCENTILES for _, summary, _ in measures)
    result = table(
        "scores", "mean", "median", *(["worst 1%"] if percentiles else []), "worst",
        "its row", "request", "keys",
        style="compact",
    )  # fmt: skip
    for name, summary, is_error in measures:
        show = error_size if is_error else similarity
        worst = summary.worst
        result.add_row(
            name,
            show(summary.mean),
            show(summary.median),
            *([show(summary.p99 if is_error else summary.p1)] if percentiles else []),
            show(None if worst is None else worst.value),
            *(
                ("-", "-", "-")
                if worst is None
                else (str(worst.row), str(worst.request), f"{worst.length:,}")
            ),
        )
    return result


def _scores(report: ScoreReport) -> list[RenderableType]:
    """The first rows' scores and best keys, and where the others are."""
    rows = report.rows
    title = "Scores" if len(rows) <= _ROWS_SHOWN else f"Scores of the first {_ROWS_SHOWN} rows"
    result = table(
        "row", "request", "keys", "highest", "lowest", "best keys",
        style="compact",
    )  # fmt: skip
    for row in rows[:_ROWS_SHOWN]:
        result.add_row(
            str(row.row),
            str(row.request),
            f"{row.length:,}",
            error_size(row.maximum),
            error_size(row.minimum),
            " ".join(map(str, row.best_keys)) or "-",
        )
    largest = max(report.options.top_k)
    parts: list[RenderableType] = [heading(title), result]
    if report.options.output is None:
        stored = report.options.select or largest
        parts.append(f"All scores and each row's top {stored:,} keys go to a file with -o FILE.")
    return parts


def _timing_table(measurement: Measurement, selection: SelectionMeasurement | None) -> TableData:
    timing = measurement.timing
    others = {}
    if selection is not None:
        others = {
            f"with top-{selection.top_k:,}": selection.scores_and_top_k,
            f"top-{selection.top_k:,} alone": selection.select,
        }
    longest = max(each.median_us for each in (timing, *others.values()))
    unit, unit_us = ("us", 1.0) if longest < LONGEST_US else ("ms", 1e3)
    result = table(
        "time", "runs", f"median {unit}", f"p10 {unit}", f"p90 {unit}", "bytes moved", "GB/s",
        style="compact",
    )  # fmt: skip
    bandwidth = f"{measurement.traffic.total_bytes:,}", f"{measurement.gigabytes_per_second:,.4g}"
    for name, each in {f"replay: {timing.replay}": timing, **others}.items():
        result.add_row(
            name,
            f"{len(each.samples_us):,}",
            *(
                f"{microseconds / unit_us:,.1f}"
                for microseconds in (each.median_us, each.p10_us, each.p90_us)
            ),
            *(bandwidth if each is timing else ("-", "-")),
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
        "SM clock": clock_words(measurement),
        "first call": f"{measurement.compile_seconds:.3g} s more than the second",
        "eager call": f"{measurement.host_us:.3g} us of the host's time",
    }
