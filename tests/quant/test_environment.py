"""The environment part of reports: always there, whatever is broken."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sdsa_quant import environment
from sdsa_quant.files.typed_json import from_json, to_json


def test_versions_and_devices() -> None:
    described = environment.describe_environment()
    assert described.python == platform.python_version()
    assert described.packages["torch"] == torch.__version__
    assert len(described.cuda.devices) == torch.cuda.device_count()
    written = json.loads(json.dumps(to_json(described), allow_nan=False))
    assert from_json(environment.Environment, written, source="report.json") == described


def test_absent_packages_are_none() -> None:
    assert environment.installed_version("sdsa-no-such-distribution") is None


def test_a_broken_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    cuda = environment.describe_cuda()
    assert cuda.devices == ()
    assert "ModuleNotFoundError" in (cuda.error or "")


def test_a_broken_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    assert environment.describe_cuda().error == "RuntimeError: driver too old"


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("git", 5)])
def test_git_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert environment.git_revision() is None


def test_an_installed_package_has_no_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "sdsa_quant" / "environment.py"))
    assert environment.git_revision() is None
