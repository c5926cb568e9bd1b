"""The README's example runs as it stands, and its report says what happens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulator import Device, Launch, RunReport, record, run, run_kernel
from emulator.errors import MissingProxyFence, PtxSyntaxError

from .standin import reason_unavailable

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The names that the README's example leaves behind."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    if reason_unavailable() is not None:
        pytest.skip(str(reason_unavailable()))
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 10
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.mark.filterwarnings("ignore:Cache is disabled")
def test_the_example_copies_and_prints_what_the_readme_shows(
    example: dict[str, Any],
) -> None:
    report: RunReport = example["report"]
    numbers = np.arange(100 * 64, dtype=np.float32).view(np.uint32) >> 16
    assert example["copied"].shape == (128, 64)
    assert np.isin(example["copied"][:2], numbers).all()
    assert report.fault is None
    assert not report.differing
    shown = re.search(r"`(\w+)\.\.\.: (8 schedules), \.\.\. instructions`", README.read_text())
    assert shown is not None
    assert re.match(rf"{shown[1]}\w*: {shown[2]}, \d+ instructions$", str(report))


@pytest.mark.filterwarnings("ignore:Cache is disabled")
def test_a_fault_and_notes_are_in_the_report(example: dict[str, Any]) -> None:
    launch: Launch = example["launches"][0]
    assert launch.ptx is not None
    fences = re.compile(r"fence\.mbarrier_init[^;]*;")
    assert fences.search(launch.ptx)
    broken = replace(launch, ptx=fences.sub("", launch.ptx))
    report = run(broken, range(2))
    assert report.notes == {"mbarrier.init -> bulk copy without a fence": 4}
    assert "note, 4 times: mbarrier.init -> bulk copy" in str(report)
    report = run(broken, range(2), strict=True)
    assert isinstance(report.fault, MissingProxyFence)
    assert report.seeds == [0]
    assert "fault on seed 0: MissingProxyFence: " in str(report)


@pytest.mark.filterwarnings("ignore:Cache is disabled")
def test_kernels_of_one_name_keep_their_own_ptx(example: dict[str, Any]) -> None:
    from .recorded_cute_kernels import fill_twice

    values = (3, 5)
    launches = record(fill_twice, *values)
    assert len({launch.kernel for launch in launches}) == 1
    for launch, value in zip(launches, values, strict=True):
        assert (run(launch, [0]).memory["target"].view(np.int32) == value).all()


@pytest.mark.filterwarnings("ignore:Cache is disabled")
@pytest.mark.parametrize(
    ("capability", "target"), [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")]
)
def test_a_kernel_is_compiled_for_the_device(
    example: dict[str, Any], capability: tuple[int, int], target: str
) -> None:
    """And for tensors in its memory, though they are on the CPU."""
    from .recorded_cute_kernels import fill_after_counting

    (launch,) = record(fill_after_counting, device=Device(capability=capability))
    assert launch.ptx is not None
    assert f".target {target}\n" in launch.ptx
    assert "gmem" in launch.kernel
    assert (run(launch, [0]).memory["target"].view(np.int32) == 7).all()


@pytest.mark.filterwarnings("ignore:Cache is disabled")
def test_a_tensor_that_is_not_declared_is_said_to_be_missing(example: dict[str, Any]) -> None:
    from .recorded_cute_kernels import fill_undeclared

    (launch,) = record(fill_undeclared)
    text = str(run(launch))
    assert re.search(r"is in no region that the launch was given \(near it: another 0x", text)
    assert "Session.add_tensor declares what a kernel may touch" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: record(lambda session: None), "must be able to import it by name"),
        (lambda: record(print, device=(10, 0)), r"such as Device\(\(10, 0\)\), not \(10, 0\)"),
        (
            lambda: run_kernel("nonsense", "k", 1, 32, b""),
            r"line 1: a directive .* found 'nonsense'",
        ),
        (
            lambda: run_kernel(".version 8.8", "k", 1, 32, b""),
            "no kernel k in the module; it has none",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_words(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, PtxSyntaxError), match=message):
        call()
