"""The report of a study, typed: what ``report.json`` holds, and reading it back.

Tables, plots and pages are made from a `StudyReport` alone, so that they can be made again from the
file. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.environment import Environment
from sdsa_quant.errors import InputError
from sdsa_quant.files.text import read_json
from sdsa_quant.files.typed_json import from_json
from sdsa_quant.layout import DIM

from .inputs import StudyInputs
from .results import BlockResult, LayerInfo, SettingResult, Suggestions
from .verdict import Goal, Verdict, judge

REPORT_NAME = "report.json"


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """A format that was compared."""

    name: str
    """Its name."""

    bytes_per_key: int
    """Bytes that a stored key takes."""

    quantizes_query: bool
    """Whether query rows go through the format too; otherwise they stay BF16."""

    summary: str
    """The format in words."""


@dataclass(frozen=True, slots=True)
class TransformInfo:
    """A transform that was compared, as it was asked for."""

    label: str
    """Short name, ``"none"`` for no transform."""

    center: str
    """``"channel"`` if each layer's mean key was subtracted, otherwise ``"none"``."""

    rotate: str
    """``"hadamard"`` if keys and query rows were rotated, otherwise ``"none"``."""

    gain: str
    """``"none"``, ``"auto"`` or the power of two that keys were multiplied by."""


@dataclass(frozen=True, slots=True)
class StudiedSettings:
    """What was compared: every format after every transform."""

    formats: tuple[FormatInfo, ...]
    """The formats."""

    transforms: tuple[TransformInfo, ...]
    """The transforms."""

    top_k: tuple[int, ...]
    """Numbers of keys that are selected; everything "by k" is in this order."""

    softmax_scale: float
    """What a score was multiplied by before the softmax of mass@k."""

    error_steps: int
    """Bins of `error_counts` for one standard deviation."""

    first_exponent: int
    """Exponent of the first bin of `by_exponent`."""


@dataclass(frozen=True, slots=True)
class StudyTiming:
    """How the last run of the study went."""

    seconds: float
    """Seconds from the start to the report."""

    ranks: int
    """Processes of torchrun."""

    joined_by: str | None
    """``"nccl"`` or ``"gloo"``; null for one rank."""

    workers: int
    """Processes of each rank."""


