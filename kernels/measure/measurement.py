"""Measure one scoring call on its device: graph replays beside both roofs, or plain repeats.

On a GPU: `timing` for the calls, `roofs` for what memory allows, and on lines of their own
what a replay leaves out, the seconds of the first call and the host time of an eager one. On a CPU
there is no graph and no roof, only the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sdsa_kernels.problem import ScoreProblem
from sdsa_kernels.scores import indexer_scores

from .timing import (
    Rotation,
    Timing,
    first_call_seconds,
    host_overhead_us,
    l2_bytes,
    time_eager,
    time_graph,
)
from .traffic import Traffic

_GATHER_REPEATS = 50


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a call takes, and what it could take; everything after `traffic` is None on a CPU."""

    timing: Timing
    traffic: Traffic
    calls_per_replay: int
    rotation: Rotation | None
    gather: Timing | None  # the page-gather roof
    read_bytes_per_second: float | None
    compile_seconds: float | None
    host_us: float | None

    @property
    def gigabytes_per_second(self) -> float:
        """Bandwidth by the bytes model, 10^9 bytes per second."""
        return self.traffic.gigabytes_per_second(self.timing.median_us)

    @property
    def gather_share(self) -> float | None:
        """The page-gather roof's time as a share of the call's: 1 is as fast as memory allows."""
        return None if self.gather is None else self.gather.median_us / self.timing.median_us

    @property
    def read_share(self) -> float | None:
        """Bandwidth as a share of the read roof; None for what a cache served."""
        if self.read_bytes_per_second is None or self.cache_resident:
            return None
        return self.gigabytes_per_second * 1e9 / self.read_bytes_per_second

    @property
    def cache_resident(self) -> bool:
        """Whether the bandwidth is not the memory's: hot calls, or more than memory can give."""
        if self.rotation is None or self.read_bytes_per_second is None:
            return False
        above = self.gigabytes_per_second * 1e9 > self.read_bytes_per_second
        return above or not self.rotation.cold


def measure_problems(
    problems: Sequence[ScoreProblem],
    traffic: Traffic,
    repeats: int,
    *,
    backend: str = "auto",
    calls_per_replay: int = 1,
) -> Measurement:
    """Measure `indexer_scores` over a rotation of problems: the same work on different pages.

    Parameters
    ----------
    problems : sequence of ScoreProblem
        The rotation, all on one device. Their scores are overwritten.
    traffic : Traffic
        Bytes of one call.
    repeats : int
        Samples to take.
    backend : str
        As `indexer_scores` takes it.
    calls_per_replay : int
        Calls in a graph, on a GPU.
    """
    calls = [scoring_call(problem, backend) for problem in problems]
    device = problems[0].device
    if device.type != "cuda":
        return measure_on_the_cpu(calls[0], traffic, repeats)
    from sdsa_kernels.device import device_index

    from .roofs import read_roof_bytes_per_second, time_page_gather

    with torch.cuda.device(device):
        compile_seconds = first_call_seconds(calls[0])
        timing = time_graph(calls, repeats, calls_per_replay=calls_per_replay)
        host_us = host_overhead_us(calls[0])
        gather = time_page_gather(problems, _GATHER_REPEATS, calls_per_replay=calls_per_replay)
        read = read_roof_bytes_per_second(device_index(device))
    rotation = Rotation(len(problems), len(problems) * traffic.key_bytes, l2_bytes(device))
    return Measurement(
        timing, traffic, calls_per_replay, rotation, gather, read, compile_seconds, host_us
    )


def measure_on_the_cpu(call: Callable[[], object], traffic: Traffic, repeats: int) -> Measurement:
    """Time plain repeats of a call; a CPU has no graph, and no roof is measured there."""
    return Measurement(time_eager(call, repeats), traffic, 1, None, None, None, None, None)


def scoring_call(problem: ScoreProblem, backend: str) -> Callable[[], None]:
    """`indexer_scores` on the tensors of a checked problem."""
    query, key_cache, table, lengths, requests, scores, query_scales, key_scales = problem.call()

    def call() -> None:
        indexer_scores(
            query,
            key_cache,
            table,
            lengths,
            requests=requests,
            scores=scores,
            query_scales=query_scales,
            key_scales=key_scales,
            backend=backend,
        )

    return call
