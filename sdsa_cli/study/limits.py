"""Limits that a study must keep (``--fail-below``), for use in continuous integration."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sdsa_quant.errors import CheckFailedError, InputError
from sdsa_quant.files.text import whole_number

if TYPE_CHECKING:
    from sdsa_quant.accuracy.summary import Statistic, Summary
    from sdsa_quant.study.report import StudyReport
    from sdsa_quant.study.results import SettingResult

_BY_K = ("recall", "mass")
_BY_ROW = ("cosine", "spearman")
_STATISTICS: dict[str, Statistic] = {
    "mean": "mean",
    "median": "median",
    "p1": "p1",
    "min": "minimum",
}
_FORM = re.compile(r"(?P<measure>[a-z]+)(?:@(?P<k>[0-9]{1,10}))?\.(?P<statistic>\w+)=(?P<least>.+)")


@dataclass(frozen=True, slots=True)
class Limit:
    """The least value that a measure may have over all layers, with every setting."""

    text: str
    measure: str
    k: int | None
    statistic: Statistic
    least: float

    def value_of(self, result: SettingResult) -> float | None:
        """The measure of one setting; None if it is undefined."""
        accuracy = result.accuracy
        owner = accuracy if self.k is None else next(e for e in accuracy.top_k if e.k == self.k)
        summary: Summary = getattr(owner, self.measure)
        return summary.statistic(self.statistic)


def parse_limits(texts: Sequence[str], top_k: Sequence[int]) -> list[Limit]:
    """Limits such as ``recall@2048.p1=0.95`` or ``cosine.min=0.99``.

    Raises
    ------
    InputError
        A text is not a limit, or its k is not among `top_k`.
    """
    return [_parse_limit(text, top_k) for text in texts]


def _parse_limit(text: str, top_k: Sequence[int]) -> Limit:
    match = _FORM.fullmatch(text)
    measure, statistic = (match["measure"], match["statistic"]) if match else ("", "")
    least = _number(match["least"]) if match else math.nan
    k = whole_number(match["k"]) if match and match["k"] else None
    known = measure in (_BY_K if k is not None else _BY_ROW)
    if not known or statistic not in _STATISTICS or math.isnan(least):
        raise InputError(
            f"--fail-below must be like recall@2048.p1=0.95: {' or '.join(_BY_K)} with @K, or "
            f"{' or '.join(_BY_ROW)}; .{', .'.join(_STATISTICS)}; a number; got {text!r}"
        )
    if k is not None and k not in top_k:
        raise InputError(
            f"--fail-below {text}: k must be one of --top-k "
            f"{','.join(str(each) for each in top_k)}, got {k}"
        )
    return Limit(text, measure, k, _STATISTICS[statistic], least)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def check_limits(report: StudyReport, limits: Sequence[Limit]) -> None:
    """Compare every setting, over all layers, with the limits.

    Raises
    ------
    CheckFailedError
        A value is below its limit, or undefined; the message names each.
    """
    failures = []
    for limit in limits:
        for result in report.overall:
            value = limit.value_of(result)
            if value is None or value < limit.least:
                found = _undefined(limit) if value is None else f"{value:.6g}"
                failures.append(f"{limit.text}: {found} with {result.label}")
    if failures:
        raise CheckFailedError("below the limit: " + "; ".join(failures))


def _undefined(limit: Limit) -> str:
    return "undefined" if limit.k is None else f"undefined, no row is longer than {limit.k},"


def check_validity(report: StudyReport) -> None:
    """Fail a study with rows that could not be measured, or that nothing can be learned from.

    Raises
    ------
    CheckFailedError
        A row has a score or a baseline score that is not finite, or one baseline score for all of
        its keys.
    """
    if report.rows_constant:
        raise CheckFailedError(
            f"{report.rows_constant:,} rows have one baseline score for all of their keys: the "
            f"keys or the query rows are constant, an error of the capture"
        )
    invalid = report.rows_invalid
    if invalid:
        settings = [result.label for result in report.overall if result.accuracy.rows_invalid]
        raise CheckFailedError(
            f"{invalid:,} rows have a score or baseline score that is not finite, with "
            f"{', '.join(settings)}"
        )
