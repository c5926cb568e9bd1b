"""What is timed is what is checked: graphs and repeats that do something else get no time."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sdsa_kernels.device import load_bytes_per_second
from sdsa_kernels.measure import clocks, measurement, peers, timing
from sdsa_kernels.measure.clocks import Clocks, ClockWatch, sm_clock
from sdsa_kernels.measure.measurement import measure_problems, require_possible, scoring_call
from sdsa_kernels.measure.timing import Timing, time_graph
from sdsa_kernels.measure.traffic import Traffic, shape_traffic
from sdsa_kernels.measure.written import plain_scores, require_written
from sdsa_kernels.problem import ScoreProblem
from sdsa_kernels.testing.compare import compare_scores
from sdsa_kernels.testing.problems import Shape, synthetic_problems
from sdsa_quant.errors import CheckFailedError

CPU = torch.device("cpu")
SHAPE = Shape((130, 0, 64), 2, 200)


def problems(rotations: int = 3, format_pair: str = "nvfp4") -> list[ScoreProblem]:
    return synthetic_problems(SHAPE, format_pair, CPU, rotations=rotations, seed=1)


class Graph:
    """A graph that replays what it captured, or something else."""

    def __init__(self, *calls: Callable[[], object]) -> None:
        self.calls = calls

    def replay(self) -> None:
        for call in self.calls:
            call()


@pytest.fixture
def cpu_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of plain calls on the CPU, in place of those of a GPU."""
    monkeypatch.setattr(timing, "capture", Graph)
    monkeypatch.setattr(timing, "_time_batch", lambda graphs: [5.0 for each in graphs if each])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def time_checked(rotation: list[ScoreProblem], calls_per_replay: int = 1) -> Timing:
    calls = [scoring_call(each, "torch") for each in rotation]
    expected = [plain_scores(*each) for each in zip(rotation, calls, strict=True)]

    def verify(index: int, replay: Callable[[], None]) -> None:
        require_written(rotation[index], replay, expected[index])

    return time_graph(calls, 4, calls_per_replay=calls_per_replay, verify=verify)


@pytest.mark.usefixtures("cpu_graphs")
@pytest.mark.parametrize("calls_per_replay", [1, 2, 3, 4])
@pytest.mark.parametrize("format_pair", ["nvfp4", "bf16", "mixed"])
def test_graphs_that_score_get_a_time(format_pair: str, calls_per_replay: int) -> None:
    rotation = problems(format_pair=format_pair)
    assert time_checked(rotation, calls_per_replay).median_us == 5.0 / calls_per_replay


@pytest.mark.usefixtures("cpu_graphs")
@pytest.mark.parametrize(
    ("work", "message"),
    [
        ("nothing", "left 130 of 130 scores unwritten in row 0"),
        ("half", "left 64 of 64 scores unwritten in row 4"),
        ("other pages", "wrote other scores than a plain call to row 0"),
        ("swapped keys", "wrote other scores than a plain call to row 0"),
        ("one key", "wrote other scores than a plain call to row 5"),
        ("past", "wrote entry 64 of row 4, past its length"),
        ("nan", "wrote other scores than a plain call to row 1"),
    ],
)
def test_graphs_that_do_something_else_get_none(
    monkeypatch: pytest.MonkeyPatch, work: str, message: str
) -> None:
    rotation = problems()
    scores = rotation[0].scores
    other = scoring_call(rotation[2], "torch")

    def after(call: Callable[[], object], change: Callable[[], object]) -> Callable[[], None]:
        return lambda: (call(), change(), None)[2]

    kept = scores.new_empty(2, 130)
    wrong: dict[str, Callable[[Callable[[], object]], Callable[[], object]]] = {
        "nothing": lambda call: lambda: None,
        "half": lambda call: after(call, lambda: scores[4:, :64].fill_(12345.0)),
        "other pages": lambda call: other,
        "swapped keys": lambda call: after(
            call, lambda: scores[:2, :130].copy_(kept.copy_(scores[:2, :130]).flip(1))
        ),
        "one key": lambda call: after(call, lambda: scores[5, 63].add_(0.5)),
        "past": lambda call: after(call, lambda: scores[4, 64].fill_(0.0)),
        "nan": lambda call: after(call, lambda: scores[1, 7].fill_(float("nan"))),
    }
    monkeypatch.setattr(timing, "capture", lambda *calls: Graph(*map(wrong[work], calls)))
    with pytest.raises(CheckFailedError, match=message):
        time_checked(rotation)


