"""The portable scoring kernel under Triton's interpreter: the scores contract, and its shares."""

from __future__ import annotations

import pytest
import torch
from kernels.contract import HIDES_NAN, ScoresContract, Where

from sdsa_kernels.backends import choose_backend
from sdsa_kernels.checks import check_scores_call
from sdsa_kernels.problem import ScoreCall
from sdsa_kernels.triton import backend as triton_scores
from support.problems import KINDS, UNTOUCHED, Problem, assert_scores, make_problem


class TritonInterpreted(Where):
    def run(self, problem: Problem) -> Problem:
        called = problem.to("cpu")
        called.run("triton")
        return called


class TestScores(ScoresContract):
    wheres = (
        TritonInterpreted(
            "interpreted",
            rows=(1, 3, 8),
            lengths=("around-a-page", "empty", "one-group"),
            most_scores=8000,
            repeats=1,
            declined={"test_a_nan_scale_is_not_hidden": HIDES_NAN},
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("programs", [1, 2, 7, 40])
def test_scores_do_not_depend_on_the_programs(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, kind: str, programs: int
) -> None:
    # From one program for everything to more programs than pages.
    problem = make_problem(
        [130, 1, 0, 321], generator=generator, kind=kind, rows_per_group=2, integers=True
    )
    monkeypatch.setattr(triton_scores, "_INTERPRETED_PROGRAMS", programs)
    problem.run("triton")
    assert_scores(problem, exact=True)


def test_the_interpreter_takes_cpu_tensors(generator: torch.Generator) -> None:
    problem = make_problem([5], generator=generator)
    assert choose_backend(check_scores_call(ScoreCall(**vars(problem)))).name == "triton"
    assert (problem.scores == UNTOUCHED).all()
