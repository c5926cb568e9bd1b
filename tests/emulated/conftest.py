"""The processes in which the host code's launches are recorded: one a device, for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulator.host.launch_recorder import LaunchRecorder
from emulator.host.recorded_launch import Device


@pytest.fixture(scope="session")
def hopper() -> Iterator[LaunchRecorder]:
    """Of an SM90 with two multiprocessors instead of 132: who computes a score must not matter."""
    with LaunchRecorder(Device(multiprocessors=2)) as recorder:
        yield recorder


@pytest.fixture(scope="session")
def recorder() -> Iterator[LaunchRecorder]:
    """Of a small SM100."""
    with LaunchRecorder(Device(capability=(10, 0), multiprocessors=2)) as recorder:
        yield recorder
