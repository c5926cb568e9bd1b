"""Measure one scoring call on its device: graph replays beside both roofs, or plain repeats.

On a GPU: `timing` for the calls, `roofs` for what memory allows, and on lines of their own
what a replay leaves out, the seconds of the first call and the host time of an eager one. On a CPU
there is no graph and no roof, only the time.

No time is given of what did not write the scores of a plain call (`written`), nor one in which no
cache could have moved the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sdsa_kernels.device import device_index, load_bytes_per_second
from sdsa_kernels.problem import ScoreProblem
from sdsa_kernels.scores import indexer_scores
from sdsa_kernels.testing.compare import UNTOUCHED
from sdsa_quant.errors import CheckFailedError

from .clocks import Clocks, ClockWatch
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
from .written import compare_written, plain_scores, require_written

_GATHER_REPEATS = 50
_WARMUP = 3  # plain calls that do not count


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
    clocks: Clocks | None = None

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
    check: Callable[[ScoreProblem], object] | None = None,
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
    check : callable, optional
        Called with a problem whose scores a timed call or replay has just written: for every graph
        with the last of its calls. Raises where they are wrong.

    Raises
    ------
    CheckFailedError
        What was timed did not write the scores of a plain call, or a time is impossible.
    """
    calls = [scoring_call(problem, backend) for problem in problems]
    device = problems[0].device
    if device.type != "cuda":
        return measure_on_the_cpu(calls[0], traffic, repeats, problem=problems[0], check=check)

    from .roofs import read_roof_bytes_per_second, time_page_gather

    watch = ClockWatch(device)
    with torch.cuda.device(device):
        compile_seconds = first_call_seconds(calls[0])
        expected = [plain_scores(*each) for each in zip(problems, calls, strict=True)]

        def verify(index: int, replay: Callable[[], None]) -> None:
            require_written(problems[index], replay, expected[index])
            if check is not None:
                check(problems[index])

        timing = time_graph(
            calls, repeats, calls_per_replay=calls_per_replay, observe=watch, verify=verify
        )
        require_possible(timing, traffic, load_bytes_per_second(device))
        host_us = host_overhead_us(calls[0])
        gather = time_page_gather(problems, _GATHER_REPEATS, calls_per_replay=calls_per_replay)
        read = read_roof_bytes_per_second(device_index(device))
    rotation = Rotation(len(problems), len(problems) * traffic.key_bytes, l2_bytes(device))
    return Measurement(
        timing,
        traffic,
        calls_per_replay,
        rotation,
        gather,
        read,
        compile_seconds,
        host_us,
        watch.clocks,
    )


def measure_on_the_cpu(
    call: Callable[[], object],
    traffic: Traffic,
    repeats: int,
    *,
    problem: ScoreProblem,
    check: Callable[[ScoreProblem], object] | None = None,
    shared: bool = False,
) -> Measurement:
    """Time plain repeats of a call; a CPU has no graph, and no roof is measured there.

    Parameters
    ----------
    call : callable
        What to time.
    traffic : Traffic
        Bytes of one call.
    repeats : int
        Samples to take.
    problem : ScoreProblem
        What the call leaves the scores of.
    check : callable, optional
        Called with it after the last repeat. Raises where its scores are wrong.
    shared : bool
        Whether other calls write to the same scores, and so past the lengths of this one.

    Raises
    ------
    CheckFailedError
        The repeats did not leave the scores of a plain call, or their time is impossible.
    """
    expected = plain_scores(problem, call, past=not shared)
    for _ in range(_WARMUP):
        call()
    problem.scores.fill_(UNTOUCHED)
    timing = time_eager(call, repeats, warmup=0)
    compare_written(problem, expected, past=not shared)
    if check is not None:
        check(problem)
    require_possible(timing, traffic, load_bytes_per_second(problem.device))
    return Measurement(timing, traffic, 1, None, None, None, None, None)


def require_possible(timing: Timing, traffic: Traffic, most: float) -> None:
    """Refuse a time in which the bytes cannot have been moved.

    Parameters
    ----------
    timing : Timing
        Of one call.
    traffic : Traffic
        Bytes of one call.
    most : float
        Bytes a second that no cache exceeds.

    Raises
    ------
    CheckFailedError
        The bandwidth is above `most`.
    """
    rate = traffic.gigabytes_per_second(timing.median_us) * 1e9
    if rate > most:
        raise CheckFailedError(
            f"a median of {timing.median_us:.4g} us for {traffic.total_bytes:,} bytes is "
            f"{rate / 1e9:,.0f} GB/s, more than any cache of the device can serve "
            f"({most / 1e9:,.0f}): the clock is wrong, or the work was not done"
        )


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
