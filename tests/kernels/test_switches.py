"""Switches in the environment: every spelling of yes and no, and an error for anything else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from sdsa_kernels.cute import trust
from sdsa_kernels.switches import checked_mode, interpreting, is_on
from sdsa_quant.errors import InputError
from support.problems import make_problem

ON = ("1", "true", "True", "YES", "on", " on ")
OFF = ("0", "false", "FALSE", "no", "Off")
MISTYPED = ("", "2", "ture", "enabled", "y")


@pytest.mark.parametrize("default", [True, False])
def test_spellings(monkeypatch: pytest.MonkeyPatch, default: bool) -> None:
    monkeypatch.delenv("SDSA_X", raising=False)
    assert is_on("SDSA_X", default=default) is default
    for value in (*ON, *OFF):
        monkeypatch.setenv("SDSA_X", value)
        assert is_on("SDSA_X", default=default) is (value in ON)


@pytest.mark.parametrize("value", MISTYPED)
def test_a_mistyped_switch_is_an_error(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    problem = make_problem([64], generator=generator)
    monkeypatch.setenv("SDSA_CHECK", value)
    with pytest.raises(InputError, match=f"SDSA_CHECK in the environment .*, got '{value}'"):
        problem.run()
    monkeypatch.setenv("SDSA_TCGEN05", value)
    with pytest.raises(InputError, match=f"SDSA_TCGEN05 in the environment .*, got '{value}'"):
        trust.is_trusted(0, "tcgen05_nvfp4")


@pytest.mark.parametrize("value", ON)
def test_every_yes_checks_a_call(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    problem = make_problem([64], generator=generator)
    problem.requests[0] = -1
    monkeypatch.setenv("SDSA_CHECK", value)
    assert checked_mode()
    with pytest.raises(InputError, match="requests must be rows of block_table"):
        problem.run()


@pytest.mark.parametrize("value", OFF)
def test_every_no_leaves_the_tensor_cores_out(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SDSA_TCGEN05", value)
    assert not trust.is_trusted(0, "tcgen05_nvfp4")  # without asking a device


@pytest.mark.parametrize("value", ["1", "true", "on", "0", "false"])
def test_interpreting_is_tritons_own_answer(value: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    code = (
        "from sdsa_kernels.switches import interpreting; mine = interpreting(); "
        "from triton import knobs; print(mine, bool(knobs.runtime.interpret))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": value}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(value in ON)] * 2


def test_nothing_interprets_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not interpreting()
