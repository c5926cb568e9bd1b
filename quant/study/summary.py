"""Result files of a study reduced to its results, in a fixed order: layers, then requests.

Every number comes from sums of integers, from sorted rows, or from float64 sums in that order, so
that the results are the same bits whichever ranks measured the units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import torch

from sdsa_quant.accuracy.blocks import BlockProfile
from sdsa_quant.accuracy.doubts import chance_limit
from sdsa_quant.accuracy.summary import Accuracy, summarize_accuracy
from sdsa_quant.layout import DIM

from .results import BlockCounts, BlockResult, LayerInfo, LengthBin, SettingResult
from .settings import StudySettings
from .unit import ERROR_BINS, UnitResult, lengths, recall_column, telling_rows, unpack_rows
from .work import Study


@dataclass(frozen=True, slots=True)
class StudySummary:
    """Everything that a report is made of, and the rows that suggestions are based on."""

    settings: StudySettings
    layers: tuple[LayerInfo, ...]
    overall: tuple[SettingResult, ...]  # by setting
    by_layer: tuple[tuple[SettingResult, ...], ...]  # by layer, then by setting
    blocks: tuple[BlockResult, ...]  # all layers first, then by layer
    row_recalls: torch.Tensor  # float64 [settings, rows, k], NaN where not measured
    row_tells: torch.Tensor  # bool [rows, k], whether a row can lose a key
    row_units: torch.Tensor  # int64 [rows], one number for each layer and request

    @property
    def rows_invalid(self) -> int:
        """Rows with a non-finite score, counted for every setting."""
        return sum(result.accuracy.rows_invalid for result in self.overall)


class _Totals:
    """Sums over units, for one layer or for all."""

    def __init__(self, settings: StudySettings, forced: int) -> None:
        self.forced = forced  # choices of a row that are made whatever the scores
        count = len(settings.settings)
        self.rows: list[torch.Tensor] = []
        self.error_counts = torch.zeros((count, ERROR_BINS), dtype=torch.int64, device="cpu")
        self.channel_errors = torch.zeros((count, DIM), dtype=torch.float64, device="cpu")
        self.channel_squares = torch.zeros(DIM, dtype=torch.float64, device="cpu")
        self.profiles = [BlockProfile() for _ in settings.transforms]
        self.query_profiles = [BlockProfile() for _ in settings.transforms]
        self.query_rows_lost = [0] * count
        self.gains: list[set[float]] = [set() for _ in settings.transforms]

    def add(self, unit: UnitResult) -> None:
        self.rows.append(unit.rows)
        self.error_counts += unit.error_counts
        self.channel_errors += unit.channel_errors
        self.channel_squares += unit.channel_squares
        self.profiles = _added(self.profiles, unit.profiles)
        self.query_profiles = _added(self.query_profiles, unit.query_profiles)
        for setting, lost in enumerate(unit.query_rows_lost):
            self.query_rows_lost[setting] += lost
        for gains, gain in zip(self.gains, unit.gains, strict=True):
            gains.add(gain)

    def all_rows(self) -> torch.Tensor:
        """float64 ``[settings, rows, columns]``."""
        return torch.cat(self.rows, dim=1)


def _added(profiles: Sequence[BlockProfile], others: Sequence[BlockProfile]) -> list[BlockProfile]:
    return [a + b for a, b in zip(profiles, others, strict=True)]


def summarize_study(study: Study) -> StudySummary:
    """Reduce the result files of a finished study.

    Raises
    ------
    ValueError
        A result file is missing or damaged.
    """
    settings = study.settings
    forced = study.inputs.local_blocks
    whole = _Totals(settings, forced)
    layers, by_layer, blocks = [], [], []
    for index, layer in enumerate(study.layers):
        totals = _Totals(settings, forced)
        for request in range(layer.requests):
            unit = study.folder.read(index, request)
            totals.add(unit)
            whole.add(unit)
        layers.append(
            LayerInfo(
                layer.name,
                layer.query_name,
                layer.requests,
                sum(layer.keys.context_lengths),
                len(layer.row_requests),
                layer.heads,
            )
        )
        by_layer.append(_setting_results(layer.name, totals, settings, ()))
        blocks += _block_results(layer.name, totals, settings)
    rows = whole.all_rows()
    recall_columns = [recall_column(index) for index in range(len(settings.top_k))]
    return StudySummary(
        settings=settings,
        layers=tuple(layers),
        overall=_setting_results(None, whole, settings, by_layer),
        by_layer=tuple(by_layer),
        blocks=(*_block_results(None, whole, settings), *blocks),
        row_recalls=rows[:, :, recall_columns],
        row_units=torch.repeat_interleave(
            torch.arange(len(whole.rows), dtype=torch.int64, device="cpu"),
            torch.tensor(
                [of_unit.shape[1] for of_unit in whole.rows], dtype=torch.int64, device="cpu"
            ),
        ),
        row_tells=torch.stack([telling_rows(rows[0], k) for k in settings.top_k], dim=-1),
    )


def _block_results(
    layer: str | None, totals: _Totals, settings: StudySettings
) -> list[BlockResult]:
    return [
        BlockResult(
            layer=layer,
            transform=choice.label,
            gain=min(gains) if len(gains) == 1 else None,
            profile=BlockCounts(**asdict(profile)),
            query_profile=BlockCounts(**asdict(query_profile)),
        )
        for choice, gains, profile, query_profile in zip(
            settings.transforms, totals.gains, totals.profiles, totals.query_profiles, strict=True
        )
    ]


def _setting_results(
    layer: str | None,
    totals: _Totals,
    settings: StudySettings,
    by_layer: Sequence[Sequence[SettingResult]],
) -> tuple[SettingResult, ...]:
    rows = totals.all_rows()
    results = []
    for index, setting in enumerate(settings.settings):
        measured = unpack_rows(rows[index], settings.top_k, totals.forced)
        accuracy = summarize_accuracy(measured, settings.top_k)
        of_layers = [results_of_layer[index] for results_of_layer in by_layer]
        results.append(
            SettingResult(
                layer=layer,
                format=setting.format.name,
                transform=setting.transform.label,
                bytes_per_key=setting.format.bytes_per_key,
                accuracy=accuracy,
                worst_layers=_worst_layers(layer, accuracy, of_layers),
                no_better_than_chance=tuple(
                    _no_better_than_chance(rows[index], k, recall_column(k_index), totals.forced)
                    for k_index, k in enumerate(settings.top_k)
                ),
                by_length=_by_length(rows[index], settings.top_k),
                key_error=_key_error(totals, index),
                channel_errors=_channel_errors(totals, index),
                error_counts=tuple(totals.error_counts[index].tolist()),
                query_rows_lost=totals.query_rows_lost[index],
            )
        )
    return tuple(results)


def _worst_layers(
    layer: str | None, accuracy: Accuracy, of_layers: Sequence[SettingResult]
) -> tuple[str | None, ...]:
    """By k, the layer that the worst row is in: the first that has a row of that recall."""
    if layer is not None:
        return (layer,) * len(accuracy.top_k)
    worst = []
    for index, top_k in enumerate(accuracy.top_k):
        least = top_k.recall.minimum
        found = (
            result.layer
            for result in of_layers
            if result.accuracy.top_k[index].recall.minimum == least
        )
        worst.append(next(found, None) if least is not None else None)
    return tuple(worst)


def _no_better_than_chance(rows: torch.Tensor, k: int, column: int, forced: int) -> bool | None:
    """Whether the mean recall is within 3 standard errors of that of random choices.

    Rows that are not longer than k cannot miss a key and say nothing.
    """
    telling = telling_rows(rows, k) & ~rows[:, column].isnan()
    if not bool(telling.any()):
        return None
    limit = chance_limit(lengths(rows)[telling].tolist(), k, forced)
    return fmean(rows[telling, column].tolist()) <= limit


def _by_length(rows: torch.Tensor, top_k: Sequence[int]) -> tuple[LengthBin, ...]:
    """Measured rows by the power of two that their length does not exceed."""
    measured = rows[~rows[:, recall_column(0)].isnan()]
    exponents = lengths(measured).log2().ceil().long()
    bins = []
    for exponent in exponents.unique().tolist():
        inside = measured[exponents == exponent]
        recalls = [
            inside[telling_rows(inside, k), recall_column(index)].tolist()
            for index, k in enumerate(top_k)
        ]
        bins.append(
            LengthBin(
                shortest=2 ** (exponent - 1) + 1 if exponent else 1,
                longest=2**exponent,
                rows=inside.shape[0],
                rows_longer_than_k=tuple(len(of_k) for of_k in recalls),
                recall=tuple(fmean(of_k) if of_k else None for of_k in recalls),
            )
        )
    return tuple(bins)


def _key_error(totals: _Totals, setting: int) -> float | None:
    squares = math.fsum(totals.channel_squares.tolist())
    errors = math.fsum(totals.channel_errors[setting].tolist())
    return math.sqrt(errors / squares) if squares and math.isfinite(errors / squares) else None


def _channel_errors(totals: _Totals, setting: int) -> tuple[float, ...] | None:
    squares = math.fsum(totals.channel_squares.tolist()) / DIM
    if _key_error(totals, setting) is None:
        return None
    return tuple(math.sqrt(error / squares) for error in totals.channel_errors[setting].tolist())
