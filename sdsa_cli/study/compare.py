"""`sdsa compare`: what changed between two studies, for readers and for continuous integration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sdsa_cli.options import ForceFlag, JsonFlag, ReportOption, examples
from sdsa_cli.output import report_sink, table
from sdsa_cli.table_data import TableData
from sdsa_quant.errors import CheckFailedError, InputError
from sdsa_quant.files.typed_json import to_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sdsa_quant.accuracy.summary import Statistic
    from sdsa_quant.study.report import StudyReport

COMMAND = "compare"
EXAMPLES = examples(
    "sdsa compare before/report.json after/report.json",
    "sdsa compare before/ after/ --tolerance 0.005",
)
_STATISTICS: tuple[Statistic, ...] = ("mean", "p1", "minimum")
_CHANGES_SHOWN = 40
_SETTINGS_NAMED = 6
_BEYOND = " *"
_ROWS = "rows longer than "  # of the measure, before its k
_SAMPLING_OPTIONS = ("causal", "lengths", "requests", "rows_per_group", "positions")

Key = tuple[str, str, str]  # layer ("" for all), setting, measure


@dataclass(frozen=True, slots=True)
class Change:
    """A value that differs between two studies; None if a study does not have it."""

    layer: str | None
    setting: str
    measure: str
    before: float | None
    after: float | None

    @property
    def size(self) -> float:
        """How far apart the values are; infinite for rows, and if only one study has a value."""
        if self.difference is None or self.is_of_rows:
            return float("inf")
        return abs(self.difference)

    @property
    def is_of_rows(self) -> bool:
        """Whether a number of rows has changed: other rows were measured."""
        return self.measure.startswith(_ROWS)

    @property
    def difference(self) -> float | None:
        """B less A; None if only one study has a value."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before

    @property
    def direction(self) -> Literal["better", "worse", "more", "fewer", "new", "gone"]:
        """``better``, ``worse``, ``more`` or ``fewer`` rows, ``new`` or ``gone``."""
        if self.before is None:
            return "new"
        if self.after is None:
            return "gone"
        if self.is_of_rows:
            return "more" if self.after > self.before else "fewer"
        return "better" if self.after > self.before else "worse"


@dataclass(frozen=True, slots=True)
class ReportedChange:
    """A change in the document of a comparison."""

    layer: str | None
    """The layer; null for all layers."""

    setting: str
    """The setting's short name."""

    measure: str
    """What changed, such as ``recall@64.mean``."""

    before: float | None
    """Its value in A; null if A does not have it."""

    after: float | None
    """Its value in B; null if B does not have it."""

    direction: Literal["better", "worse", "more", "fewer", "new", "gone"]
    """Which way it changed (rows: more or fewer), or which study alone has it."""

    beyond_tolerance: bool
    """Whether the change is larger than the tolerance."""


@dataclass(frozen=True, slots=True)
class ComparisonReport:
    """What changed between two studies."""

    schema: Literal["sdsa.compare/1"]
    """Which document this is, and the version of its fields."""

    command: Literal["compare"]
    """The command that makes such documents."""

    before: Path
    """Study A, as it was given."""

    after: Path
    """Study B, as it was given."""

    tolerance: float
    """The largest change that still passes."""

    changes: tuple[ReportedChange, ...]
    """Every recall, mass and number of rows longer than k that differs, the largest first."""

    changes_beyond_tolerance: int
    """How many of them are larger than the tolerance."""


def compare(
    before: Annotated[
        Path, typer.Argument(metavar="A", help="A study's report.json, or its folder.")
    ],
    after: Annotated[Path, typer.Argument(metavar="B", help="The study to compare with it.")],
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            help="The largest change, up or down, of a recall or a mass that still passes.",
        ),
    ] = 0.0,
    json: JsonFlag = False,
    report: ReportOption = None,
    force: ForceFlag = False,
) -> None:
    """Show what changed from study A to study B; exit with 1 if a change is beyond the tolerance.

    Recall and mass of every layer, setting and k are compared over the rows longer than k: mean,
    worst 1 % and worst row. Another number of such rows, and a layer, a setting or a k that only
    one of the two has, count as a change beyond any tolerance. Where no row is longer than any k
    nothing can be compared, and the exit code is 1 too.
    """
    if not 0 <= tolerance < math.inf:
        raise InputError(f"--tolerance must be 0 or more, and finite; got {tolerance}")
    from sdsa_quant.study.report import StudyReport

    sink = report_sink(json, report, force=force)
    _refuse_inputs(sink.report_file, (before, after))
    reports = StudyReport.read(before), StudyReport.read(after)
    changes = find_changes(*reports)
    beyond = [change for change in changes if change.size > tolerance]
    document = ComparisonReport(
        schema="sdsa.compare/1",
        command="compare",
        before=before,
        after=after,
        tolerance=tolerance,
        changes=tuple(_reported(change, tolerance) for change in changes),
        changes_beyond_tolerance=len(beyond),
    )
    unmeasured = _unmeasured(*reports)
    sink.publish(
        document,
        *_describe_inputs(*reports),
        *(f"Nothing to compare at k = {k:,}: no row is longer." for k in unmeasured),
        *_tables(changes, tolerance),
    )
    if unmeasured and len(unmeasured) == len(reports[0].settings.top_k):
        raise CheckFailedError("nothing could be compared: no row is longer than any k")
    if beyond:
        largest = beyond[0]
        raise CheckFailedError(
            f"{len(beyond)} of {len(changes)} changes are beyond the tolerance of {tolerance:g}; "
            f"the largest is {largest.measure} with {largest.setting} in "
            f"{largest.layer or 'all layers'}, {_shown(largest, largest.before)} to "
            f"{_shown(largest, largest.after)}"
        )


