"""Graph timing, rotation and roofs, measured on a GPU."""

from __future__ import annotations

import pytest
import torch

from sdsa_kernels.checks import check_scores_call
from sdsa_kernels.measure.measurement import measure_problems
from sdsa_kernels.measure.roofs import read_roof_bytes_per_second, time_page_gather
from sdsa_kernels.measure.timing import (
    Rotation,
    capture,
    first_call_seconds,
    host_overhead_us,
    l2_bytes,
    rotations_for,
    time_graph,
)
from sdsa_kernels.measure.traffic import score_traffic
from sdsa_kernels.problem import ScoreCall, ScoreProblem
from sdsa_quant.errors import InputError
from support.problems import KINDS, UNTOUCHED, assert_scores, make_problem

pytestmark = [pytest.mark.gpu, pytest.mark.timing, pytest.mark.xdist_group("timing")]


def checked(kind: str, lengths: list[int]) -> ScoreProblem:
    problem = make_problem(lengths, generator=torch.Generator().manual_seed(1), kind=kind)
    arguments = vars(problem.to("cuda"))
    return check_scores_call(ScoreCall(**arguments))


def test_samples_are_replays_and_not_launches() -> None:
    # A 1 GiB fill takes hundreds of microseconds, an empty one a few: neither is Python's time.
    big = torch.empty(1 << 28, device="cuda")
    small = torch.empty(1, device="cuda")
    long = time_graph([lambda: big.fill_(1.0)], 30)
    short = time_graph([lambda: small.fill_(1.0)], 130)
    assert len(long.samples_us) == 30
    assert len(short.samples_us) == 130
    assert long.replay == "graph"
    assert long.median_us > 150
    assert 0 < short.median_us < 8
    assert long.p10_us <= long.median_us <= long.p90_us


def test_rotation_takes_calls_in_turn() -> None:
    counts = torch.zeros(3, device="cuda")
    calls = [lambda i=i: counts[i : i + 1].add_(1.0) for i in range(3)]
    time_graph(calls, 7, warmup_rounds=2)
    # once eagerly, twice in the warm-up, then replays 0 to 6
    assert counts.tolist() == [6.0, 5.0, 5.0]


def test_several_calls_share_a_replay() -> None:
    counts = torch.zeros(3, device="cuda")
    calls = [lambda i=i: counts[i : i + 1].add_(1.0) for i in range(3)]
    timing = time_graph(calls, 3, calls_per_replay=2)
    # once eagerly; graphs (0, 1) and (2, 0), each once to warm up, then replays 0, 1, 0
    assert counts.tolist() == [1 + 2 + 3, 1 + 1 + 2, 1 + 1 + 1]
    assert len(timing.samples_us) == 3


def test_rotations_exceed_twice_the_cache() -> None:
    device = torch.device("cuda", 0)
    size = l2_bytes(device)
    for bytes_per_call in (1 << 20, size, 3 * size):
        count = rotations_for(bytes_per_call, device)
        rotation = Rotation(count, count * bytes_per_call, size)
        assert rotation.cold
        assert count >= 2
    assert not Rotation(1, 1 << 20, size).cold
    assert not Rotation(4, 4 << 20, size).cold


@pytest.mark.parametrize("kind", KINDS)
def test_the_gather_reads_the_pages_and_writes_the_scores(kind: str) -> None:
    problem = checked(kind, [130, 0, 64, 7])
    timing = time_page_gather([problem], 3)
    assert timing.median_us > 0
    written = problem.scores == 0
    lengths = problem.context_lengths.repeat_interleave(problem.rows_per_group)
    below = torch.arange(problem.max_context, device="cuda") < lengths[:, None]
    assert torch.equal(written, below)


def test_read_roof_is_below_any_memory_known() -> None:
    assert 1e11 < read_roof_bytes_per_second(0) < 2e13


def test_host_overhead_is_the_hosts() -> None:
    big = torch.empty(1 << 28, device="cuda")
    assert host_overhead_us(lambda: big.fill_(1.0), repeats=50) < 100


def test_first_call_seconds_is_the_difference() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        if len(calls) == 1:
            torch.cuda._sleep(200_000_000)

    assert first_call_seconds(call) > 0.05
    assert len(calls) == 2


def test_refused_arguments() -> None:
    with pytest.raises(InputError, match="repeats must be at least 1, got 0"):
        time_graph([lambda: None], 0)
    with pytest.raises(InputError, match="calls must hold at least one call"):
        time_graph([], 1)
    with pytest.raises(InputError, match="calls_per_replay must be at least 1, got 0"):
        time_graph([lambda: None], 1, calls_per_replay=0)


@pytest.mark.parametrize("kind", ["nvfp4", "bf16"])
def test_time_follows_the_keys_and_not_the_capacity(kind: str) -> None:
    times = []
    for width in (8000, 1_048_576):
        problem = make_problem(
            [8000] * 32, generator=torch.Generator().manual_seed(1), kind=kind, max_context=8000
        ).to("cuda")
        room = torch.empty(32, width, device="cuda")
        wide = problem.replace(scores=room)
        times.append(time_graph([lambda: wide.run("triton")], 100).median_us)  # noqa: B023
    assert times[1] / times[0] < 1.1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", KINDS)
def test_another_device_than_the_current_one(kind: str) -> None:
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.max_memory_allocated(0)
    problem = make_problem([700, 65], generator=torch.Generator().manual_seed(1), kind=kind)
    problem = problem.to("cuda:1")
    traffic = score_traffic(
        [700, 65], rows_per_group=1, max_context=705, query_format="bf16", key_format="bf16"
    )
    checked = check_scores_call(ScoreCall(**vars(problem)))
    measurement = measure_problems(
        [checked],
        traffic,
        5,
        backend="triton",
        calls_per_replay=2,
    )
    assert measurement.timing.median_us > 0
    assert torch.cuda.current_device() == 0
    assert torch.cuda.max_memory_allocated(0) == before
    # The roof left zeros there, so these are the scores of a graph of its own.
    with torch.cuda.device(1):
        graph = capture(lambda: problem.run("triton"))
    problem.scores.fill_(UNTOUCHED)
    graph.replay()
    torch.cuda.synchronize(1)
    assert_scores(problem, exact=False)
