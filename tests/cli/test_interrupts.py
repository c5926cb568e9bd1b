"""Ctrl-C ends a run with 130, also where the exception is swallowed."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Interrupts this process where a library's code drops the exception, then lets it go on.
SWALLOWED = """
import contextlib, signal, sys, types
from sdsa_cli.__main__ import main

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            with contextlib.suppress(BaseException):
                signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = ["sdsa", *{arguments!r}]
main()
"""
AT_AN_IMPORT = """
import signal, sys
from sdsa_cli.__main__ import main

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "sdsa_cli.app":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
main()
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("torch", ("bench", "--shape", "1,1,64", "--repeats", "1000000000", "--device", "cpu")),
        ("sdsa_cli.study.command", ("--version",)),
    ],
    ids=["before-the-work", "at-the-end"],
)
def test_a_swallowed_interrupt_still_ends_the_run(module: str, arguments: tuple[str, ...]) -> None:
    answer = run(SWALLOWED.format(module=module, arguments=arguments))
    assert (answer.returncode, answer.stderr) == (130, "error: interrupted\n")


def test_an_interrupt_of_the_first_imports_has_no_traceback() -> None:
    answer = run(AT_AN_IMPORT)
    assert (answer.returncode, answer.stderr) == (130, "error: interrupted\n")


def test_an_interrupt_says_what_is_not_lost() -> None:
    remark = (
        "from sdsa_cli.interrupts import remark_on_interrupt; "
        "remark_on_interrupt('the same command goes on from 47 %')\n"
    )
    arguments = ("bench", "--shape", "1,1,64", "--repeats", "1000000000", "--device", "cpu")
    answer = run(remark + SWALLOWED.format(module="torch", arguments=arguments))
    line = "error: interrupted; the same command goes on from 47 %\n"
    assert (answer.returncode, answer.stderr) == (130, line)


def test_interrupts_that_the_caller_ignores_stay_ignored() -> None:
    code = (
        "import signal; from sdsa_cli.interrupts import remember_interrupts\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN); remember_interrupts()\n"
        "assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN"
    )
    assert run(code).returncode == 0
