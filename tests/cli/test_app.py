"""The frame of `sdsa`: quick help, exit codes, one line for each error, completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import typer.main
from typer.core import TyperArgument, TyperGroup, TyperOption
from typer.testing import CliRunner

import sdsa_quant
from sdsa_cli import __version__
from sdsa_cli.app import SdsaGroup, app
from sdsa_quant.errors import (
    CacheFormatError,
    CheckFailedError,
    DtypeError,
    InputError,
    UnsupportedError,
)
from support.command_line import Run

HEAVY_MODULES = ("torch", "triton", "cutlass", "safetensors", "numpy", "matplotlib")
# What a command's own module may not import either, before the command runs.
HELP_LINES = (
    ("--help",),
    ("--version",),
    ("quantize-cache", "--help"),
    ("score", "--help"),
    ("inspect", "--help"),
    ("study", "--help"),
    ("report", "--help"),
    ("compare", "--help"),
)

HELP_PROBE = f"""
import sys
from sdsa_cli.__main__ import main
sys.argv = ["sdsa", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
loaded = [name for name in {HEAVY_MODULES!r} if name in sys.modules]
assert not loaded, loaded
"""


@pytest.mark.parametrize("arguments", HELP_LINES, ids=" ".join)
def test_help_loads_nothing_heavy(arguments: tuple[str, ...]) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", HELP_PROBE, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    assert answer.stderr == ""


WITHOUT_NUMPY = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "numpy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from sdsa_cli.__main__ import main
main()
"""


@pytest.mark.parametrize("command", ["quantize-cache", "study"])
def test_a_clean_run_says_nothing_of_a_missing_numpy(
    fixtures: Path, tmp_path: Path, command: str
) -> None:
    keys = str(fixtures / "smollm2-layer12.safetensors")
    line = [command, keys, "-o", str(tmp_path / "cache.safetensors"), "--json"]
    if command == "study":
        line += [keys, "--lengths", "lengths", "--no-plots"]
        line += ["--workers", "1"]  # in the one process that has no NumPy
    answer = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY, *line], capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stderr) == (0, "")


def test_help_is_quick() -> None:
    # 0.2 s on an idle machine. Processor time, and the least of five: other tests run beside it.
    def processor_seconds() -> float:
        command = [sys.executable, "-m", "sdsa_cli", "--help"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_utime + usage.ru_stime

    assert min(processor_seconds() for _ in range(5)) < 0.5


def test_version(sdsa: Run) -> None:
    answer = sdsa("--version")
    answer.is_clean()
    assert answer.stdout == f"sdsa {__version__}\n"


def test_the_distribution_has_the_version_of_the_code() -> None:
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "version" not in settings["project"]
    assert settings["project"]["dynamic"] == ["version"]
    source = settings["tool"]["setuptools"]["dynamic"]["version"]
    assert source == {"attr": "sdsa_quant.__version__"}
    assert sdsa_quant.__version__ == __version__


def test_help_lists_the_commands_and_keeps_brackets(sdsa: Run) -> None:
    answer = sdsa("--help")
    answer.is_clean()
    for command in ("quantize-cache", "inspect"):
        assert command in answer.stdout
    assert "[requests, tokens, 128]" in " ".join(sdsa("quantize-cache", "-h").stdout.split())


def test_without_a_command_the_help_is_shown_and_usage_fails(sdsa: Run) -> None:
    answer = sdsa()
    assert answer.exit_code == 2
    assert "quantize-cache" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], ["No such command 'nothing'", "see sdsa --help"]),
        (["bensh"], ["Did you mean 'bench'? See sdsa --help"]),
        (["--nothing"], ["No such option: --nothing"]),
        (["quantize-cache"], ["Missing argument 'KEYS'", "see sdsa quantize-cache --help"]),
        (["score"], ["Missing argument 'CACHE'", "see sdsa score --help"]),  # it has --json [FILE]
        (["quantize-cache", "keys"], ["Missing option", "--output"]),
        (["quantize-cache", "k", "-o", "c", "--format", "fp8"], ["--format", "fp8", "nvfp4"]),
        (["quantize-cache", "k", "-o", "c", "--fromat", "bf16"], ["--fromat", "--format"]),
        (["inspect", "k", "--page", "-1"], ["--page", "0"]),
    ],
    ids=[
        "command",
        "near-command",
        "option",
        "argument",
        "no-words",
        "missing-option",
        "choice",
        "typo",
        "range",
    ],
)
def test_usage_errors_are_one_line(sdsa: Run, arguments: list[str], words: list[str]) -> None:
    sdsa(*arguments).fails_with(2, *words)


def failing_app(error: BaseException) -> typer.Typer:
    """An app in the frame of `sdsa` whose one command raises `error`."""
    app = typer.Typer(cls=SdsaGroup)

    @app.callback()
    def root(debug: bool = False) -> None:
        pass

    @app.command()
    def fail() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (CheckFailedError("the cache is bad"), 1, "error: the cache is bad"),
        (InputError("two\n  lines"), 2, "error: two lines"),
        (DtypeError("keys must be BF16"), 2, "error: keys must be BF16"),
        (CacheFormatError("field x"), 2, "error: field x"),
        (UnsupportedError("no GPU"), 3, "error: no GPU"),
        (PermissionError(13, "Permission denied", "/x/y"), 2, "error: /x/y: Permission denied"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (
            RuntimeError("[bold]odd[/bold]"),
            1,
            "error: internal error: RuntimeError: [bold]odd[/bold] "
            "(run with --debug for the traceback)",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_exceptions_become_a_line_and_an_exit_code(
    error: BaseException, exit_code: int, line: str
) -> None:
    answer = CliRunner().invoke(failing_app(error), ["fail"])
    assert answer.exit_code == exit_code
    assert answer.stderr == line + "\n"
    assert answer.stdout == ""


@pytest.mark.parametrize("arguments", [["--debug", "fail"], ["fail", "--debug"]], ids=" ".join)
def test_debug_anywhere_shows_the_traceback(arguments: list[str]) -> None:
    answer = CliRunner().invoke(failing_app(InputError("bad keys")), arguments)
    assert answer.exit_code == 2
    assert "Traceback" in answer.stderr
    assert answer.stderr.endswith("error: bad keys\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_offers_commands_and_choices(sdsa_process: Run, shell: str) -> None:
    script = sdsa_process(_SDSA_COMPLETE=f"source_{shell}")
    assert script.exit_code == 0
    assert "_SDSA_COMPLETE" in script.stdout

    def complete(line: str) -> str:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        words["_TYPER_COMPLETE_ARGS"] = line
        if shell == "fish":
            words["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
        return sdsa_process(_SDSA_COMPLETE=f"complete_{shell}", **words).stdout

    assert "quantize-cache" in complete("sdsa quant")
    assert "nvfp4" in complete("sdsa quantize-cache --format nv")


@pytest.mark.parametrize("command", [command.name for command in app.registered_commands])
def test_nothing_on_a_command_line_is_empty(command: str, sdsa: Run, tmp_path: Path) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for param in group.commands[command].params:
        if isinstance(param, TyperArgument):
            sdsa(command, "").fails_with(2, "an argument must not be empty, got ''")
        elif isinstance(param, TyperOption) and not param.is_flag:
            for name in param.opts:
                wanted = f"{name} must not be empty, got ''"
                sdsa(command, "x", "y", name, "").fails_with(2, wanted)
                if name.startswith("--"):
                    sdsa(command, "x", "y", f"{name}=").fails_with(2, wanted)
