"""On a GPU: graphs that do not score get no time, and clocks are the device's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sdsa_cli.app import app
from sdsa_kernels.measure import timing
from sdsa_kernels.measure.clocks import ClockWatch
from sdsa_kernels.measure.peers import time_gather_bmm
from sdsa_kernels.testing.problems import Shape, synthetic_problems
from support.caches import write_cache
from support.command_line import parse_document

pytestmark = [pytest.mark.gpu, pytest.mark.timing, pytest.mark.xdist_group("timing")]

BENCH = (
    "bench",
    "--shape",
    "8,1,8192",
    "--format-pair",
    "nvfp4",
    "--repeats",
    "20",
    "--no-compare",
)
capture = timing.capture


def empty(*calls: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of unrelated work."""
    one = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return capture(lambda: one.add_(1))


def last_only(*calls: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of the call that was captured first, over and over: its pages are hot."""
    kept.append(calls)
    return capture(*kept[0])


kept: list[tuple[Callable[[], object], ...]] = []


@pytest.mark.parametrize("words", [(), ("--check",)], ids=["plain", "checked"])
@pytest.mark.parametrize("wrong", [empty, last_only])
def test_bench_gives_no_time_of_other_graphs(
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[..., torch.cuda.CUDAGraph],
    words: tuple[str, ...],
) -> None:
    kept.clear()
    monkeypatch.setattr(timing, "capture", wrong)
    answer = CliRunner().invoke(app, [*BENCH, *words])
    assert answer.exit_code == 1, answer.stdout
    assert "what was timed is not the call" in answer.stderr


def test_score_gives_no_time_of_other_graphs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_cache(tmp_path / "c", torch.randn(900, 128).bfloat16(), [500, 400])
    save_file({"queries": torch.randn(2, 128)}, tmp_path / "q")
    words = ["score", str(tmp_path / "c"), "--queries", str(tmp_path / "q"), "--device", "cuda"]
    right = CliRunner().invoke(app, [*words, "--graph-replay", "20"])
    assert right.exit_code == 0, right.stderr
    assert "SM clock" in right.stdout
    monkeypatch.setattr(timing, "capture", empty)
    answer = CliRunner().invoke(app, [*words, "--graph-replay", "20"])
    assert answer.exit_code == 1
    assert "what was timed is not the call" in answer.stderr


@pytest.mark.parametrize("calls", ["1", "3"])
def test_bench_checks_every_graph(calls: str) -> None:
    answer = CliRunner().invoke(app, [*BENCH, "--check", "--json", "--calls-per-replay", calls])
    assert answer.exit_code == 0, answer.stderr
    result = parse_document(answer.stdout)["results"][0]
    assert result["checked"]
    assert result["flashinfer_reason"] == "left out by --no-compare"
    clocks = result["clocks"]
    assert (clocks["before_mhz"] is None) == (clocks["reason"] is not None)


def test_the_clock_is_a_gpus_or_says_why_not() -> None:
    watch = ClockWatch(torch.device("cuda", 0))
    big = torch.empty(1 << 26, device="cuda")
    for _ in range(2):
        watch(lambda: big.fill_(1.0))
    clocks = watch.clocks
    if clocks.reason is None:
        assert clocks.before_mhz is not None
        assert 100 < clocks.before_mhz < 4000
    else:
        assert "NVML" in clocks.reason or "nvidia-smi" in clocks.reason


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_ways_are_timed_on_the_device_of_the_problem() -> None:
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.max_memory_allocated(0)
    device = torch.device("cuda", 1)
    problems = synthetic_problems(Shape((128,) * 4, 1, 128), "bf16", device, rotations=2, seed=1)
    assert isinstance(time_gather_bmm(problems, 5), float)
    assert torch.cuda.max_memory_allocated(0) == before
