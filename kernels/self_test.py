"""Whether every backend of a machine computes right scores: a small problem against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sdsa_quant.errors import SdsaError

from .backends import BACKENDS, Backend
from .checks import ScoreProblem
from .score_check import UNTOUCHED, check_scores
from .synthetic import FORMATS, Shape, synthetic_problems

# Every way in which a group can end, among more groups than a warp has lanes.
_SHAPE = Shape(
    lengths=(1, 0, 63, 64, 65, 127, 128, 129, 700, *[30] * 25), rows_per_group=3, max_context=701
)
_SEED = 20261130


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What one backend made of one pair of formats."""

    device: str
    query_format: str
    key_format: str
    backend: str
    largest_difference: float | None  # from float64, None where there are no right scores
    failure: str | None  # None where all is well


def self_tests(device: str) -> Iterator[SelfTest]:
    """Run every backend that can run on a device over every pair of formats."""
    for values in FORMATS:
        problem = synthetic_problems(_SHAPE, values, torch.device(device), rotations=1, seed=_SEED)[
            0
        ]
        for backend in BACKENDS:
            if backend.reason_unsupported(problem) is None:
                yield _self_test(device, problem, backend)


def _self_test(device: str, problem: ScoreProblem, backend: Backend) -> SelfTest:
    problem = replace(problem, scores=torch.full_like(problem.scores, UNTOUCHED))
    largest, failure = None, None
    try:
        backend.launch(problem)
        largest = check_scores(problem)
        failure = backend.reason_for_fallback(problem)
    except SdsaError as error:
        failure = str(error)
    except Exception as error:  # such as of a compiler that is missing: what a report has to show
        failure = f"{type(error).__name__}: {error}"
    return SelfTest(
        device=device,
        query_format=problem.query_format,
        key_format=problem.key_format,
        backend=backend.name,
        largest_difference=largest,
        failure=failure,
    )
