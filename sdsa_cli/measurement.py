"""How a report shows a measured call: the record and words that `score` and `bench` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from sdsa_kernels.measure.measurement import Measurement
    from sdsa_kernels.measure.timing import Timing

_WIDE_SPREAD = 3.0  # p90 over p10, from which the median says little
LONGEST_US = 10_000  # shown in microseconds; what takes longer is in milliseconds


@dataclass(frozen=True, slots=True)
class RotationRecord:
    """How cold a timing was."""

    calls: int
    """Calls that replays took in turn, each on a copy of the pages."""
    touched_bytes: int
    """Bytes of all these pages."""
    l2_bytes: int
    """Bytes of the GPU's L2 cache."""


@dataclass(frozen=True, slots=True)
class ClocksRecord:
    """Clock of a GPU's multiprocessors around a timing, at the timed work."""

    before_mhz: int | None
    """MHz before the first sample; null where it is not known."""
    after_mhz: int | None
    """MHz after the last sample."""
    reason: str | None
    """Why the clock is not known, or null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRecord:
    """A measured call; times are in microseconds. What only a GPU has is null on a CPU."""

    replay: Literal["graph", "eager"]
    """``graph``: replays of a CUDA graph; ``eager``: plain repeats, as on a CPU."""
    repeats: int
    """Number of samples."""
    calls_per_replay: int
    """Calls in a graph; a sample is a replay's time divided by them."""
    median_us: float
    """Median of the samples."""
    p10_us: float
    """Tenth percentile of the samples."""
    p90_us: float
    """Ninetieth percentile of the samples."""
    samples_us: tuple[float, ...]
    """Every sample."""
    pages: int
    """Pages read; those of a request once for each of its groups."""
    key_bytes: int
    """Bytes of keys and scales moved by one call: whole pages."""
    query_bytes: int
    """Bytes of query rows moved by one call."""
    score_bytes: int
    """Bytes of scores written by one call, four for each score."""
    total_bytes: int
    """Bytes moved by one call."""
    gigabytes_per_second: float
    """`total_bytes` over the median, in 10^9 bytes a second."""
    cache_resident: bool | None
    """Whether the bandwidth is not the memory's: not cold, or above the read roof."""
    rotation: RotationRecord | None
    """How cold the timing was."""
    cold: bool | None
    """Whether the pages of all calls exceed twice the L2 cache."""
    gather_us: float | None
    """Median of the page-gather roof."""
    gather_share: float | None
    """`gather_us` over `median_us`: 1 is as fast as memory allows."""
    read_gigabytes_per_second: float | None
    """The read roof, in 10^9 bytes a second."""
    read_share: float | None
    """Bandwidth as a share of the read roof; null for what is cache-resident."""
    compile_seconds: float | None
    """Seconds of the first call less the second."""
    host_us: float | None
    """Host time of an eager call."""
    clocks: ClocksRecord | None
    """The GPU's clock before and after."""
    remarks: tuple[str, ...]
    """What is odd about the time: its spread, or a clock that fell. Empty where nothing is."""


def measurement_fields(measurement: Measurement) -> dict[str, Any]:
    """The fields of a `MeasurementRecord`, by name, for a record that has more."""
    timing, traffic, rotation = measurement.timing, measurement.traffic, measurement.rotation
    read = measurement.read_bytes_per_second
    return {
        "replay": timing.replay,
        "repeats": len(timing.samples_us),
        "calls_per_replay": measurement.calls_per_replay,
        "median_us": timing.median_us,
        "p10_us": timing.p10_us,
        "p90_us": timing.p90_us,
        "samples_us": timing.samples_us,
        "pages": traffic.pages,
        "key_bytes": traffic.key_bytes,
        "query_bytes": traffic.query_bytes,
        "score_bytes": traffic.score_bytes,
        "total_bytes": traffic.total_bytes,
        "gigabytes_per_second": measurement.gigabytes_per_second,
        "cache_resident": None if rotation is None else measurement.cache_resident,
        "rotation": None
        if rotation is None
        else RotationRecord(rotation.calls, rotation.touched_bytes, rotation.l2_bytes),
        "cold": None if rotation is None else rotation.cold,
        "gather_us": None if measurement.gather is None else measurement.gather.median_us,
        "gather_share": measurement.gather_share,
        "read_gigabytes_per_second": None if read is None else read / 1e9,
        "read_share": measurement.read_share,
        "compile_seconds": measurement.compile_seconds,
        "host_us": measurement.host_us,
        "clocks": None
        if measurement.clocks is None
        else ClocksRecord(
            measurement.clocks.before_mhz, measurement.clocks.after_mhz, measurement.clocks.reason
        ),
        "remarks": measurement_remarks(measurement),
    }


def measurement_remarks(measurement: Measurement) -> tuple[str, ...]:
    """What a reader should know before believing a median."""
    clocks = measurement.clocks
    remarks = spread_remarks(measurement.timing)
    if clocks is not None and clocks.fell:
        remarks.append(
            f"the SM clock fell from {clocks.before_mhz:,} to {clocks.after_mhz:,} MHz meanwhile: "
            f"the device was throttled"
        )
    return tuple(remarks)


def spread_remarks(timing: Timing) -> list[str]:
    """That the samples of a time differ too much to believe their median; empty where not."""
    if timing.p90_us <= _WIDE_SPREAD * timing.p10_us:
        return []
    spread = (
        f"{timing.p90_us / timing.p10_us:,.1f} times p10" if timing.p10_us else "above a p10 of 0"
    )
    return [f"p90 is {spread}: something else was at work or the clock moved; take the time again"]


def clock_words(measurement: Measurement) -> str:
    """The clock before and after: ``1,980 MHz before, 1,965 after``."""
    clocks = measurement.clocks
    if clocks is None or clocks.before_mhz is None or clocks.after_mhz is None:
        return f"unknown: {'not asked for' if clocks is None else clocks.reason}"
    return f"{clocks.before_mhz:,} MHz before, {clocks.after_mhz:,} after"


def cache_words(measurement: Measurement) -> str:
    """Where the pages came from: ``cold``, or ``cache-resident`` and why."""
    rotation = measurement.rotation
    if rotation is None:
        return "-"
    if not measurement.cache_resident:
        return "cold"
    if not rotation.cold:
        return "cache-resident (warm)"
    return "cache-resident (above the read roof)"


def rotation_words(measurement: Measurement) -> str:
    """How cold a timing was, in a sentence."""
    rotation = measurement.rotation
    if rotation is None:
        return "no graph on a CPU: plain repeats"
    calls = "1 call" if rotation.calls == 1 else f"{rotation.calls} calls in turn"
    against = "more" if rotation.cold else "not more"
    return (
        f"{cache_words(measurement)}: {calls} on {rotation.touched_bytes:,} bytes of pages, "
        f"{against} than twice the L2 cache's {rotation.l2_bytes:,}"
    )


def share_text(share: float | None) -> str:
    """A share of a roof, ``0.87``, or ``-``."""
    return "-" if share is None else f"{share:.2f}"
