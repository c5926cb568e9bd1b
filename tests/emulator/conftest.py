"""What tests of launches share: one process that stands in for a machine with an SM100."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulator.launch_recorder import LaunchRecorder
from emulator.recorded_launch import Device


@pytest.fixture(scope="session")
def recorder() -> Iterator[LaunchRecorder]:
    """Records what the host code launches on a small SM100."""
    with LaunchRecorder(Device(capability=(10, 0), multiprocessors=2)) as recorder:
        yield recorder
