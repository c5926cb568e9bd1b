"""CUDA graphs: capture after one call, refusal before it, replays that see new inputs."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sdsa_kernels import backend_names
from sdsa_kernels.measure.timing import capture
from sdsa_kernels.triton import backend as triton_scores
from sdsa_quant.errors import DtypeError
from support.problems import KINDS, UNTOUCHED, assert_scores, make_problem

pytestmark = pytest.mark.gpu

GPU_BACKENDS = [name for name in backend_names() if name != "torch"]


def every_backend(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with each backend that runs here."""
    return pytest.mark.usefixtures("backend_runs_here")(
        pytest.mark.parametrize("backend", GPU_BACKENDS)(test)
    )


FIRST_CALL_IN_A_CAPTURE = """
import torch
from support.problems import make_problem, assert_scores
from sdsa_quant.errors import UnsupportedError
problem = make_problem([200, 5], generator=torch.Generator().manual_seed(1)).to("cuda")
graph = torch.cuda.CUDAGraph()
before = torch.cuda.memory_allocated()
try:
    with torch.cuda.graph(graph):
        problem.run({backend!r})
except UnsupportedError as error:
    assert "run indexer_scores once before capture" in str(error), error
    print("refused")
torch.cuda.synchronize()
problem.run({backend!r})
torch.cuda.synchronize()
problem.scores.fill_(12345.0)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    problem.run({backend!r})
graph.replay()
torch.cuda.synchronize()
assert_scores(problem, exact=False)
print("captured")
"""


@every_backend
def test_a_first_call_inside_a_capture_is_refused(backend: str) -> None:
    # In a process of its own, so that nothing is compiled yet.
    tests = Path(__file__).parent.parent
    result = subprocess.run(
        [sys.executable, "-c", FIRST_CALL_IN_A_CAPTURE.format(backend=backend)],
        cwd=tests,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["refused", "captured"]


@every_backend
@pytest.mark.parametrize("kind", KINDS)
def test_replays_follow_new_inputs(generator: torch.Generator, backend: str, kind: str) -> None:
    big = make_problem(
        [131_072], generator=generator, kind=kind, rows_per_group=2, integers=True
    ).to("cuda")
    problem = big.replace(
        context_lengths=torch.tensor([64], dtype=torch.int32, device="cuda"),
        query=big.query.clone(),
    )
    problem.run(backend)
    graph = capture(lambda: problem.run(backend))
    for length in (131_072, 1, 0, 65):
        problem.context_lengths.fill_(length)
        problem.query.copy_(problem.query.flip(0))
        problem.scores.fill_(UNTOUCHED)
        graph.replay()
        replayed = problem.scores.clone()
        problem.scores.fill_(UNTOUCHED)
        assert torch.equal(problem.run(backend), replayed)
        assert_scores(problem, exact=True)


@every_backend
def test_replays_allocate_nothing(generator: torch.Generator, backend: str) -> None:
    problem = make_problem([300, 5], generator=generator).to("cuda")
    problem.run(backend)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    problem.run(backend)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@every_backend
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_refused_arguments_leave_a_capture_usable(generator: torch.Generator, backend: str) -> None:
    problem = make_problem([300], generator=generator).to("cuda")
    problem.run(backend)
    torch.cuda.synchronize()
    wrong = problem.replace(requests=problem.requests.long())
    problem.run("triton")
    capture(lambda: problem.run("triton"))  # a process's first capture reserves memory for good
    reserved = torch.cuda.memory_reserved()
    for _ in range(50):
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(DtypeError, match="requests must be int32"),
            torch.cuda.graph(graph),
        ):
            wrong.run(backend)
        del graph
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= reserved
    problem.scores.fill_(UNTOUCHED)
    capture(lambda: problem.run(backend)).replay()
    torch.cuda.synchronize()
    assert_scores(problem, exact=False)


@every_backend
def test_compiled_kernels_survive_garbage_collection(
    generator: torch.Generator, backend: str
) -> None:
    problem = make_problem([300], generator=generator).to("cuda")
    problem.run(backend)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        graphs = [capture(lambda: problem.run(backend)) for _ in range(10)]
        gc.collect()
        for graph in graphs:
            graph.replay()
    finally:
        gc.set_threshold(*thresholds)
    torch.cuda.synchronize()
    assert_scores(problem, exact=False)


def test_variants_are_one_per_pair_of_formats() -> None:
    def run_all(kind: str) -> None:
        generator = torch.Generator().manual_seed(3)
        for groups in (16, 1, 3, 17):
            for rows in (1, 3, 8):
                for width in (64, 65, 4096):
                    for pitch in (None, 4624 if kind != "bf16" else 16_400):
                        make_problem(
                            [min(64, width)] * groups,
                            generator=generator,
                            kind=kind,
                            rows_per_group=rows,
                            max_context=width,
                            page_pitch=pitch,
                        ).to("cuda").run("triton")

    for kind in KINDS:
        run_all(kind)
    here = torch.cuda.current_device()
    variants = [key for key in triton_scores.compiled_variants() if key[0] == here]
    assert len(variants) == len(KINDS)
