"""The examples of docs/how-to/capture-keys.md work as they stand, in their order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from sdsa_quant import open_cache
from support.command_line import Run
from support.tiny_models import save_model, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "capture-keys.md"
BLOCKS = re.compile(r"```(python|sh)\n(.*?)```", re.DOTALL)
EXPECTED_LENGTHS = {
    "from-engine": [150, 64],
    "one-request": [600],
    "cache": [400, 150, 50],
    "from-padded": [300, 120],
    "caches/layers.2.keys": [60, 42],
    "layer-caches/layer_1_keys": [60, 40],
}


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_examples_of_the_page(sdsa: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tiny_model("DeepseekV32"), tmp_path / "model")
    Path("book.txt").write_text("The keys of every request. " * 30)
    Path("letters.txt").write_text("Dear reader, " * 20)
    names: dict[str, Any] = {}
    for language, block in BLOCKS.findall(PAGE.read_text()):
        if language == "python":
            exec(block, names)
            continue
        for line in block.splitlines():
            answer = sdsa(*shlex.split(line)[1:])
            assert (answer.exit_code, answer.stderr) == (0, ""), line
    for name, lengths in EXPECTED_LENGTHS.items():
        assert open_cache(f"{name}.safetensors").context_lengths.tolist() == lengths
    source = open_cache("caches/layers.0.keys.safetensors").header.source
    assert f"`{source}`" in PAGE.read_text()
