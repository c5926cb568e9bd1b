"""How a report shows a measured call: the JSON fields and words that `score` and `bench` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdsa_kernels.measure.measurement import Measurement

LONGEST_US = 10_000  # shown in microseconds; what takes longer is in milliseconds


def measurement_fields(measurement: Measurement) -> dict[str, Any]:
    """Fields of a measurement; those that only a GPU has are null on a CPU."""
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
        "rotation": rotation,
        "cold": None if rotation is None else rotation.cold,
        "gather_us": None if measurement.gather is None else measurement.gather.median_us,
        "gather_share": measurement.gather_share,
        "read_gigabytes_per_second": None if read is None else read / 1e9,
        "read_share": measurement.read_share,
        "compile_seconds": measurement.compile_seconds,
        "host_us": measurement.host_us,
    }


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
