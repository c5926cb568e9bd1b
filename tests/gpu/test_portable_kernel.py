"""The portable Triton kernel in graphs, which Triton before 3.6 would run.

Its scores are compared with the contract in `test_scores_cuda`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sdsa_kernels import plans
from sdsa_kernels.measure.timing import capture
from sdsa_kernels.triton import backend as triton_scores
from support.problems import KINDS, UNTOUCHED, assert_scores, make_problem

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def without_gluon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if Triton had no Gluon, and nothing had been compiled with it."""
    monkeypatch.setattr(triton_scores, "has_gluon", lambda: False)
    monkeypatch.setattr(triton_scores, "_compiled", {})
    plans.forget_all()
    yield
    plans.forget_all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_group", [1, 3, 8])
@pytest.mark.parametrize("integers", [True, False], ids=["integers", "gaussian"])
def test_graphs_replay_it(
    generator: torch.Generator, kind: str, rows_per_group: int, integers: bool
) -> None:
    problem = make_problem(
        [0, 1, 63, 64, 65, 700, 0],
        generator=generator,
        kind=kind,
        rows_per_group=rows_per_group,
        integers=integers,
    ).to("cuda")
    problem.run("triton")
    assert_scores(problem, exact=integers)
    assert list(triton_scores._compiled.values()) == [None], "Gluon was used"
    graph = capture(lambda: problem.run("triton"))
    problem.scores.fill_(UNTOUCHED)
    graph.replay()
    assert_scores(problem, exact=integers)
