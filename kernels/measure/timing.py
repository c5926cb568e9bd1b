"""Times of calls: plain repeats on a CPU, and on a GPU CUDA graph replays and what surrounds them.

What is timed on a GPU is a list of calls that do the same work on different memory. Each is
captured into a graph of its own, and replay ``i`` uses graph ``i % n``, so that a call finds its
pages evicted from the L2 cache as long as the list touches more than twice the cache's size
(`rotations_for`).

A sample is the time between two CUDA events around one replay. Replays are queued in batches behind
a kernel that only waits, because the events would otherwise measure how fast Python launches. Even
so the pair of events and the start of a graph are in each sample, 2 to 3 us on an H200, as they are
in an engine that replays one call at a time. Several calls in a graph share that: then a sample is
the time of a replay divided by its calls, and says so.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sdsa_quant.errors import InputError

EAGER = "eager"
GRAPH = "graph"

_BATCH = 100  # replays queued at once; 3 launches each stay below the driver's queue of 1,024
_WAIT_CYCLES_PER_CALL = 40_000  # about 20 us at 2 GHz, above what the host needs to queue a replay
_COLD_FACTOR = 2  # distinct bytes between two uses of a page, in sizes of the L2 cache
_MAX_ROTATIONS = 512


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


@dataclass(frozen=True, slots=True)
class Rotation:
    """How cold a timing was."""

    calls: int  # distinct argument sets
    touched_bytes: int  # bytes of distinct memory that one round over them touches
    l2_bytes: int

    @property
    def cold(self) -> bool:
        """Whether a round touches more than twice the L2 cache, so that no page is found there."""
        return self.touched_bytes > _COLD_FACTOR * self.l2_bytes


def l2_bytes(device: torch.device) -> int:
    """Size of the device's L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def rotations_for(bytes_per_call: int, device: torch.device) -> int:
    """How many argument sets make a round touch more than twice the L2 cache, at most 512.

    One more than the division gives: a set that is used again right after a round of exactly that
    size could still find its last pages.
    """
    needed = _COLD_FACTOR * l2_bytes(device) // max(bytes_per_call, 1) + 2
    return min(needed, _MAX_ROTATIONS)


@functools.cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    """A stream of a device to capture on.

    `torch.cuda.graph` alone takes one stream for the whole process, of the device that captured
    first. What runs on another device is then not on it, and the graph is empty.
    """
    return torch.cuda.Stream(index)


def capture(*calls: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `calls` on the current device, one after another; each must have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=_capture_stream(torch.cuda.current_device())):
        for call in calls:
            call()
    return graph


def time_graph(
    calls: Sequence[Callable[[], object]],
    repeats: int,
    *,
    warmup_rounds: int = 1,
    calls_per_replay: int = 1,
    observe: Callable[[Callable[[], None]], object] | None = None,
    verify: Callable[[int, Callable[[], None]], object] | None = None,
) -> Timing:
    """Time `repeats` graph replays, taking the calls in turn.

    Parameters
    ----------
    calls : sequence of callables
        The same work on different memory, on the current device. Each is run once, then captured.
    repeats : int
        Replays to time. Warm-up replays and the capture do not count.
    warmup_rounds : int
        Rounds over all calls that are replayed first.
    calls_per_replay : int
        Calls in a graph; a sample is the time of a replay divided by it.
    observe : callable, optional
        Called before the first sample and after the last, with a function that replays every graph
        once: what it finds out is of a device that is at this work.
    verify : callable, optional
        Called for every graph after the last sample, with the index of the last call in the graph
        and a function that replays the graph and waits for it: raises where what it does is wrong.

    Raises
    ------
    ValueError
        `repeats` or `calls_per_replay` is less than 1 or `calls` is empty.
    """
    for name, number in (("repeats", repeats), ("calls_per_replay", calls_per_replay)):
        if number < 1:
            raise InputError(f"{name} must be at least 1, got {number}")
    if not calls:
        raise InputError("calls must hold at least one call, got none")
    for call in calls:
        call()
    torch.cuda.synchronize()
    # Round and round, until the graphs have used every call.
    turn = itertools.cycle(calls)
    graphs = [
        capture(*itertools.islice(turn, calls_per_replay))
        for _ in range(-(-len(calls) // calls_per_replay))
    ]

    def replay_all() -> None:
        for graph in graphs:
            graph.replay()

    for _ in range(warmup_rounds):
        replay_all()
    torch.cuda.synchronize()
    if observe is not None:
        observe(replay_all)
    samples: list[float] = []
    for first in range(0, repeats, _BATCH):
        batch = [graphs[i % len(graphs)] for i in range(first, min(first + _BATCH, repeats))]
        samples += _time_batch(batch)
    if observe is not None:
        observe(replay_all)
    if verify is not None:
        for index, graph in enumerate(graphs):
            last = ((index + 1) * calls_per_replay - 1) % len(calls)
            verify(last, functools.partial(_replay, graph))
    return Timing(GRAPH, tuple(sample / calls_per_replay for sample in samples))


def _replay(graph: torch.cuda.CUDAGraph) -> None:
    graph.replay()
    torch.cuda.synchronize()


def _time_batch(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in graphs
    ]
    # Events are created when first recorded; do that before the waiting kernel is queued.
    for begin, end in events:
        begin.record()
        end.record()
    torch.cuda.synchronize()
    torch.cuda._sleep(_WAIT_CYCLES_PER_CALL * len(graphs))
    for graph, (begin, end) in zip(graphs, events, strict=True):
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]


def host_overhead_us(call: Callable[[], object], *, repeats: int = 200) -> float:
    """Median host time of one eager call in microseconds, while the device does not hold it up."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    torch.cuda._sleep(_WAIT_CYCLES_PER_CALL * repeats)
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    return Timing(GRAPH, tuple(samples)).median_us


def first_call_seconds(call: Callable[[], object]) -> float:
    """Wall time of a call that may compile, less that of a second one, in seconds."""
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return max(times[0] - times[1], 0.0)
