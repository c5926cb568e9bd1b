"""The report of `sdsa score`: what a run found out, and the document of it for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sdsa_cli.measurement import MeasurementRecord, measurement_fields
from sdsa_cli.selection import SelectionTimes, selection_fields
from sdsa_quant.accuracy.metrics import TopKAccuracy
from sdsa_quant.accuracy.query_loss import QueryLoss
from sdsa_quant.accuracy.summary import Accuracy, Summary, TopKSummary
from sdsa_quant.environment import Environment, describe_environment

from .inputs import ScoreOptions

if TYPE_CHECKING:
    from sdsa_kernels.measure.measurement import Measurement
    from sdsa_kernels.measure.selected import SelectionMeasurement
    from sdsa_kernels.scoring.chunks import ChunkScorer
    from sdsa_kernels.scoring.rows import RowScores
    from sdsa_quant.captures.baseline import Baseline
    from sdsa_quant.files.cache_file import CacheFile
    from sdsa_quant.files.tensor_source import StoredTensor


@dataclass(frozen=True, slots=True)
class CacheFields:
    """The cache that was scored."""

    values: str
    """Format of its keys: ``nvfp4`` or ``bf16``."""
    layout: str
    """``interleaved`` or ``separate``."""
    scale_order: str
    """``linear`` or ``128x4``."""
    rule: str
    """How codes and scales were chosen."""
    rotate: str
    """How keys were rotated before they were stored, or ``none``."""
    gain: float
    """What keys were multiplied by before they were stored."""
    center: str
    """What was subtracted from keys before they were stored, or ``none``."""
    source: str
    """File that the keys came from, as the header has it."""
    requests: int
    """Number of requests."""
    keys: int
    """Keys of all requests."""
    pages: int
    """Pages of 64 keys."""
    cache_bytes: int
    """Bytes of keys and scales."""
    file_bytes: int
    """Bytes of the whole file."""


@dataclass(frozen=True, slots=True)
class ProblemFields:
    """What was scored, where and with what."""

    rows: int
    """Query rows."""
    groups: int
    """Groups of query rows."""
    rows_per_group: int
    """Query rows of a group."""
    max_context: int
    """Keys of the longest request scored, the width of the scores."""
    query_name: str
    """Tensor of query rows."""
    query_dtype: str
    """Its dtype in the file; rows are rounded to BF16."""
    query_format: str
    """What the rows were scored as: ``bf16`` or ``nvfp4``."""
    key_format: str
    """What the cache holds: ``bf16`` or ``nvfp4``."""
    backend: str
    """Backend that scored, ``auto`` resolved."""
    device: str
    """Device that scored, ``auto`` resolved."""
    groups_per_piece: int
    """Groups scored at a time (``--chunk``)."""
    buffer_bytes: int
    """Bytes of the scores of one chunk."""
    scores_bytes: int
    """Bytes of all scores."""
    scores_file_bytes: int | None
    """Bytes of the file of ``-o``, or null."""
    query_loss: QueryLoss | None
    """What NVFP4 did to the query rows; null for BF16 rows."""


@dataclass(frozen=True, slots=True)
class SelectionFields:
    """The selection of ``--select``."""

    top_k: int
    """Keys that were selected in each row; a row with fewer keys keeps them all."""
    backend: str
    """Backend that selected, ``auto`` resolved."""
    times: SelectionTimes | None
    """Times of ``--graph-replay``; null without it, and where a row is invalid."""


@dataclass(frozen=True, slots=True)
class BaselineFields:
    """What accuracy was measured against."""

    kind: str
    """``keys``, or ``cache`` for a BF16 cache."""
    name: str | None
    """Tensor of keys; of a cache what its header names, else null."""
    dtype: str
    """Dtype of the keys."""


@dataclass(frozen=True, slots=True)
class AccuracyFields:
    """Accuracy over the rows."""

    rows: int
    """All query rows."""
    rows_measured: int
    """Rows that the summaries are about."""
    rows_empty: int
    """Rows of length 0, left out."""
    rows_invalid: int
    """Rows with a non-finite score or baseline score, left out."""
    rows_constant: int
    """Rows of several keys with one baseline score; not in `top_k`. More than 0 is exit code 1."""
    top_k: tuple[TopKSummary, ...]
    """For each k, the rows with more than k keys; all others keep every key."""
    relative_l2: Summary
    """Norm of (scores - baseline) over the norm of the baseline."""
    max_abs: Summary
    """Largest absolute difference."""
    cosine: Summary
    """Cosine similarity of scores and baseline."""
    spearman: Summary
    """Spearman's rank correlation; equal scores share their average rank."""