@pytest.mark.usefixtures("cpu_graphs")
def test_a_graph_is_observed_at_work_and_verified_after() -> None:
    seen: list[Any] = []
    calls = [lambda i=i: seen.append(i) for i in range(3)]

    def observe(work: Callable[[], None]) -> None:
        seen.append("observed")
        work()

    def verify(index: int, replay: Callable[[], None]) -> None:
        seen.append(f"verify {index}")
        replay()

    time_graph(calls, 2, calls_per_replay=2, observe=observe, verify=verify)
    # plain calls; the warm-up of graphs (0, 1) and (2, 0); each observation is of both
    assert seen[:7] == [0, 1, 2, 0, 1, 2, 0]
    graphs = [0, 1, 2, 0]
    assert seen[7:] == [
        "observed", *graphs, "observed", *graphs, "verify 1", 0, 1, "verify 0", 2, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("stops_after", [0, 1, 2, 5])
def test_repeats_that_stop_working_get_no_time(
    monkeypatch: pytest.MonkeyPatch, stops_after: int
) -> None:
    def scoring_call_that_stops(problem: ScoreProblem, backend: str) -> Callable[[], None]:
        call, calls = scoring_call(problem, backend), 0

        def stopping() -> None:
            nonlocal calls
            calls += 1
            if calls <= stops_after:
                call()

        return stopping

    monkeypatch.setattr(measurement, "scoring_call", scoring_call_that_stops)
    message = "left 130 of 130 scores unwritten in row 0"
    if stops_after < 2:
        message = "two plain calls wrote different scores, or none, to row 0"
    with pytest.raises(CheckFailedError, match=message):
        measure_problems(problems(1), shape_traffic(SHAPE, "nvfp4"), 5, backend="torch")


def test_what_the_last_repeat_left_is_what_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = problems(1)
    checked = []

    def check(problem: ScoreProblem) -> None:
        compare_scores(problem)
        checked.append(problem)

    measure_problems(rotation, shape_traffic(SHAPE, "nvfp4"), 3, backend="torch", check=check)
    assert checked == rotation
    # A call that is wrong from the first on agrees with itself, but not with float64.
    real = scoring_call

    def wrong_call(problem: ScoreProblem, backend: str) -> Callable[[], None]:
        call = real(problem, backend)
        return lambda: (call(), problem.scores[0, 3].add_(5.0), None)[2]

    monkeypatch.setattr(measurement, "scoring_call", wrong_call)
    with pytest.raises(CheckFailedError, match="group 0, row 0, key 3: score"):
        measure_problems(rotation, shape_traffic(SHAPE, "nvfp4"), 3, backend="torch", check=check)


@pytest.mark.parametrize("median_us", [0.0, 1e-4, 0.008])
def test_a_time_that_no_cache_could_serve_is_refused(median_us: float) -> None:
    traffic = Traffic(10_000, 46_080_000, 72, 2560)
    most = 132 * 128 * 3e9  # of an H200
    require_possible(Timing("graph", (10.0,)), traffic, most)
    with pytest.raises(CheckFailedError, match="more than any cache of the device can serve"):
        require_possible(Timing("graph", (median_us,) * 100), traffic, most)
    assert 1e12 < load_bytes_per_second(CPU) < 1e16


@pytest.mark.parametrize(
    ("before", "after", "fell"),
    [(1980, 1980, False), (1980, 1882, False), (1980, 1880, True), (None, None, False)],
)
def test_a_clock_that_fell_by_more_than_5_percent(
    before: int | None, after: int | None, fell: bool
) -> None:
    assert Clocks(before, after, None).fell is fell


def test_clocks_are_asked_for_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[int | str] = iter([1980, 1500, "nvidia-smi: gone", 1980])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(clocks, "sm_clock", lambda device: next(answers))
    found = []
    for _ in range(2):
        watch = ClockWatch(CPU)
        watch(lambda: None)
        watch(lambda: None)
        found.append(watch.clocks)
    assert found == [Clocks(1980, 1500, None), Clocks(None, None, "nvidia-smi: gone")]
    assert ClockWatch(CPU).clocks == Clocks(None, None, "not asked for")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (FileNotFoundError("nvidia-smi"), "neither NVML for Python .* nor nvidia-smi"),
        (subprocess.TimeoutExpired("nvidia-smi", 10), "nvidia-smi: .*timed out"),
        ("[N/A]", r"nvidia-smi: \[N/A\]"),
        ("1755\n", "^1755$"),
    ],
    ids=["absent", "slow", "unknown", "known"],
)
def test_a_clock_that_nobody_knows_says_why(
    monkeypatch: pytest.MonkeyPatch, answer: Exception | str, expected: str
) -> None:
    def run(command: list[str], **options: object) -> Any:
        assert "--id=GPU-1234" in command
        if isinstance(answer, Exception):
            raise answer
        return types.SimpleNamespace(stdout=answer, stderr="")

    monkeypatch.setattr(clocks, "can_find", lambda module: False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1234")
    )
    monkeypatch.setattr(subprocess, "run", run)
    assert re.search(expected, str(sm_clock(CPU)))


