"""Which stream a timing's graph is captured on, without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from sdsa_kernels.measure import timing


def test_each_device_captures_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [0]
    captured: list[tuple[int, object]] = []

    @contextlib.contextmanager
    def graph(graph: object, stream: object = None) -> Iterator[None]:
        captured.append((devices[-1], stream))
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: f"stream of {index}")
    timing._capture_stream.cache_clear()
    try:
        for device in (0, 1, 0):
            devices.append(device)
            timing.capture(lambda: None)
    finally:
        timing._capture_stream.cache_clear()
    assert captured == [(0, "stream of 0"), (1, "stream of 1"), (0, "stream of 0")]
