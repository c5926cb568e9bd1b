"""How a report shows a measured selection: the record and words that `score` and `bench` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sdsa_quant.errors import InputError
from sdsa_quant.layout import MAX_TOP_K

from .measurement import spread_remarks

if TYPE_CHECKING:
    from sdsa_kernels.measure.selected import SelectionMeasurement

SelectOption = Annotated[
    int | None,
    typer.Option(
        "--select",
        metavar="K",
        help=f"Also select each row's K first keys, 1 to {MAX_TOP_K:,}, as indexer_top_k does, and "
        f"time it.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionTimes:
    """What selecting takes; times are in microseconds, of what `replay` says."""

    replay: Literal["graph", "eager"]
    """``graph``: replays of a CUDA graph; ``eager``: plain repeats, as on a CPU."""
    repeats: int
    """Number of samples of each."""
    calls_per_replay: int
    """Calls in a graph; a sample is a replay's time divided by them."""
    scores_and_top_k_us: float
    """Median of ``indexer_top_k``: scores and selection, on pages as those of the scores alone."""
    scores_and_top_k_p10_us: float
    """Its tenth percentile."""
    scores_and_top_k_p90_us: float
    """Its ninetieth percentile."""
    top_k_us: float
    """Median of ``select_top_k`` on scores that exist, the same in every call."""
    top_k_p10_us: float
    """Its tenth percentile."""
    top_k_p90_us: float
    """Its ninetieth percentile."""
    remarks: tuple[str, ...]
    """What is odd about the times. Empty where nothing is."""


def check_select(given: int | None) -> int | None:
    """The number that ``--select`` was given, None where it was left out.

    Raises
    ------
    InputError
        It is not 1 to 65,535.
    """
    if given is not None and not 1 <= given <= MAX_TOP_K:
        raise InputError(f"--select must be 1 to {MAX_TOP_K:,}, got {given}")
    return given


def selection_fields(measured: SelectionMeasurement) -> dict[str, Any]:
    """The fields of a `SelectionTimes`, by name, for a record that has more."""
    both, alone = measured.scores_and_top_k, measured.select
    return {
        "replay": both.replay,
        "repeats": len(both.samples_us),
        "calls_per_replay": measured.calls_per_replay,
        "scores_and_top_k_us": both.median_us,
        "scores_and_top_k_p10_us": both.p10_us,
        "scores_and_top_k_p90_us": both.p90_us,
        "top_k_us": alone.median_us,
        "top_k_p10_us": alone.p10_us,
        "top_k_p90_us": alone.p90_us,
        "remarks": selection_remarks(measured),
    }


def selection_remarks(measured: SelectionMeasurement) -> tuple[str, ...]:
    """What a reader should know before believing the medians."""
    named = (("scores and top-k", measured.scores_and_top_k), ("top-k alone", measured.select))
    return tuple(f"{name}: {remark}" for name, each in named for remark in spread_remarks(each))
