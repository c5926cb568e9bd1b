"""`sdsa doctor` says what `sdsa score` would do, and always succeeds."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sdsa_kernels import backends
from sdsa_kernels.backends import backend_names
from sdsa_kernels.problem import ScoreProblem
from sdsa_kernels.selection.problem import SelectProblem
from sdsa_kernels.testing import selection_test, self_test
from sdsa_quant.errors import DeviceLostError, UnsupportedError
from sdsa_quant.layout import FORMAT_PAIRS
from support.command_line import Run


def replace_torch(monkeypatch: pytest.MonkeyPatch, **changes: Callable[..., object]) -> None:
    """Let the doctor ask a torch backend with some of its functions changed."""
    changed = (backends.CUTE, backends.TRITON, replace(backends.TORCH, **changes))
    for module in (backends, self_test):
        monkeypatch.setattr(module, "BACKENDS", changed)


def test_document(sdsa: Run) -> None:
    outcome = sdsa("doctor", "--json")
    outcome.is_clean()
    document = outcome.document
    assert document["command"] == "doctor"
    environment = document["environment"]
    assert environment["packages"]["torch"]
    assert datetime.datetime.fromisoformat(environment["date"]).tzinfo is not None
    assert environment["command_line"]
    assert environment["cpu"] is None or environment["cpu"].strip() == environment["cpu"] != ""
    on_the_cpu = [answer for answer in document["backends"] if answer["device"] == "cpu"]
    pairs = [(answer["query_format"], answer["key_format"]) for answer in on_the_cpu]
    assert pairs == list(FORMAT_PAIRS.values())
    for answer in on_the_cpu:
        assert answer["auto"] == "torch"
        assert list(answer["reasons"]) == backend_names()
        assert answer["reasons"]["torch"] is None
        assert "CUDA device" in answer["reasons"]["triton"]


def test_tables(sdsa: Run) -> None:
    outcome = sdsa("doctor")
    outcome.is_clean()
    for word in ("triton", "python", "nvfp4", "backends"):
        assert word in outcome.stdout


def test_a_broken_backend_is_in_the_report(sdsa: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: object) -> None:
        raise OSError("libcuda is gone")

    replace_torch(monkeypatch, reason_unsupported=broken)
    outcome = sdsa("doctor", "--json")
    outcome.is_clean()
    assert outcome.document["backends"][0]["reasons"] == {"all": "OSError: libcuda is gone"}
    assert outcome.document["backends"][0]["auto"] is None


def test_the_self_test_compares_every_backend_that_can_run(sdsa: Run) -> None:
    outcome = sdsa("doctor", "--self-test", "--json")
    outcome.is_clean()
    tests = [test for test in outcome.document["self_tests"] if test["device"] == "cpu"]
    pairs = [(test["query_format"], test["key_format"]) for test in tests]
    assert pairs == [*FORMAT_PAIRS.values(), ("nvfp4", "nvfp4")]
    assert [test["scale_order"] for test in tests] == [None, "linear", "linear", "128x4"]
    for test in tests:
        assert test["backend"] == "torch"
        assert test["failure"] is None
        assert 0 <= test["largest_difference"] < 1e-3


def test_the_self_test_prints_the_largest_difference(sdsa: Run) -> None:
    outcome = sdsa("doctor", "--self-test")
    outcome.is_clean()
    assert "difference" in outcome.stdout  # the heading, in two lines where there is no room
    assert "nvfp4 128x4" in outcome.stdout


@pytest.mark.parametrize("error", [0.5, None], ids=["wrong-score", "does-not-run"])
def test_a_failed_self_test_is_exit_1(
    sdsa: Run, monkeypatch: pytest.MonkeyPatch, error: float | None
) -> None:
    launch = backends.TORCH.launch

    def broken(problem: ScoreProblem) -> None:
        if error is None:
            raise UnsupportedError("it was built without kernels")
        launch(problem)
        problem.scores[0, 0] += error

    replace_torch(monkeypatch, launch=broken)
    outcome = sdsa("doctor", "--self-test", "--json")
    assert outcome.exit_code == 1
    assert "self-test failed: torch on cpu, bf16 rows, bf16 keys: " in outcome.stderr
    first = outcome.document["self_tests"][0]
    assert first["largest_difference"] is None
    assert ("built without kernels" if error is None else "is off by 0.5") in first["failure"]


def test_a_backend_that_breaks_is_a_failure_of_its_own(
    sdsa: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(problem: ScoreProblem) -> None:
        raise FileNotFoundError("no C compiler")  # no RuntimeError, as Triton's may be

    replace_torch(monkeypatch, launch=broken)
    outcome = sdsa("doctor", "--self-test", "--json")
    assert outcome.exit_code == 1
    assert outcome.document["self_tests"][0]["failure"] == "FileNotFoundError: no C compiler"


def test_a_backend_that_fell_back_is_a_failure(sdsa: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_torch(monkeypatch, reason_for_fallback=lambda problem: "tcgen05: 1 where 2 is right")
    outcome = sdsa("doctor", "--self-test")
    assert outcome.exit_code == 1
    assert "tcgen05: 1 where 2 is right" in outcome.stderr


def test_what_a_self_test_cannot_begin_with_is_a_failure(
    sdsa: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(self_test, "synthetic_problems", full)
    monkeypatch.setattr(self_test, "exact_problem", full)
    outcome = sdsa("doctor", "--self-test", "--json")
    assert outcome.exit_code == 1
    assert "all on cpu, nvfp4 rows, nvfp4 128x4 keys: OutOfMemoryError: CUDA" in outcome.stderr
    assert [test["backend"] for test in outcome.document["self_tests"]] == ["all"] * 4


def test_nothing_is_asked_of_a_device_on_which_a_kernel_hangs(
    sdsa: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(problem: ScoreProblem) -> None:
        raise DeviceLostError("kernel tcgen05_bf16 has not ended")

    replace_torch(monkeypatch, launch=hang)
    outcome = sdsa("doctor", "--self-test", "--json")
    assert outcome.exit_code == 1
    failures = [test["failure"] for test in outcome.document["self_tests"]]
    assert failures == ["kernel tcgen05_bf16 has not ended"]
    assert outcome.document["selection_tests"] == []


def test_a_device_without_tiled_scales_selects_too(
    sdsa: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_torch(
        monkeypatch, reason_unsupported=lambda problem: "none" if problem.tiled_scales else None
    )
    document = sdsa("doctor", "--self-test", "--json").document
    assert {test["scale_order"] for test in document["self_tests"]} == {None, "linear"}
    assert [test["backend"] for test in document["selection_tests"]] == ["torch", "torch"]


def test_the_self_test_selects_from_hard_rows(sdsa: Run) -> None:
    outcome = sdsa("doctor", "--self-test", "--json")
    outcome.is_clean()
    tests = [test for test in outcome.document["selection_tests"] if test["device"] == "cpu"]
    assert [(test["backend"], test["top_k"]) for test in tests] == [("torch", 1), ("torch", 700)]
    for test in tests:
        assert test["rows"] == 20
        assert test["wrong_rows"] == 0
        assert test["failure"] is None
    assert sdsa("doctor", "--json").document["selection_tests"] is None


@pytest.mark.parametrize("breaks", [False, True], ids=["wrong-key", "does-not-run"])
def test_a_failed_selection_is_exit_1(
    sdsa: Run, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    torch_backend = selection_test.BACKENDS[-1]

    def broken(problem: SelectProblem) -> None:
        if breaks:
            raise FileNotFoundError("no C compiler")
        torch_backend.launch(problem)
        problem.top_keys[3, 0] += 1

    monkeypatch.setattr(selection_test, "BACKENDS", (replace(torch_backend, launch=broken),))
    outcome = sdsa("doctor", "--self-test", "--json")
    assert outcome.exit_code == 1
    first = outcome.document["selection_tests"][0]
    assert first["wrong_rows"] == (None if breaks else 1)
    said = "FileNotFoundError: no C compiler" if breaks else "k = 1: wrong keys in 1 of 20 rows; "
    assert f"torch on cpu, top-1: {said}" in outcome.stderr
    assert breaks or "the first is two-values, entry 0: " in first["failure"]


def test_a_kernel_that_failed_its_check_is_a_failure_where_no_other_can_serve(
    sdsa: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    untrusted = replace(
        backends.CUTE,
        reason_unsupported=lambda problem: "its kernel failed its check",
        reason_for_fallback=lambda problem: "1 where 2 is right" if problem.tiled_scales else None,
    )
    monkeypatch.setattr(self_test, "BACKENDS", (untrusted, backends.TRITON, backends.TORCH))
    outcome = sdsa("doctor", "--self-test", "--json")
    assert outcome.exit_code == 1
    failed = [test for test in outcome.document["self_tests"] if test["failure"]]
    assert [(test["backend"], test["scale_order"]) for test in failed] == [("cute", "128x4")]
    assert failed[0]["largest_difference"] is None
