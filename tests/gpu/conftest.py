"""What tests of several GPU backends share."""

from __future__ import annotations

import pytest
import torch

from sdsa_kernels.backends import BACKENDS
from sdsa_kernels.testing.problems import Shape, synthetic_problems


@pytest.fixture
def backend_runs_here(request: pytest.FixtureRequest, backend: str) -> None:
    """Skip what a backend says it cannot run here, such as CuTe DSL without its package."""
    kind = request.node.callspec.params.get("kind", "nvfp4")
    problem = synthetic_problems(Shape((1,), 1, 1), kind, torch.device("cuda"), rotations=1, seed=0)
    chosen = next(each for each in BACKENDS if each.name == backend)
    reason = chosen.reason_unsupported(problem[0])
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
