"""Every example in the help of every command works as it is typed there."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
import typer.main
from safetensors.torch import load_file, save_file
from typer.core import TyperArgument, TyperGroup, TyperOption
from typer.testing import CliRunner

from sdsa_cli.app import app
from sdsa_quant import quantize_fp8, sdsa_capture
from support.command_line import Run
from support.engine_dumps import engine_dump
from support.tiny_models import save_model, tiny_model, token_ids

COMMANDS = [command.name for command in app.registered_commands]


def help_of(command: str, columns: int) -> str:
    """What ``--help`` prints on a screen of so many columns."""
    words = [*command.split(), "--help"]
    answer = CliRunner().invoke(app, words, prog_name="sdsa", env={"COLUMNS": str(columns)})
    assert answer.exit_code == 0
    return answer.stdout


def examples(command: str, columns: int = 80) -> list[str]:
    """The examples as a shell takes them that they are pasted into from the help."""
    lines = help_of(command, columns).partition("Examples\n")[2].replace("\\\n", "").splitlines()
    return [" ".join(line.split()) for line in lines if line.startswith(" sdsa ")]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_breaks_no_word_and_no_example(command: str, columns: int) -> None:
    assert examples(command, columns) == examples(command, 300)
    shown = help_of(command, columns)
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown
    assert "<bool>" not in shown
    assert "{" not in shown.partition("Usage:")[2].splitlines()[0]


@pytest.mark.parametrize("command", ["", *COMMANDS])
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_shows_every_name_text_and_default(command: str, columns: int) -> None:
    shown = " ".join(help_of(command, columns).split())
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    source = group.commands[command] if command else group
    assert source.params
    for param in source.params:
        assert isinstance(param, TyperOption | TyperArgument)
        for word in [*param.opts, *param.secondary_opts, param.metavar or ""]:
            assert word in shown or param.param_type_name == "argument"
        assert param.help, f"{param.name} says nothing"
        assert " ".join(param.help.split()) in shown
        if isinstance(param.default, str):
            assert f"[default: {param.default}]" in shown
    assert " ".join((source.help or "").split()) in shown


@pytest.fixture
def workplace(tmp_path: Path, fixtures: Path, monkeypatch: pytest.MonkeyPatch, sdsa: Run) -> Path:
    """A folder with the files that the examples name."""
    real = load_file(fixtures / "smollm2-layer12.safetensors")
    lengths = torch.tensor([1000, 700, 300], dtype=torch.int32)
    save_file({"keys": real["keys"][:2000], "lengths": lengths}, tmp_path / "keys.safetensors")
    save_file({"queries": real["queries"][:3]}, tmp_path / "queries.safetensors")
    (tmp_path / "capture").mkdir()
    # More keys than the example's limit has k, so that it can fail.
    drawn = torch.Generator().manual_seed(1)
    layers = {
        f"layers.{layer}.{name}": torch.randn(count, 128, generator=drawn)
        for layer in (0, 1)
        for name, count in (("keys", 2100), ("queries", 2))
    }
    save_file(layers, tmp_path / "capture" / "layers.safetensors")
    (tmp_path / "layers").mkdir()
    for layer in (0, 1):
        tensors = {"keys": torch.ones(100, 128), "lengths": torch.tensor([60, 40])}
        save_file(tensors, tmp_path / "layers" / f"layer_{layer}.safetensors")
    (tmp_path / "book.txt").write_text("The keys of every request. " * 30)
    (tmp_path / "letters.txt").write_text("Dear reader, " * 20)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=pytest.mark.slow if name == "study" else ()) for name in COMMANDS],
)
def test_examples_run(workplace: Path, sdsa: Run, command: str) -> None:
    lines = examples(command)
    assert lines, "every command has examples"
    if command in ("capture", "eval"):
        save_model(tiny_model("DeepseekV32"), workplace / "model")
    if command == "convert":
        save_file(engine_dump("fp8-planes", [100, 64]).tensors, workplace / "dump.safetensors")
    if command == "verify":
        model = tiny_model("DeepseekV32")
        with torch.no_grad(), sdsa_capture(model, workplace / "captured"):
            model(token_ids(1, 128))
        layers = load_file(workplace / "captured" / "layers.0.safetensors")
        save_file({"layers.0": layers["layers.0.selected"]}, workplace / "selections.safetensors")
        codes, scales = quantize_fp8(layers["layers.0.keys"].view(2, 64, 128))
        pages = [codes.view(torch.uint8), scales[..., None].view(torch.uint8)]
        table = torch.tensor([[0, 1]], dtype=torch.int32)
        dump = {"pages": torch.cat(pages, -1), "block_table": table, "lengths": torch.tensor([128])}
        save_file(dump, workplace / "dump.safetensors")
    if command != "quantize-cache":
        made = ("-o", "cache.safetensors", "--lengths", "lengths")
        sdsa("quantize-cache", "keys.safetensors", *made).is_clean()
    for folder in {"report": ["report"], "compare": ["before", "after"]}.get(command, []):
        files = ("capture", "capture", "-o", folder)
        sdsa("study", *files, "--formats", "nvfp4", "--workers", "1", "--no-plots").is_clean()
    for line in lines:
        answer = sdsa(*shlex.split(line)[1:])
        assert answer.exit_code == 0, f"{line}: {answer.stderr}"
        assert answer.stderr == "", line