@dataclass(frozen=True, slots=True)
class RowAccuracyFields:
    """One row against its baseline; null for a row that is invalid or of length 0."""

    nonfinite_baseline: int
    """Baseline scores that are not finite."""
    relative_l2: float | None
    """Norm of (scores - baseline) over the norm of the baseline."""
    max_abs: float | None
    """Largest absolute difference."""
    cosine: float | None
    """Cosine similarity of scores and baseline."""
    spearman: float | None
    """Spearman's rank correlation."""
    top_k: tuple[TopKAccuracy, ...]
    """One entry for each k; empty for a row that is invalid or of length 0."""


@dataclass(frozen=True, slots=True)
class RowFields:
    """One query row."""

    row: int
    """Index of the row."""
    group: int
    """Index of its group."""
    request: int
    """Request of its group."""
    length: int
    """Keys that the row sees."""
    valid: bool
    """Whether all its scores and baseline scores are finite."""
    nonfinite_scores: int
    """Scores that are not finite."""
    minimum: float | None
    """Lowest finite score, or null."""
    maximum: float | None
    """Highest finite score, or null."""
    best_key: int | None
    """Index of the key with the highest score, or null."""
    best_keys: tuple[int, ...]
    """The first of the row's top-k, at most 4, highest score first."""
    accuracy: RowAccuracyFields | None
    """The row against its baseline, or null without a baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreDocument:
    """What `sdsa score` found out. Bytes, keys and microseconds; indices begin with 0."""

    schema: Literal["sdsa.score/2"] = "sdsa.score/2"
    """Name and version of this document."""
    command: Literal["score"] = "score"
    """The command that wrote it."""
    inputs: ScoreOptions
    """The command line."""
    cache: CacheFields
    """The cache file."""
    problem: ProblemFields
    """What was scored, where and with what."""
    rows_empty: int
    """Query rows whose request has no keys; left out of every summary."""
    rows_invalid: int
    """Query rows with a non-finite score or baseline score; more than 0 is exit code 1."""
    baseline: BaselineFields | None
    """What accuracy was measured against, or null without ``--baseline``."""
    accuracy: AccuracyFields | None
    """Summaries over the rows, or null without ``--baseline``."""
    doubts: list[str]
    """What shows that baseline and cache do not belong together; empty where nothing does."""
    timing: MeasurementRecord | None
    """Times of ``--graph-replay``; null without it, and where a row is invalid."""
    selection: SelectionFields | None
    """What was selected, or null without ``--select``."""
    environment: Environment
    """Where the report was made."""
    rows: list[RowFields]
    """One record for each query row, in order."""


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """Everything that one run of `sdsa score` found out, in the objects of the library."""

    options: ScoreOptions
    cache: CacheFile
    scorer: ChunkScorer
    queries: StoredTensor
    baseline: Baseline | None
    rows: Sequence[RowScores]
    accuracy: Accuracy | None
    timing: Measurement | None
    selection: SelectionMeasurement | None  # timed
    scores_file_bytes: int | None
    doubts: tuple[str, ...]  # about the accuracy

    @property
    def rows_invalid(self) -> int:
        """Rows with a non-finite score or, with a baseline, a non-finite baseline score."""
        return sum(not is_valid(row) for row in self.rows)


def is_valid(row: RowScores) -> bool:
    """Whether a row's scores and baseline scores are all finite."""
    return row.nonfinite_scores == 0 and (row.accuracy is None or row.accuracy.valid)