def _refuse_inputs(report_file: Path | None, studies: tuple[Path, ...]) -> None:
    from sdsa_quant.study.report import REPORT_NAME

    inputs = [study / REPORT_NAME if study.is_dir() else study for study in studies]
    if report_file is None or not report_file.exists():
        return
    if any(each.exists() and report_file.samefile(each) for each in inputs):
        raise InputError(f"{report_file}: is the input and cannot be the output too")


def _unmeasured(before: StudyReport, after: StudyReport) -> list[int]:
    """The k of the first study that no row of either is longer than."""
    rows = {
        of_k.k: of_k.rows_longer_than_k
        for report in (before, after)
        for result in report.overall
        for of_k in result.accuracy.top_k
        if of_k.rows_longer_than_k
    }
    return [k for k in before.settings.top_k if k not in rows]


def find_changes(before: StudyReport, after: StudyReport) -> list[Change]:
    """Every value that differs, the largest change first."""
    ours, theirs = dict(_values(before)), dict(_values(after))
    changes = [
        Change(key[0] or None, key[1], key[2], ours.get(key), theirs.get(key))
        for key in (*ours, *(key for key in theirs if key not in ours))
        if ours.get(key) != theirs.get(key)
    ]
    return sorted(changes, key=lambda change: -change.size)


def _values(report: StudyReport) -> Iterator[tuple[Key, float | None]]:
    for result in report.results:
        for of_k in result.accuracy.top_k:
            rows = result.layer or "", result.label, f"{_ROWS}{of_k.k}"
            yield rows, float(of_k.rows_longer_than_k)
            for measure, summary in (("recall", of_k.recall), ("mass", of_k.mass)):
                for statistic in _STATISTICS:
                    name = f"{measure}@{of_k.k}.{statistic}"
                    yield (result.layer or "", result.label, name), summary.statistic(statistic)


def _reported(change: Change, tolerance: float) -> ReportedChange:
    return ReportedChange(
        layer=change.layer,
        setting=change.setting,
        measure=change.measure,
        before=change.before,
        after=change.after,
        direction=change.direction,
        beyond_tolerance=change.size > tolerance,
    )


def _tables(changes: list[Change], tolerance: float) -> list[RenderableType]:
    if not changes:
        return ["No recall, no mass and no number of rows differs."]
    moved = [change for change in changes if change.difference is not None]
    lines: list[RenderableType] = []
    if moved:
        lines.append(_moved_table(moved[:_CHANGES_SHOWN], tolerance))
    if any(change.size > tolerance for change in moved):
        lines.append(f"{_BEYOND.strip()} beyond the tolerance of {tolerance:g}")
    if len(moved) > _CHANGES_SHOWN:
        lines.append(f"and {len(moved) - _CHANGES_SHOWN} smaller changes; --json lists them all")
    for study, direction in (("A", "gone"), ("B", "new")):
        alone = [change for change in changes if change.direction == direction]
        if alone:
            lines.append(f"Only in {study}: {len(alone)} values, of {_name_settings(alone)}")
    return lines


def _moved_table(changes: list[Change], tolerance: float) -> TableData:
    result = table(
        "layer", "setting", "measure", "A", "B", "change", "", numbers_from=3, text=("",),
        shortens="layer",
    )  # fmt: skip
    for change in changes:
        result.add_row(
            change.layer or "all",
            change.setting,
            change.measure.replace("minimum", "min"),
            _shown(change, change.before),
            _shown(change, change.after),
            f"{change.difference:+.0f}" if change.is_of_rows else f"{change.difference:+.5f}",
            change.direction + (_BEYOND if change.size > tolerance else ""),
        )
    return result


def _name_settings(changes: list[Change]) -> str:
    """The layers and settings that only one study has, the first few by name."""
    names = list(dict.fromkeys(f"{each.layer or 'all layers'} {each.setting}" for each in changes))
    more = f" and {len(names) - _SETTINGS_NAMED} more" if len(names) > _SETTINGS_NAMED else ""
    return "; ".join(names[:_SETTINGS_NAMED]) + more


def _describe_inputs(before: StudyReport, after: StudyReport) -> list[str]:
    """One line for each option that the studies were made with differently."""
    ours, theirs = to_json(before.inputs), to_json(after.inputs)
    return [
        f"Made differently: {name} was {ours[name]} in A, {theirs[name]} in B"
        for name in _SAMPLING_OPTIONS
        if ours[name] != theirs[name]
    ]


def _shown(change: Change, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if change.is_of_rows else f"{value:.5f}"
