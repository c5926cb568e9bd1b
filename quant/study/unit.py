"""One unit of a study: one request of one layer, every setting, in bounded memory.

Query rows are taken a chunk at a time, and so are keys; a chunk of keys is transformed once for
every format and encoded once for the formats that store the same bytes:

    keys ── transform ──┬── encode ── decode ──┬── x query rows ── scores [formats, rows, keys]
                        └── block profile      └── squared error by channel

Scores are dot products of the decoded vectors in float64, rounded to float32 once: they show what
the format does, and nothing of the order in which a kernel adds. Errors by channel are measured
between the original keys and the decoded ones with the transform undone.

The accuracy of rows is kept as columns of one float64 tensor: compact, and stored to the bit. NaN
stands for what a row leaves undefined.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sdsa_quant.accuracy.blocks import BlockProfile, profile_blocks
from sdsa_quant.accuracy.metrics import RowAccuracy, RowBaseline, TopKAccuracy, chance_recall
from sdsa_quant.accuracy.query_loss import rows_lost
from sdsa_quant.calibration.layer import LayerCalibration
from sdsa_quant.formats.key_formats import KeyFormat
from sdsa_quant.formats.rule_weights import RuleWeights
from sdsa_quant.formats.transforms import KeyTransform, fit_transforms
from sdsa_quant.layout import DIM

from .layers import KEYS_AT_A_TIME, StudyLayer
from .settings import StudySettings

SCORE_BUDGET_BYTES = 256 << 20  # of all that is kept by score, for the rows of one chunk
_BASELINE_BYTES = 4 + 3 * 8  # of a baseline score, as float32 and in a RowBaseline

# Score errors, as multiples of the standard deviation of the row's baseline scores, are counted in
# steps of 1/64 from -1 to 1; what lies outside is counted in the outer bins.
ERROR_STEPS = 64
ERROR_BINS = 2 * ERROR_STEPS

# Columns of a row, by the names that they have in `RowAccuracy`; then for each k those of its
# `TopKAccuracy`.
_COUNTS = (
    "row",
    "request",
    "length",
    "nonfinite_scores",
    "nonfinite_baseline",
    "constant_baseline",
)
_MEASURES = ("relative_l2", "max_abs", "cosine", "spearman")
_BY_K = ("recall", "mass", "same_scores", "same_set", "ties_left_out")

LayerTransforms = tuple[KeyTransform, ...]  # one for each of the settings' transforms


@dataclass(frozen=True, slots=True)
class UnitResult:
    """What was measured of one request of one layer."""

    rows: torch.Tensor  # float64 [settings, rows, columns], see `pack_rows`
    error_counts: torch.Tensor  # int64 [settings, ERROR_BINS]
    channel_errors: torch.Tensor  # float64 [settings, 128], sums of squares
    channel_squares: torch.Tensor  # float64 [128], sums of squares of the keys
    gains: tuple[float, ...]  # by transform
    profiles: tuple[BlockProfile, ...]  # of the keys, by transform
    query_profiles: tuple[BlockProfile, ...]  # of the query rows, by transform
    query_rows_lost: tuple[int, ...]  # by setting, see `rows_lost`


def fit_layer(layer: StudyLayer, settings: StudySettings) -> LayerTransforms:
    """The settings' transforms, with this layer's mean key and gains."""
    return fit_transforms(layer.all_keys, settings.transforms)


def measure_unit(
    layer: StudyLayer,
    request: int,
    settings: StudySettings,
    transforms: LayerTransforms,
    device: torch.device | str = "cpu",
    calibration: LayerCalibration | None = None,
) -> UnitResult:
    """Measure every setting on one request of one layer.

    Parameters
    ----------
    layer, request : StudyLayer, int
        Whose keys and query rows.
    settings : StudySettings
        What to compare.
    transforms : tuple of KeyTransform
        `fit_layer` of this layer.
    device : torch.device or str
        Where to compute.
    calibration : LayerCalibration, optional
        What calibrated formats need: statistics that this request is not part of. Centering then
        takes their mean key too, with every format.

    Raises
    ------
    ValueError
        A key or query value is not finite.
    """
    if calibration is not None:
        mean = calibration.key_mean.float()
        transforms = tuple(
            transform if transform.mean is None else replace(transform, mean=mean)
            for transform in transforms
        )
    unit = _Unit(layer, request, settings, transforms, torch.device(device), calibration)
    rows = layer.request_rows[request]
    # Without query rows there is still one chunk, to measure the keys alone.
    for start in range(0, max(len(rows), 1), unit.rows_per_chunk):
        unit.measure_chunk(rows[start : start + unit.rows_per_chunk], first=start == 0)
    return unit.result()


@dataclass(frozen=True, slots=True)
class _Codec:
    """Formats that store keys alike, with their indices among the settings' formats."""

    format: KeyFormat
    indices: tuple[int, ...]


