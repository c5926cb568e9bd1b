"""What the Triton backend does goes by a call's own device, and is asked for when it is called."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sdsa_kernels.problem import WriteProblem
from sdsa_kernels.triton import backend as triton_scores
from sdsa_kernels.triton import launch as triton_launch
from sdsa_kernels.triton import select as triton_select
from sdsa_kernels.triton import write as triton_write

CAPABILITIES = {0: (7, 5), 1: (8, 0), 2: (9, 0), 3: (10, 0)}


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 0, the current one, is a T4; the others are an A100, an H100 and a B200."""
    monkeypatch.setattr(triton_launch, "capability", CAPABILITIES.__getitem__)
    monkeypatch.setattr(triton_launch, "can_find", lambda module: True)
    monkeypatch.setattr(triton_launch, "interpreting", lambda: False)


@pytest.mark.parametrize("index", CAPABILITIES)
def test_support_is_that_of_the_calls_device(index: int) -> None:
    problem = SimpleNamespace(device=torch.device("cuda", index), tiled_scales=False)
    for asked in (triton_scores, triton_select):
        reason = asked.reason_unsupported(problem)
        if index:
            assert reason is None
        else:
            assert reason is not None
            assert "8.0 or later, cuda:0 has 7.5" in reason


@pytest.mark.parametrize(("index", "overlaps"), [(1, False), (2, True), (3, True)])
def test_launches_overlap_from_sm90_on(index: int, overlaps: bool) -> None:
    assert triton_launch.overlaps_launches(index) is overlaps
    assert triton_scores._constants(index, "nvfp4", "nvfp4") == (True, True, 2, overlaps)


def test_importing_asks_no_device() -> None:
    script = "import torch, sdsa_kernels.triton.backend; print(torch.cuda.is_initialized())"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert answer.stdout.strip() == "False", answer.stderr


def test_a_call_without_rows_is_no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is compiled by it: a first call with rows, in a capture, must still be refused.
    monkeypatch.setattr(triton_write, "_warm", set())
    none = torch.empty(0, 128, dtype=torch.bfloat16)
    codes, scales = torch.empty(1, 64, 64, dtype=torch.uint8), torch.empty(1, 64, 8).byte()
    triton_write.launch(WriteProblem(none, torch.empty(0, dtype=torch.int64), codes, scales), None)
    assert triton_write._warm == set()
