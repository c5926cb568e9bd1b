"""`sdsa eval` stands a model beside itself with quantized indexers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.command_line import Run
from support.tiny_models import dense_model, save_model, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tiny_model("DeepseekV32", torch.bfloat16), tmp_path / "model")
    (tmp_path / "text.txt").write_text("The keys of every request. " * 8)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model"


@pytest.mark.usefixtures("model")
def test_the_identity_is_zero_and_formats_are_compared(sdsa: Run) -> None:
    words = ("eval", "model", "--texts", "text.txt", "--formats", "bf16,nvfp4")
    document = sdsa(*words, "--json").document
    identity, nvfp4 = document["formats"]
    assert (identity["kl_mean"], identity["kl_largest"], identity["top1_agreement"]) == (0, 0, 1)
    assert identity["perplexity"] == document["perplexity"]
    assert [layer["overlap"] for layer in identity["layers"]] == [1, 1]
    assert nvfp4["kl_mean"] > 0
    assert all(0.5 < layer["overlap"] < 1 for layer in nvfp4["layers"])
    answer = sdsa(*words)
    answer.is_clean()
    assert "1 text, 215 predictions" in answer.stdout
    short = sdsa(*words, "--tokens", "20")
    short.is_clean()
    assert "no row sees more keys than it selects" in short.stdout


@pytest.mark.usefixtures("model")
def test_what_cannot_be_done_is_one_line(sdsa: Run) -> None:
    save_model(dense_model(), Path("dense"))
    for words, code, message in (
        (("model",), 2, "--texts must name a file, got none"),
        (("model", "--texts", "text.txt", "--formats", "int3"), 2, "format must be one of"),
        (
            ("model", "--texts", "text.txt", "--formats", "nvfp4-covariance"),
            2,
            "--formats must be formats without a calibration",
        ),
        (("model", "--texts", "text.txt", "--tokens", "1"), 2, "--texts must have two tokens"),
        (("dense", "--texts", "text.txt"), 3, "LlamaForCausalLM has no indexer"),
    ):
        answer = sdsa("eval", *words)
        assert answer.exit_code == code, answer.stderr
        assert answer.stderr.startswith(f"error: {message}"), answer.stderr
        assert answer.stderr.count("\n") == 1
