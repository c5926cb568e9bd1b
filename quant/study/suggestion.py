"""Which setting a study speaks for, at each size of a key, and on what evidence.

Among settings of equal bytes per key the suggestion is the simplest one (fewest transforms, then
the order of the formats) whose recall is not measurably below the best: the mean of the paired
differences, row by row, is within two standard errors of zero. What it gains is measured against
the first setting of that size without a transform, in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from sdsa_quant.formats.transforms import NONE

from .settings import Setting
from .summary import StudySummary

BASELINE = "bf16"  # what the others are measured against, and no suggestion itself
STANDARD_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Recall of one setting less that of another, over the same rows."""

    mean: float
    standard_error: float | None  # None for a single row
    rows_better: int
    rows_worse: int
    rows: int

    @property
    def is_clear(self) -> bool:
        """Whether the mean is more than two standard errors from zero."""
        return self.standard_error is not None and (
            abs(self.mean) > STANDARD_ERRORS * self.standard_error
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a setting gains over the plain one of its size."""

    plain: Setting
    gain: Difference
    layers_better: int  # layers whose mean recall@k is above that of `plain`
    layers_worse: int


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The setting to take at one size, and why."""

    bytes_per_key: int
    candidates: int  # settings of this size
    setting: Setting
    k: int
    recall: float  # mean recall@k of its rows longer than k
    best: Setting  # of the highest mean recall at this size; may be the same
    evidence: Evidence | None  # None where the suggestion is the plain setting, or there is none


def suggest(summary: StudySummary) -> tuple[int | None, tuple[Suggestion, ...]]:
    """The k that the suggestions go by, and one suggestion for each size, smallest first.

    The k is the largest that most rows are longer than; without any such k there is no suggestion.
    """
    place = _telling_k(summary)
    if place is None:
        return None, ()
    k = summary.settings.top_k[place]
    telling = summary.row_lengths > k
    recalls = summary.row_recalls[:, telling, place]
    settings = summary.settings.settings
    valid = [
        index
        for index, setting in enumerate(settings)
        if setting.format.name != BASELINE and not bool(recalls[index].isnan().any())
    ]
    sizes = sorted({settings[index].format.bytes_per_key for index in valid})
    suggestions = [
        _suggest_one(
            summary,
            place,
            [index for index in valid if settings[index].format.bytes_per_key == size],
            recalls,
        )
        for size in sizes
    ]
    return k, tuple(suggestions)


def _telling_k(summary: StudySummary) -> int | None:
    counts = [int((summary.row_lengths > k).sum()) for k in summary.settings.top_k]
    most = summary.row_lengths.shape[0] / 2
    places = [place for place, count in enumerate(counts) if count > most]
    return max(places, key=lambda place: summary.settings.top_k[place], default=None)


def _suggest_one(
    summary: StudySummary, place: int, candidates: Sequence[int], recalls: torch.Tensor
) -> Suggestion:
    settings = summary.settings.settings
    means = {index: fmean(recalls[index].tolist()) for index in candidates}
    best = max(candidates, key=lambda index: means[index])
    simplest_first = sorted(candidates, key=lambda index: (_steps(settings[index]), index))
    chosen = next(
        index
        for index in simplest_first
        if index == best or not paired_difference(recalls[best], recalls[index]).is_clear
    )
    plain = next((index for index in candidates if _steps(settings[index]) == 0), chosen)
    return Suggestion(
        bytes_per_key=settings[chosen].format.bytes_per_key,
        candidates=len(candidates),
        setting=settings[chosen],
        k=summary.settings.top_k[place],
        recall=means[chosen],
        best=settings[best],
        evidence=None if plain == chosen else _evidence(summary, place, chosen, plain, recalls),
    )


def _steps(setting: Setting) -> int:
    """Transforms that a setting makes."""
    choice = setting.transform
    return sum(step != NONE for step in (choice.rotate, choice.gain, choice.center))


def _evidence(
    summary: StudySummary, place: int, chosen: int, plain: int, recalls: torch.Tensor
) -> Evidence:
    differences = []
    for of_layer in summary.by_layer:
        ours, theirs = (
            of_layer[index].accuracy.top_k[place].recall.mean for index in (chosen, plain)
        )
        if ours is not None and theirs is not None:
            differences.append(ours - theirs)
    return Evidence(
        plain=summary.settings.settings[plain],
        gain=paired_difference(recalls[chosen], recalls[plain]),
        layers_better=sum(difference > 0 for difference in differences),
        layers_worse=sum(difference < 0 for difference in differences),
    )


def paired_difference(ours: torch.Tensor, theirs: torch.Tensor) -> Difference:
    """Difference of two settings' recall over the same rows, float64 ``[rows]`` each."""
    differences = (ours - theirs).tolist()
    mean, count = fmean(differences), len(differences)
    standard_error = None
    if count > 1:
        variance = math.fsum((each - mean) ** 2 for each in differences) / (count - 1)
        standard_error = math.sqrt(variance / count)
    return Difference(
        mean=mean,
        standard_error=standard_error,
        rows_better=sum(each > 0 for each in differences),
        rows_worse=sum(each < 0 for each in differences),
        rows=count,
    )