def flashinfer(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any] | None) -> None:
    monkeypatch.setattr(peers, "can_find", lambda module: True)
    module = types.ModuleType("flashinfer.sdsa")
    if function is not None:
        module.indexer_scores = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sdsa", module)


def _refuses(*arguments: object, **options: object) -> None:
    raise NotImplementedError("SM90 is not supported")


def _scores(*arguments: Any, **options: Any) -> None:
    from sdsa_kernels import indexer_scores

    indexer_scores(*arguments, **options)


def _wrong(*arguments: Any, scores: torch.Tensor, **options: Any) -> None:
    scores.zero_()


@pytest.mark.usefixtures("cpu_graphs")
@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (None, "cannot be imported: AttributeError"),
        (_refuses, "refuses the problem: NotImplementedError: SM90 is not supported"),
        (_wrong, "other scores: CheckFailedError: what was timed is not the call"),
        (_scores, "5.0"),
    ],
    ids=["import", "refusal", "wrong", "right"],
)
def test_flashinfer_has_a_time_or_a_reason(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any] | None, answer: str
) -> None:
    flashinfer(monkeypatch, function)
    assert str(peers.time_flashinfer(problems(), 3)).startswith(answer)


def _insists(*arguments: Any, scores: torch.Tensor, **options: Any) -> None:
    if arguments[2].shape[1] * 64 < scores.shape[1]:
        raise ValueError("block_table is narrower than scores")
    _scores(*arguments, scores=scores, **options)


@pytest.mark.usefixtures("cpu_graphs")
def test_flashinfer_gets_a_table_that_covers_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer(monkeypatch, _insists)
    wide = synthetic_problems(Shape((70, 64), 2, 300), "nvfp4", CPU, rotations=2, seed=1)
    assert wide[0].block_table.shape[1] == 2
    assert peers.time_flashinfer(wide, 3) == 5.0


@pytest.mark.usefixtures("cpu_graphs")
def test_gather_and_bmm_has_a_time_or_a_reason() -> None:
    assert peers.time_gather_bmm(problems(), 3) == "needs BF16 keys"
    ragged = problems(format_pair="bf16")
    assert peers.time_gather_bmm(ragged, 3) == "needs groups of one length, of whole pages"
    even = synthetic_problems(Shape((128, 128), 2, 128), "bf16", CPU, rotations=2, seed=1)
    assert peers.time_gather_bmm(even, 3) == 5.0
    assert peers.time_flashinfer(even, 3) == "flashinfer is not installed"