class _Unit:
    """The running totals of one unit."""

    def __init__(
        self,
        layer: StudyLayer,
        request: int,
        settings: StudySettings,
        transforms: LayerTransforms,
        device: torch.device,
        calibration: LayerCalibration | None,
    ) -> None:
        self._layer = layer
        self._request = request
        self._settings = settings
        self._device = device
        self._transforms = [transform.to(device) for transform in transforms]
        self._key_weights, self._query_weights = (
            [None if weights is None else weights.to(device) for weights in each]
            for each in _weights(transforms, calibration)
        )
        self._formats = [setting.format for setting in settings.settings[: len(settings.formats)]]
        self._codecs = _distinct_codecs(self._formats)
        self._length = layer.keys.context_lengths[request]
        count = len(settings.settings)
        self._rows: list[list[RowAccuracy]] = [[] for _ in range(count)]
        self._error_counts = torch.zeros((count, ERROR_BINS), dtype=torch.int64, device="cpu")
        self._channel_errors = torch.zeros((count, DIM), dtype=torch.float64, device=device)
        self._channel_squares = torch.zeros(DIM, dtype=torch.float64, device=device)
        self._profiles = [BlockProfile() for _ in settings.transforms]
        self._query_profiles = [BlockProfile() for _ in settings.transforms]
        self._query_rows_lost = [0] * count

    @property
    def rows_per_chunk(self) -> int:
        """Query rows that fit into the score budget at once."""
        ranking = self._layer.ranking
        choices = ranking.rows_each * max(ranking.choices(self._length), 1)
        row_bytes = (4 * len(self._formats) + _BASELINE_BYTES) * choices
        row_bytes += ranking.workspace_bytes(min(self._length, KEYS_AT_A_TIME))
        # Of a row with many heads, what the query itself takes in float64 counts too.
        row_bytes += 8 * DIM * (self._layer.heads or 0) * (len(self._formats) + 1)
        return max(1, SCORE_BUDGET_BYTES // row_bytes)

    def measure_chunk(self, rows: Sequence[int], *, first: bool) -> None:
        """Measure some query rows; keys alone are measured with the first chunk."""
        query = self._layer.read_query(rows).to(self._device)
        weights = self._layer.read_weights(rows)
        weights = None if weights is None else weights.to(self._device)
        ranking, each = self._layer.ranking, self._layer.ranking.rows_each
        seen = [self._layer.row_lengths[row] for row in rows]
        lengths = torch.tensor(seen, device=self._device, dtype=torch.int64)
        # What ranks, by its number and what it chooses among: a query row, or each of its heads.
        ranked = [
            (row * each + head, ranking.choices(length))
            for row, length in zip(rows, seen, strict=True)
            for head in range(each)
        ]
        baseline = self._baseline(query, weights, lengths)
        if first:
            for _, keys in self._layer.key_chunks(self._request):
                squares = keys.to(self._device).double().square()
                self._channel_squares += squares.sum(0, dtype=torch.float64)
        baselines = [
            RowBaseline(
                scores[:choices],
                top_k=self._settings.top_k,
                softmax_scale=self._settings.softmax_scale,
                forced=min(ranking.local, choices),
            )
            for (_, choices), scores in zip(ranked, baseline, strict=True)
        ]
        for transform_index in range(len(self._transforms)):
            scores = self._score(transform_index, query, weights, lengths, first=first)
            for format_index, index in itertools.product(
                range(len(self._formats)), range(len(ranked))
            ):
                row, choices = ranked[index]
                self._measure_row(
                    transform_index * len(self._formats) + format_index,
                    row,
                    scores[format_index, index, :choices],
                    baseline[index, :choices],
                    baselines[index],
                )

    def _empty_scores(self, rows: int, *formats: int) -> torch.Tensor:
        ranking = self._layer.ranking
        shape = (*formats, rows * ranking.rows_each, ranking.choices(self._length))
        return torch.empty(shape, device=self._device, dtype=torch.float32)

    def _baseline(
        self, query: torch.Tensor, weights: torch.Tensor | None, lengths: torch.Tensor
    ) -> torch.Tensor:
        """float32 ``[ranked, choices]`` scores of the unquantized keys."""
        scores, wide = self._empty_scores(query.shape[0]), query.double()
        for start, chunk in self._layer.key_chunks(self._request):
            keys = chunk.to(self._device)
            self._layer.ranking.add_chunk(scores, start, wide, keys, lengths, weights=weights)
        return scores

    def _score(
        self,
        index: int,
        query: torch.Tensor,
        weights: torch.Tensor | None,
        lengths: torch.Tensor,
        *,
        first: bool,
    ) -> torch.Tensor:
        """float32 ``[formats, ranked, choices]`` of one transform, on the scale of the baseline."""
        transform = self._transforms[index]
        transformed_query = transform.apply_query(query)
        wide_queries = [
            _stored_query(key_format, transformed_query, self._query_weights[index]).double()
            for key_format in self._formats
        ]
        self._query_profiles[index] += profile_blocks(transformed_query.reshape(-1, DIM))
        for format_index, stored in enumerate(wide_queries):
            lost = int(rows_lost(transformed_query, stored).sum())
            self._query_rows_lost[index * len(self._formats) + format_index] += lost
        # The gain is a power of two: dividing the query by it is exact.
        wide_queries = [wide.div_(transform.gain) for wide in wide_queries]
        shifts = transform.score_shifts(query.view(-1, DIM)).view(query.shape[:-1])
        scores = self._empty_scores(query.shape[0], len(self._formats))
        for start, chunk in self._layer.key_chunks(self._request):
            keys = chunk.to(self._device)
            transformed = transform.apply_keys(keys)
            if first:
                self._profiles[index] += profile_blocks(transformed)
            for codec in self._codecs:
                decoded = codec.format.round_trip(transformed, self._key_weights[index])
                if first:
                    self._add_channel_errors(index, codec, keys, transform.restore_keys(decoded))
                wide_keys = decoded.double()
                for format_index in codec.indices:
                    self._layer.ranking.add_chunk(
                        scores[format_index],
                        start,
                        wide_queries[format_index],
                        wide_keys,
                        lengths,
                        weights=weights,
                        shifts=shifts,
                    )
        return scores

    def _add_channel_errors(
        self, index: int, codec: _Codec, keys: torch.Tensor, restored: torch.Tensor
    ) -> None:
        errors = (restored.double() - keys).square_().sum(0)
        for format_index in codec.indices:
            self._channel_errors[index * len(self._formats) + format_index] += errors

    def _measure_row(
        self,
        setting: int,
        row: int,
        scores: torch.Tensor,
        baseline: torch.Tensor,
        row_baseline: RowBaseline,
    ) -> None:
        accuracy = row_baseline.measure(row, self._request, scores)
        self._rows[setting].append(accuracy)
        if accuracy.valid and accuracy.length:
            self._error_counts[setting] += count_errors(scores, baseline).cpu()

    def result(self) -> UnitResult:
        """Everything measured so far."""
        return UnitResult(
            rows=torch.stack([pack_rows(rows, self._settings.top_k) for rows in self._rows]),
            error_counts=self._error_counts,
            channel_errors=self._channel_errors.cpu(),
            channel_squares=self._channel_squares.cpu(),
            gains=tuple(transform.gain for transform in self._transforms),
            profiles=tuple(self._profiles),
            query_profiles=tuple(self._query_profiles),
            query_rows_lost=tuple(self._query_rows_lost),
        )


def _distinct_codecs(formats: Sequence[KeyFormat]) -> list[_Codec]:
    alike: dict[object, list[int]] = {}
    for index, key_format in enumerate(formats):
        alike.setdefault((key_format.encode, key_format.decode), []).append(index)
    return [_Codec(formats[same[0]], tuple(same)) for same in alike.values()]


def _weights(
    transforms: LayerTransforms, calibration: LayerCalibration | None
) -> tuple[list[RuleWeights | None], list[RuleWeights | None]]:
    """Weights of keys and of query rows for each transform."""
    if calibration is None:
        return [None] * len(transforms), [None] * len(transforms)
    return (
        [calibration.key_weights(transform.rotate) for transform in transforms],
        [calibration.query_weights(transform.rotate) for transform in transforms],
    )


def _stored_query(
    key_format: KeyFormat, query: torch.Tensor, weights: RuleWeights | None
) -> torch.Tensor:
    """Transformed query rows as a kernel would get them."""
    if key_format.quantizes_query:
        return key_format.round_trip(query, weights)
    return query.to(torch.bfloat16)


def count_errors(scores: torch.Tensor, baseline: torch.Tensor) -> torch.Tensor:
    """int64 ``[ERROR_BINS]``: one row's score errors in standard deviations of its baseline.

    Constant baseline scores have no standard deviation: exact ones count as error 0 and others as
    the largest.
    """
    errors = scores.double().sub_(baseline)
    deviation = baseline.double().std(correction=0)
    # 0 / 0 is an exact score and becomes 0; x / 0 is infinite and lands in an outer bin.
    steps = errors.div_(deviation).nan_to_num_(nan=0.0).mul_(ERROR_STEPS).floor_()
    bins = steps.clamp_(-ERROR_STEPS, ERROR_STEPS - 1).long().add_(ERROR_STEPS)
    return torch.bincount(bins, minlength=ERROR_BINS)


def columns(top_k: Sequence[int]) -> int:
    """Number of columns of a row."""
    return recall_column(len(top_k))


def recall_column(index: int) -> int:
    """Column of the recall of the k at `index`; NaN where the row was not measured."""
    return len(_COUNTS) + len(_MEASURES) + index * len(_BY_K)


def lengths(rows: torch.Tensor) -> torch.Tensor:
    """float64 ``[..]`` lengths of rows ``[.., columns]``."""
    return rows[..., _COUNTS.index("length")]


def telling_rows(rows: torch.Tensor, k: int) -> torch.Tensor:
    """bool ``[..]``, which rows ``[.., columns]`` can lose a key of k: longer, and not constant."""
    return (lengths(rows) > k) & (rows[..., _COUNTS.index("constant_baseline")] == 0)


def pack_rows(rows: Iterable[RowAccuracy], top_k: Sequence[int]) -> torch.Tensor:
    """float64 ``[rows, columns]``: the counts, the measures, then those of each k."""
    width = columns(top_k)
    numbers = [_numbers(row, width) for row in rows]
    return torch.tensor(numbers, dtype=torch.float64, device="cpu").view(len(numbers), width)


def _numbers(row: RowAccuracy, width: int) -> list[float]:
    values = [getattr(row, name) for name in (*_COUNTS, *_MEASURES)]
    values += [getattr(each, name) for each in row.top_k for name in _BY_K]
    numbers = [math.nan if value is None else float(value) for value in values]
    return numbers + [math.nan] * (width - len(numbers))


def unpack_rows(rows: torch.Tensor, top_k: Sequence[int], forced: int = 0) -> list[RowAccuracy]:
    """Undo `pack_rows`, the same bits; `forced` as the rows were measured."""
    return [_row(numbers, top_k, forced) for numbers in rows.tolist()]


def _row(numbers: Sequence[float], top_k: Sequence[int], forced: int) -> RowAccuracy:
    values: dict[str, Any] = dict(zip(_COUNTS, map(int, numbers), strict=False))
    values["constant_baseline"] = bool(values["constant_baseline"])
    for name, value in zip(_MEASURES, numbers[len(_COUNTS) :], strict=False):
        values[name] = None if math.isnan(value) else value
    row = RowAccuracy(**values)
    if not row.valid or not row.length:
        return row
    by_k = [_top_k(numbers[recall_column(i) :], k, row.length, forced) for i, k in enumerate(top_k)]
    return replace(row, top_k=tuple(by_k))


def _top_k(numbers: Sequence[float], k: int, length: int, forced: int) -> TopKAccuracy:
    recall, mass, same_scores, same_set, ties_left_out = numbers[: len(_BY_K)]
    kept = min(k, length)
    return TopKAccuracy(
        k=k,
        kept=kept,
        recall=recall,
        mass=mass,
        chance=chance_recall(k, length, forced),
        same_scores=bool(same_scores),
        same_set=bool(same_set),
        ties_left_out=int(ties_left_out),
    )
