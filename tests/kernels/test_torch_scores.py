"""The `torch` backend: the scores contract, and what only it has (chunks, threads, autograd)."""

from __future__ import annotations

import pytest
import torch

from kernels.contract import ScoresContract, Where
from sdsa_kernels import torch_scores
from support.problems import KINDS, UNTOUCHED, Problem, make_problem


class TorchOnCpu(Where):
    def run(self, problem: Problem) -> Problem:
        called = problem.to("cpu")
        called.run("torch")
        return called


class TestScores(ScoresContract):
    wheres = (TorchOnCpu("torch", takes_128x4=True),)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pages", [1, 2, 5])
def test_scores_do_not_depend_on_the_chunk(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, kind: str, pages: int
) -> None:
    problem = make_problem([700, 1, 0, 321], generator=generator, kind=kind, rows_per_group=4)
    whole = problem.run().clone()
    problem.scores.fill_(UNTOUCHED)
    monkeypatch.setattr(torch_scores, "_pages_per_chunk", lambda device: pages)
    assert torch.equal(problem.run(), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_group", range(1, 9))
def test_scores_depend_on_neither_neighbours_nor_threads(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, kind: str, rows_per_group: int
) -> None:
    problem = make_problem(
        [64, 64, 64], generator=generator, kind=kind, rows_per_group=rows_per_group
    )
    together = problem.run().clone()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for pages in (1, 2):
                monkeypatch.setattr(torch_scores, "_pages_per_chunk", lambda device, n=pages: n)
                problem.scores.fill_(UNTOUCHED)
                assert torch.equal(problem.run(), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_and_autograd_stay_outside(generator: torch.Generator, kind: str) -> None:
    problem = make_problem([130], generator=generator, kind=kind, rows_per_group=2)
    expected = problem.run().clone()
    problem.scores.fill_(UNTOUCHED)
    if problem.query.is_floating_point():
        problem.query.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = problem.run()
    assert torch.equal(scores, expected)
    assert scores.grad_fn is None
    assert not scores.requires_grad
    with torch.inference_mode():
        inference = torch.full_like(scores, UNTOUCHED)
    assert torch.equal(problem.replace(scores=inference).run(), expected)
