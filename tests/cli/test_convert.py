"""`sdsa convert`: an engine's cache to keys that the other commands read."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from support.command_line import Run
from support.engine_dumps import engine_dump


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_file(engine_dump("mxfp4-planes", [150, 64]).tensors, tmp_path / "dump.safetensors")
    return tmp_path / "dump.safetensors"


@pytest.mark.usefixtures("dump")
def test_it_says_the_layout_and_the_keys_can_be_used(sdsa: Run) -> None:
    words = ("convert", "dump.safetensors", "-o", "keys.safetensors")
    document = sdsa(*words, "--json").document
    assert (document["layout"], document["bytes_per_key"]) == ("mxfp4-planes", 68)
    assert (document["keys"], document["context_lengths"]) == (214, [150, 64])
    assert Path("keys.safetensors").stat().st_size == document["file_bytes"]
    answer = sdsa(*words, "--force")
    answer.is_clean()
    assert "layout   mxfp4-planes, 68 bytes a key" in answer.stdout
    sdsa("quantize-cache", "keys.safetensors", "-o", "cache.safetensors").is_clean()


@pytest.mark.usefixtures("dump")
def test_what_it_refuses_is_one_line(sdsa: Run) -> None:
    words = ("convert", "dump.safetensors", "-o", "keys.safetensors")
    answer = sdsa(*words, "--layout", "mxfp4-rows")
    assert answer.exit_code == 2
    start = "error: dump.safetensors: tensor pages: is not of the layout mxfp4-rows: "
    assert answer.stderr.startswith(start)
    answer = sdsa(*words, "--layout", "fp8-rows")
    assert answer.stderr.endswith("is not of the layout fp8-rows: a key has 68 bytes\n")
    assert not Path("keys.safetensors").exists()
    same = sdsa("convert", "dump.safetensors", "-o", "dump.safetensors", "--force")
    assert same.exit_code == 2
    assert "is the input" in same.stderr