def score_document(report: ScoreReport) -> ScoreDocument:
    """The document of a run, for programs."""
    return ScoreDocument(
        inputs=report.options,
        cache=_cache_fields(report.cache),
        problem=_problem_fields(report),
        rows_empty=sum(row.length == 0 for row in report.rows),
        rows_invalid=report.rows_invalid,
        baseline=_baseline_fields(report.baseline),
        accuracy=_accuracy_fields(report),
        doubts=list(report.doubts),
        timing=None
        if report.timing is None
        else MeasurementRecord(**measurement_fields(report.timing)),
        selection=_selection_fields(report),
        environment=describe_environment(),
        rows=[_row_fields(row) for row in report.rows],
    )


def _cache_fields(cache: CacheFile) -> CacheFields:
    header = cache.header
    return CacheFields(
        values=header.format,
        layout=header.layout,
        scale_order=header.scale_order,
        rule=header.metadata()["rule"],
        rotate=header.rotate,
        gain=header.gain,
        center=header.center,
        source=header.source,
        requests=cache.context_lengths.shape[0],
        keys=int(cache.context_lengths.sum()),
        pages=cache.pages,
        cache_bytes=cache.cache_bytes,
        file_bytes=cache.file_bytes,
    )


def _problem_fields(report: ScoreReport) -> ProblemFields:
    scorer, task = report.scorer, report.scorer.task
    return ProblemFields(
        rows=task.rows,
        groups=task.groups,
        rows_per_group=task.rows_per_group,
        max_context=task.max_context,
        query_name=report.queries.name,
        query_dtype=report.queries.dtype,
        query_format=task.query_format,
        key_format=task.paged.format,
        backend=scorer.backend,
        device=str(task.device),
        groups_per_piece=scorer.groups_per_chunk,
        buffer_bytes=scorer.buffer_bytes,
        scores_bytes=scorer.whole_bytes,
        scores_file_bytes=report.scores_file_bytes,
        query_loss=task.query_loss,
    )


def _selection_fields(report: ScoreReport) -> SelectionFields | None:
    backend, top_k = report.scorer.select_backend, report.options.select
    if backend is None or top_k is None:
        return None
    timed = report.selection
    times = None if timed is None else SelectionTimes(**selection_fields(timed))
    return SelectionFields(top_k, backend, times)


def _accuracy_fields(report: ScoreReport) -> AccuracyFields | None:
    accuracy = report.accuracy
    if accuracy is None:
        return None
    fields = {field.name: getattr(accuracy, field.name) for field in dataclasses.fields(accuracy)}
    return AccuracyFields(**fields)


def _baseline_fields(baseline: Baseline | None) -> BaselineFields | None:
    if baseline is None:
        return None
    return BaselineFields(kind=baseline.kind, name=baseline.name, dtype=baseline.dtype)


def _row_fields(row: RowScores) -> RowFields:
    accuracy = row.accuracy
    return RowFields(
        row=row.row,
        group=row.group,
        request=row.request,
        length=row.length,
        valid=is_valid(row),
        nonfinite_scores=row.nonfinite_scores,
        minimum=row.minimum,
        maximum=row.maximum,
        best_key=row.best_keys[0] if row.best_keys else None,
        best_keys=row.best_keys,
        accuracy=None
        if accuracy is None
        else RowAccuracyFields(
            nonfinite_baseline=accuracy.nonfinite_baseline,
            relative_l2=accuracy.relative_l2,
            max_abs=accuracy.max_abs,
            cosine=accuracy.cosine,
            spearman=accuracy.spearman,
            top_k=accuracy.top_k,
        ),
    )
