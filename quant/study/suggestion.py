"""Which setting a study suggests at each size of a key, and on what evidence.

Among settings of equal bytes per key the suggestion is the simplest one (fewest transforms, then
the order of the formats) whose recall is not measurably below the best: the mean of the paired
differences, row by row, is within two standard errors of zero. What it gains is measured against
the first setting of that size without a transform, in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import torch

from sdsa_quant.formats.transforms import NONE

from .results import Difference, Evidence, Suggestion, Suggestions
from .settings import Setting
from .summary import StudySummary

BASELINE = "bf16"  # what the others are measured against, and never suggested itself


def suggest(summary: StudySummary) -> Suggestions:
    """The k that the suggestions are based on, and one suggestion for each size, smallest first.

    The k is the largest that most rows are longer than; without such a k there is no suggestion.
    """
    k_index = _telling_k(summary)
    if k_index is None:
        return Suggestions(None, ())
    k = summary.settings.top_k[k_index]
    telling = summary.row_tells[:, k_index]
    recalls = summary.row_recalls[:, telling, k_index]
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
            k_index,
            [index for index in valid if settings[index].format.bytes_per_key == size],
            recalls,
        )
        for size in sizes
    ]
    return Suggestions(k, tuple(suggestions))


def _telling_k(summary: StudySummary) -> int | None:
    counts = summary.row_tells.sum(dim=0).tolist()
    most = summary.row_tells.shape[0] / 2
    indices = [index for index, count in enumerate(counts) if count > most]
    return max(indices, key=lambda index: summary.settings.top_k[index], default=None)


def _suggest_one(
    summary: StudySummary, k_index: int, candidates: Sequence[int], recalls: torch.Tensor
) -> Suggestion:
    settings = summary.settings.settings
    units = summary.row_units[summary.row_tells[:, k_index]]
    means = {index: fmean(recalls[index].tolist()) for index in candidates}
    best = max(candidates, key=lambda index: means[index])
    simplest_first = sorted(candidates, key=lambda index: (_steps(settings[index]), index))
    chosen = next(
        index
        for index in simplest_first
        if index == best or not paired_difference(recalls[best], recalls[index], units).is_clear
    )
    plain = next((index for index in candidates if _steps(settings[index]) == 0), chosen)
    return Suggestion(
        format=settings[chosen].format.name,
        transform=settings[chosen].transform.label,
        bytes_per_key=settings[chosen].format.bytes_per_key,
        candidates=len(candidates),
        recall=means[chosen],
        best=settings[best].info,
        evidence=None if plain == chosen else _evidence(summary, k_index, chosen, plain, recalls),
    )


def _steps(setting: Setting) -> int:
    """Transforms that a setting makes."""
    choice = setting.transform
    return sum(step != NONE for step in (choice.rotate, choice.gain, choice.center))


def _evidence(
    summary: StudySummary, k_index: int, chosen: int, plain: int, recalls: torch.Tensor
) -> Evidence:
    differences = []
    for of_layer in summary.by_layer:
        ours, theirs = (
            of_layer[index].accuracy.top_k[k_index].recall.mean for index in (chosen, plain)
        )
        if ours is not None and theirs is not None:
            differences.append(ours - theirs)
    units = summary.row_units[summary.row_tells[:, k_index]]
    gain = paired_difference(recalls[chosen], recalls[plain], units)
    return Evidence(
        plain=summary.settings.settings[plain].info,
        gain=gain,
        is_clear=gain.is_clear,
        layers_better=sum(difference > 0 for difference in differences),
        layers_worse=sum(difference < 0 for difference in differences),
    )


def paired_difference(ours: torch.Tensor, theirs: torch.Tensor, units: torch.Tensor) -> Difference:
    """Difference of two settings' recall over the same rows.

    Rows of one request see the same keys, and are no more independent than they are different: the
    variance of the mean is that of the sums over each request (Liang and Zeger 1986, for a mean),

        C / (C - 1) * sum over requests of (sum over its rows of (d - mean))^2 / n^2.

    With a single request, which says nothing of others, its rows count each for itself.

    Parameters
    ----------
    ours, theirs : torch.Tensor
        float64 ``[rows]`` each.
    units : torch.Tensor
        int64 ``[rows]``: the layer and request of each row, one number for each.
    """
    differences = (ours - theirs).tolist()
    mean, count = fmean(differences), len(differences)
    requests = len(set(units.tolist()))
    of_unit: dict[int, list[float]] = {}
    for unit, each in zip(
        units.tolist() if requests > 1 else range(count), differences, strict=True
    ):
        of_unit.setdefault(unit, []).append(each - mean)
    standard_error = None
    if len(of_unit) > 1:
        squares = math.fsum(math.fsum(each) ** 2 for each in of_unit.values())
        standard_error = math.sqrt(squares * len(of_unit) / (len(of_unit) - 1)) / count
    return Difference(
        mean=mean,
        standard_error=standard_error,
        requests=requests,
        rows_better=sum(each > 0 for each in differences),
        rows_worse=sum(each < 0 for each in differences),
        rows=count,
    )
