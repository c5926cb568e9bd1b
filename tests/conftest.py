"""What every test shares: the fixtures folder, seeds, and the rule for tests that need a GPU."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("kernels.contract", "kernels.selection_contract", "support")

# A shell that starts the tests in the background ignores SIGINT for them, and their children would
# inherit that; interrupting such a child is what some tests are about.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FIXTURES = Path(__file__).parent.parent / "fixtures"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU, and large ones that nobody asked for.

    With SDSA_REQUIRE=gpu it is an error that there is no GPU.
    """
    if "large" not in config.option.markexpr:
        deselected = [item for item in items if item.get_closest_marker("large")]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not item.get_closest_marker("large")]
    if torch.cuda.is_available():
        return
    if os.environ.get("SDSA_REQUIRE") == "gpu":
        raise pytest.UsageError("SDSA_REQUIRE=gpu, but torch sees no CUDA device")
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def fixtures() -> Path:
    """Folder of small real inputs and golden vectors."""
    return FIXTURES


@pytest.fixture
def generator() -> torch.Generator:
    """A freshly seeded CPU generator."""
    return torch.Generator().manual_seed(20261130)
