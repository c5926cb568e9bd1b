"""How long a call takes: the samples, and what a report says of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sdsa_quant.errors import InputError

EAGER = "eager"
GRAPH = "graph"


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one call in microseconds; `replay` is ``"eager"`` or ``"graph"``."""

    replay: str
    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Half of the samples are below it."""
        return self.quantile_us(0.5)

    @property
    def p10_us(self) -> float:
        """One sample in ten is below it."""
        return self.quantile_us(0.1)

    @property
    def p90_us(self) -> float:
        """One sample in ten is above it."""
        return self.quantile_us(0.9)

    def quantile_us(self, fraction: float) -> float:
        """Quantile of the samples, linear between neighbours."""
        ordered = sorted(self.samples_us)
        position = fraction * (len(ordered) - 1)
        below = int(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def time_eager(call: Callable[[], object], repeats: int, *, warmup: int = 3) -> Timing:
    """Wall time of `repeats` plain calls after `warmup` calls that do not count.

    For work on a CPU: a CUDA call returns before its kernel ends.

    Raises
    ------
    ValueError
        `repeats` is less than 1.
    """
    if repeats < 1:
        raise InputError(f"repeats must be at least 1, got {repeats}")
    for _ in range(warmup):
        call()
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    return Timing(EAGER, tuple(samples))
