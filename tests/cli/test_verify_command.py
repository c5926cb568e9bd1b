"""`sdsa verify` says what an engine gets wrong, and fails if it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdsa_quant import quantize_fp8, sdsa_capture
from support.command_line import Run
from support.tiny_models import tiny_model, token_ids

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The tensors of a capture in the folder `captured`."""
    monkeypatch.chdir(tmp_path)
    model = tiny_model("DeepseekV32")
    with torch.no_grad(), sdsa_capture(model, "captured"):
        model(token_ids(1, 192))
    both = [load_file(f"captured/layers.{layer}.safetensors") for layer in (0, 1)]
    return {**both[0], **both[1]}


def test_selections(sdsa: Run, captured: dict[str, torch.Tensor]) -> None:
    first, second = (captured[f"layers.{layer}.selected"] for layer in (0, 1))
    save_file({"topk_0": first, "topk_1": second}, "right.safetensors")
    answer = sdsa("verify", "right.safetensors", "captured")
    answer.is_clean()
    assert "layers.1        96    1.000" in answer.stdout
    assert "as the model" in answer.stdout
    save_file({"topk_0": second.clone(), "topk_1": second}, "mixed.safetensors")
    answer = sdsa("verify", "mixed.safetensors", "captured")
    assert answer.exit_code == 1
    assert answer.stderr == (
        "error: 1 of 2 layers are not what the model has: layers.0 layers-mixed-up\n"
    )
    assert (
        "layers.0: the engine selects for layers.0 what the model selects in layers.1; that "
        "explains 1.000 of it." in answer.stdout
    )
    answer = sdsa("verify", "mixed.safetensors", "captured", "--json")
    first_layer = answer.document["layers"][0]
    assert (first_layer["right"], first_layer["mistake"]) == (False, "layers-mixed-up")
    assert first_layer["explanations"][0]["share"] == 1


def test_a_cache(sdsa: Run, captured: dict[str, torch.Tensor]) -> None:
    codes, scales = quantize_fp8(captured["layers.1.keys"].roll(-64, 0))
    parts = [codes.view(torch.uint8).view(3, -1), scales.view(torch.uint8).view(3, -1)]
    dump = {
        "pages": torch.cat(parts, 1).view(3, 64, 132),
        "block_table": torch.arange(3, dtype=torch.int32)[None],
        "context_lengths": torch.tensor([192]),
    }
    save_file(dump, "dump.safetensors")
    answer = sdsa("verify", "dump.safetensors", "captured", "--layer", "layers.1")
    assert answer.exit_code == 1
    assert "layout  fp8-planes" in answer.stdout
    assert "the engine reads each page where the next one is" in answer.stdout
    which = sdsa("verify", "dump.safetensors", "captured")
    assert which.exit_code == 2
    assert which.stderr.endswith(
        "--layer must be one of layers.0, layers.1, got None; give --layer to name the layer of "
        "the cache\n"
    )
