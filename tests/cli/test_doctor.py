"""`sdsa doctor` says what `sdsa score` would do, and always succeeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from command_line import Run
from sdsa_kernels import backends, self_test, torch_scores
from sdsa_kernels.backends import backend_names
from sdsa_kernels.checks import ScoreProblem
from sdsa_kernels.synthetic import FORMATS
from sdsa_quant.errors import UnsupportedError


def test_document(sdsa: Run) -> None:
    outcome = sdsa("doctor", "--json")
    outcome.is_clean()
    document = outcome.document
    assert document["command"] == "doctor"
    assert document["environment"]["packages"]["torch"]
    on_the_cpu = [answer for answer in document["backends"] if answer["device"] == "cpu"]
    pairs = [(answer["query_format"], answer["key_format"]) for answer in on_the_cpu]
    assert pairs == list(FORMATS.values())
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

    monkeypatch.setattr(torch_scores, "reason_unsupported", broken)
    outcome = sdsa("doctor", "--json")
    outcome.is_clean()
    assert outcome.document["backends"][0]["reasons"] == {"all": "OSError: libcuda is gone"}
    assert outcome.document["backends"][0]["auto"] is None


def test_the_self_test_compares_every_backend_that_can_run(sdsa: Run) -> None:
    outcome = sdsa("doctor", "--self-test", "--json")
    outcome.is_clean()
    tests = [test for test in outcome.document["self_tests"] if test["device"] == "cpu"]
    assert [(test["query_format"], test["key_format"]) for test in tests] == list(FORMATS.values())
    for test in tests:
        assert test["backend"] == "torch"
        assert test["failure"] is None
        assert 0 <= test["largest_difference"] < 1e-3


def test_the_self_test_prints_the_largest_difference(sdsa: Run) -> None:
    outcome = sdsa("doctor", "--self-test")
    outcome.is_clean()
    assert "largest difference" in outcome.stdout


@pytest.mark.parametrize("error", [0.5, None], ids=["wrong-score", "does-not-run"])
def test_a_failed_self_test_is_exit_1(
    sdsa: Run, monkeypatch: pytest.MonkeyPatch, error: float | None
) -> None:
    launch = torch_scores.launch

    def broken(problem: ScoreProblem) -> None:
        if error is None:
            raise UnsupportedError("it was built without kernels")
        launch(problem)
        problem.scores[0, 0] += error

    monkeypatch.setattr(torch_scores, "launch", broken)
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

    monkeypatch.setattr(torch_scores, "launch", broken)
    outcome = sdsa("doctor", "--self-test", "--json")
    assert outcome.exit_code == 1
    assert outcome.document["self_tests"][0]["failure"] == "FileNotFoundError: no C compiler"


def test_a_backend_that_fell_back_is_a_failure(sdsa: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cute, triton, torch_backend = backends.BACKENDS
    fallen = replace(
        torch_backend, reason_for_fallback=lambda problem: "tcgen05: 1 where 2 is right"
    )
    monkeypatch.setattr(self_test, "BACKENDS", (cute, triton, fallen))
    outcome = sdsa("doctor", "--self-test")
    assert outcome.exit_code == 1
    assert "tcgen05: 1 where 2 is right" in outcome.stderr
