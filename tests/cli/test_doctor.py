"""`sdsa doctor` says what `sdsa score` would do, and always succeeds."""

from __future__ import annotations

import pytest

from command_line import Run
from sdsa_kernels import torch_scores
from sdsa_kernels.backends import backend_names
from sdsa_kernels.synthetic import FORMATS


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
