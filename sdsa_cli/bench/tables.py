"""What `sdsa bench` shows on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdsa_cli.measurement import clock_words, measurement_remarks, share_text
from sdsa_cli.output import table
from sdsa_cli.table_data import TableData

from .document import BenchResult

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sdsa_kernels.measure.measurement import Measurement

_LINES_NAMED = 3  # of those that a remark is about


def bench_tables(results: Sequence[BenchResult]) -> list[RenderableType]:
    """What a terminal shows: the times, what is odd about them, and what stands beside a GPU's."""
    gpu = any(result.measurement.rotation is not None for result in results)
    parts: list[RenderableType] = [_times_table(results), *_remarks(results)]
    return [*parts, _roofs_table(results), *_reasons(results)] if gpu else parts


def _remarks(results: Sequence[BenchResult]) -> list[str]:
    """What is odd about single times."""
    return [
        f"{' '.join(_names(result))}: {remark}"
        for result in results
        for remark in measurement_remarks(result.measurement)
    ]


def _reasons(results: Sequence[BenchResult]) -> list[str]:
    """Why there is no time of other ways, and the clocks, each once with the lines it is about."""
    lines: dict[str, list[str]] = {}
    for result in results:
        name = f"{result.shape.name} {result.format_pair}"
        for what, answer in (("flashinfer", result.flashinfer), ("bmm", result.gather_bmm)):
            if isinstance(answer, str):
                lines.setdefault(f"{what} -: {answer}", []).append(name)
        lines.setdefault(f"SM clock {clock_words(result.measurement)}", []).append(name)
    return [f"{text} ({_several(names, len(results))})" for text, names in lines.items()]


def _several(names: Sequence[str], most: int) -> str:
    """The lines that something is about, the first few by name."""
    if len(names) == most:
        return "every line"
    different = list(dict.fromkeys(names))
    more = len(different) - _LINES_NAMED
    return ", ".join(different[:_LINES_NAMED]) + (f" and {more} more" if more > 0 else "")


def _times_table(results: Sequence[BenchResult]) -> TableData:
    backends = sorted({result.backend for result in results})
    several = len(backends) > 1
    names = ("shape", "formats", "backend") if several else ("shape", "formats")
    gpu = any(result.measurement.rotation is not None for result in results)
    shown = table(
        *names, "median us", "p10 us", "p90 us", "GB/s", *(["read share"] if gpu else []),
        title=None if several else f"Backend {backends[0]}",
        numbers_from=len(names),
    )  # fmt: skip
    for result in results:
        timing = result.measurement.timing
        shown.add_row(
            *_names(result)[: len(names)],
            *map(_microseconds, (timing.median_us, timing.p10_us, timing.p90_us)),
            _bandwidth(result.measurement),
            *([share_text(result.measurement.read_share)] if gpu else []),
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
        "shape", "formats", "roof us", "roof share", "host us", "first s", "flashinfer us",
        "bmm us",
        title="Beside: page-gather roof, eager call on the host, first call, other ways",
        numbers_from=2,
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
            _microseconds(result.flashinfer),
            _microseconds(result.gather_bmm),
        )
    return shown


def _names(result: BenchResult) -> tuple[str, str, str]:
    return result.shape.name, result.format_pair, result.backend


def _microseconds(time_us: float | str | None) -> str:
    """A time, ``-`` where there is none or the reason for that."""
    return f"{time_us:,.1f}" if isinstance(time_us, float) else "-"