@dataclass(frozen=True, slots=True)
class StudyReport:
    """A study's results.

    Except for `environment` and `timing`, the same inputs and settings give the same report,
    whatever the number of processes and however often the study was interrupted.
    """

    schema: Literal["sdsa.study/5"]
    """Which document this is, and the version of its fields."""

    command: Literal["study"]
    """The command that makes such documents."""

    inputs: StudyInputs
    """What was studied."""

    device: str
    """The kind of device that measured, ``"cpu"`` or ``"cuda"``."""

    settings: StudiedSettings
    """What was compared."""

    layers: tuple[LayerInfo, ...]
    """The layers, in the natural order of their names."""

    rows_invalid: int
    """Rows with a non-finite score or baseline score, counted for every setting."""

    rows_constant: int
    """Rows of several keys with one baseline score, an error of the capture."""

    suggestions: Suggestions
    """What to take at each size of a key."""

    verdict: Verdict
    """What to deploy."""

    results: tuple[SettingResult, ...]
    """Every setting over all layers, then for each layer."""

    blocks: tuple[BlockResult, ...]
    """NVFP4 blocks by transform: over all layers, then for each layer."""

    environment: Environment
    """Where the report was made."""

    timing: StudyTiming
    """How the last run went."""

    @classmethod
    def from_json(cls, data: Any, *, source: object) -> StudyReport:
        """The report that ``json.loads`` gave as `data`.

        Raises
        ------
        InputError
            A field is missing or not what it must be; the message names `source` and the field.
        """
        report = from_json(cls, data, source=source)
        for fault in report._faults():
            raise InputError(fault, source=source)
        return report

    @classmethod
    @checked_arguments
    def read(cls, path: str | Path) -> StudyReport:
        """The report in a file, or in the ``report.json`` of a folder.

        Raises
        ------
        InputError
            The file cannot be read, or as `from_json`.
        """
        path = Path(path)
        if path.is_dir():
            path = path / REPORT_NAME
        return cls.from_json(read_json(path), source=path)

    def judged(self, goal: Goal | None) -> StudyReport:
        """The same report with the verdict for another goal.

        Raises
        ------
        InputError
            The goal's k is not among those studied.
        """
        names = [layer.name for layer in self.layers]
        verdict = judge(names, self.results, self.settings.top_k, self.suggestions, goal)
        return replace(self, verdict=verdict)

    @property
    def formats(self) -> list[str]:
        """Names of the formats, in order."""
        return [each.name for each in self.settings.formats]

    @property
    def transforms(self) -> list[str]:
        """Labels of the transforms, in order."""
        return [each.label for each in self.settings.transforms]

    @property
    def overall(self) -> list[SettingResult]:
        """The results over all layers, by setting."""
        return self.of_layer(None)

    def of_layer(self, layer: str | None) -> list[SettingResult]:
        """The results of one layer, by setting."""
        return [result for result in self.results if result.layer == layer]

    def by_layer(self, format_name: str, transform: str) -> list[SettingResult]:
        """One setting's results, layer by layer."""
        return [
            result
            for result in self.results
            if result.layer is not None
            and (result.format, result.transform) == (format_name, transform)
        ]

    @property
    def leading_index(self) -> int:
        """Index in ``settings.top_k`` of the k to lead with: the suggestions', or the smallest."""
        top_k, suggested = self.settings.top_k, self.suggestions.k
        return top_k.index(min(top_k) if suggested is None else suggested)

    def _faults(self) -> Iterator[str]:
        """What is wrong with a report of the right types: lists that do not fit each other."""
        layers = [None, *(layer.name for layer in self.layers)]
        for name in ("layers", "settings.formats", "settings.transforms", "settings.top_k"):
            owner, _, field = name.rpartition(".")
            if not getattr(self.settings if owner else self, field):
                yield f"field {name} must not be empty"
        if [(each.layer, each.transform, each.format) for each in self.results] != [
            (layer, transform, name)
            for layer in layers
            for transform in self.transforms
            for name in self.formats
        ]:
            yield (
                "field results must have every setting over all layers, then for each layer, in "
                "the order of layers, settings.transforms and settings.formats"
            )
        if [(each.layer, each.transform) for each in self.blocks] != [
            (layer, transform) for layer in layers for transform in self.transforms
        ]:
            yield (
                "field blocks must have every transform over all layers, then for each layer, in "
                "the order of layers and settings.transforms"
            )
        if self.suggestions.k not in (None, *self.settings.top_k):
            yield "field suggestions.k must be one of settings.top_k, or null"
        for index, result in enumerate(self.results):
            for field, fault in self._faults_of(result):
                yield f"field results[{index}].{field} {fault}"

    def _faults_of(self, result: SettingResult) -> Iterator[tuple[str, str]]:
        top_k = self.settings.top_k
        if tuple(each.k for each in result.accuracy.top_k) != top_k:
            yield "accuracy.top_k", "must have one entry for each of settings.top_k"
        by_k: dict[str, Sequence[object]] = {
            "worst_layers": result.worst_layers,
            "no_better_than_chance": result.no_better_than_chance,
            **{
                f"by_length[{i}].{name}": getattr(each, name)
                for i, each in enumerate(result.by_length)
                for name in ("recall", "rows_longer_than_k")
            },
        }
        sizes: dict[str, tuple[Sequence[object], int]] = {
            name: (values, len(top_k)) for name, values in by_k.items()
        }
        sizes["error_counts"] = result.error_counts, 2 * self.settings.error_steps
        if result.channel_errors is not None:
            sizes["channel_errors"] = result.channel_errors, DIM
        for name, (values, size) in sizes.items():
            if len(values) != size:
                yield name, f"must have {size} entries, got {len(values)}"
