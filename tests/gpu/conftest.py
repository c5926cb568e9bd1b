"""What tests of several GPU backends share."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sdsa_kernels.backends import BACKENDS
from sdsa_kernels.testing.problems import Shape, synthetic_problems


@pytest.fixture(autouse=True)
def _share_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let nothing run beside a test that times, whatever the number of pytest's processes."""
    timing = request.node.get_closest_marker("timing") is not None
    with open(Path(tempfile.gettempdir()) / "sdsa-tests-of-the-gpu.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if timing else fcntl.LOCK_SH)
        yield


@pytest.fixture
def skip_unless_it_runs() -> Callable[[str, str], None]:
    """Skips what a backend says it cannot run here, such as CuTe DSL without its package."""

    def skip(backend: str, kind: str = "nvfp4") -> None:
        shape, device = Shape((1,), 1, 1), torch.device("cuda")
        (problem,) = synthetic_problems(shape, kind, device, rotations=1, seed=0)
        chosen = next(each for each in BACKENDS if each.name == backend)
        reason = chosen.reason_unsupported(problem)
        if reason is not None:
            pytest.skip(f"{backend}: {reason}")

    return skip


@pytest.fixture
def backend_runs_here(
    request: pytest.FixtureRequest, backend: str, skip_unless_it_runs: Callable[[str, str], None]
) -> None:
    """Skip a test whose backend does not run here."""
    skip_unless_it_runs(backend, request.node.callspec.params.get("kind", "nvfp4"))
