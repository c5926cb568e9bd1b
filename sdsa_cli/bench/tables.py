"""What `sdsa bench` shows on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdsa_cli.measurement import share_text
from sdsa_cli.output import table
from sdsa_cli.table_data import TableData

from .document import BenchResult

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sdsa_kernels.measure.measurement import Measurement


def bench_tables(results: Sequence[BenchResult]) -> list[RenderableType]:
    """What a terminal shows: the times, and on a GPU what stands beside them."""
    gpu = any(result.measurement.rotation is not None for result in results)
    return [_times_table(results), _roofs_table(results)] if gpu else [_times_table(results)]


def _times_table(results: Sequence[BenchResult]) -> TableData:
    backends = sorted({result.backend for result in results})
    several = len(backends) > 1
    names = ("shape", "formats", "backend") if several else ("shape", "formats")
    shown = table(
        *names, "median us", "p10", "p90", "GB/s", "of read",
        title=None if several else f"Backend {backends[0]}",
        numbers_from=len(names),
        style="grid",
    )  # fmt: skip
    for result in results:
        timing = result.measurement.timing
        shown.add_row(
            *_names(result)[: len(names)],
            *map(_microseconds, (timing.median_us, timing.p10_us, timing.p90_us)),
            _bandwidth(result.measurement),
            share_text(result.measurement.read_share),
        )
    return shown


def _bandwidth(measurement: Measurement) -> str:
    """The memory's bandwidth, or that a cache served the call."""
    if measurement.cache_resident:
        return "cache-resident"
    return f"{measurement.gigabytes_per_second:,.4g}"


def _roofs_table(results: Sequence[BenchResult]) -> TableData:
    """What stands beside a GPU's times."""
    shown = table(
        "shape", "formats", "roof us", "of roof", "host us", "first s", "flashinfer", "bmm",
        title="Beside: page-gather roof, eager call on the host, first call, other ways in us",
        numbers_from=2, style="grid",
    )  # fmt: skip
    for result in results:
        measurement = result.measurement
        seconds, gather = measurement.compile_seconds, measurement.gather
        shown.add_row(
            *_names(result)[:2],
            _microseconds(None if gather is None else gather.median_us),
            share_text(measurement.gather_share),
            _microseconds(measurement.host_us),
            "-" if seconds is None else f"{seconds:.2f}",
            _microseconds(result.flashinfer_us),
            _microseconds(result.gather_bmm_us),
        )
    return shown


def _names(result: BenchResult) -> tuple[str, str, str]:
    return result.shape.name, result.format_pair, result.backend


def _microseconds(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us:,.1f}"
