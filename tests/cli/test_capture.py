"""`sdsa capture`: from a model's folder and texts to files that a study reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.command_line import Run
from support.tiny_models import dense_model, save_model, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers
TEXT = "The indexer scores every key that a request has. " * 3


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in the folder `model` beside two texts of 147 and 60 tokens."""
    save_model(tiny_model("DeepseekV32", torch.bfloat16), tmp_path / "model")
    (tmp_path / "long.txt").write_text(TEXT)
    (tmp_path / "short.txt").write_text(TEXT[:60])
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model"


@pytest.mark.usefixtures("model")
def test_a_capture_says_what_it_holds(sdsa: Run) -> None:
    words = ("capture", "model", "--texts", "long.txt", "short.txt", "-o", "out", "--chunk", "32")
    document = sdsa(*words, "--json").document
    assert document["schema"] == "sdsa.capture/1"
    assert document["class_name"] == "DeepseekV32ForCausalLM"
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    assert document["texts"][0] == {"name": "long.txt", "sha256": digest, "tokens": 147}
    assert [text["tokens"] for text in document["texts"]] == [147, 60]
    for number, layer in enumerate(document["layers"]):
        assert layer["name"] == f"layers.{number}"
        assert (layer["score"], layer["heads"], layer["select"]) == ("relu-sum", 8, "tokens:32")
        assert layer["rows"] == layer["compared"] == layer["same"] == layer["keys"] == 207
        assert Path(layer["path"]).stat().st_size == layer["file_bytes"]
    tensors = load_file("out/layers.1.safetensors")
    assert tensors["layers.1.keys"].dtype == torch.bfloat16
    assert tensors["layers.1.lengths"].tolist() == [147, 60]

    answer = sdsa(*words, "--force")
    answer.is_clean()
    shown = answer.stdout
    assert "model    model, DeepseekV32ForCausalLM" in shown
    assert "layers.0  relu-sum  8      tokens:32   207   207  207 of 207" in shown
    again = sdsa(*words)
    assert again.exit_code == 2
    assert again.stderr == "error: out/layers.0.safetensors: exists already; give --force to " + (
        "replace it\n"
    )


@pytest.mark.usefixtures("model")
def test_long_texts_keep_fewer_rows(sdsa: Run) -> None:
    Path("long.txt").write_text(TEXT * 14)  # 2,058 tokens
    words = ("capture", "model", "--texts", "long.txt", "-o", "out", "--json")
    document = sdsa(*words).document
    assert (document["every"], document["layers"][0]["rows"]) == (4, 515)
    positions = load_file("out/layers.0.safetensors")["layers.0.positions"]
    assert positions[-1] == 2057
    few = sdsa(*words, "--every", "100", "--tokens", "300", "--force").document
    assert (few["every"], few["layers"][0]["rows"], few["layers"][0]["keys"]) == (100, 3, 300)


def test_attention_of_a_model_without_an_indexer(
    sdsa: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(dense_model(), tmp_path / "dense")
    Path("text.txt").write_text(TEXT)
    words = ("capture", "dense", "--texts", "text.txt", "-o", "out")
    refused = sdsa(*words)
    assert refused.exit_code == 3
    assert refused.stderr.startswith("error: LlamaForCausalLM has no indexer; known are ")
    document = sdsa(*words, "--attention", "0,3", "--json").document
    assert [each["name"] for each in document["layers"]] == [
        f"layers.{layer}.heads.{head}" for layer in (0, 1) for head in (0, 3)
    ]
    assert document["layers"][0]["score"] == "rows"
    assert document["layers"][0]["compared"] is None
    answer = sdsa(*words, "--attention", "1", "--force")
    answer.is_clean()
    assert "layers.0.heads.1  rows   1      -         147   147  -" in answer.stdout


@pytest.mark.usefixtures("model")
def test_what_cannot_be_done_is_one_line(sdsa: Run) -> None:
    Path("empty.txt").write_text("")
    Path("bytes.txt").write_bytes(b"\xff\xfe")
    Path("nothing").mkdir()
    for words, message in (
        (("model", "-o", "out"), "--texts must name a file, got none"),
        (("model", "--texts", "long.txt"), "Missing option '--output' / '-o'"),
        (("model", "--texts", "long.txt", "-o", ""), "-o must not be empty, got ''"),
        (("model", "--texts", "no.txt", "-o", "out"), "no.txt: cannot be read: No such file"),
        (("model", "--texts", "bytes.txt", "-o", "out"), "bytes.txt: must be text in UTF-8"),
        (("model", "--texts", "empty.txt", "-o", "out"), "empty.txt: has no tokens"),
        (("nothing", "--texts", "long.txt", "-o", "out"), "nothing: cannot be read as a model: "),
        (("model", "--texts", "long.txt", "-o", "out", "--every", "0"), "--every must be at least"),
        (
            ("model", "--texts", "long.txt", "-o", "out", "--attention", "x"),
            "--attention must be numbers of heads such as 0,5, got 'x'",
        ),
        (
            ("model", "--texts", "long.txt", "-o", "out", "--attention", "0"),
            "attention heads must have 128 values, got 32",
        ),
    ):
        answer = sdsa("capture", *words)
        assert answer.exit_code == 2, words
        assert answer.stderr.startswith(f"error: {message}"), answer.stderr
        assert answer.stderr.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.usefixtures("model")
def test_without_transformers_it_says_how_to_get_it(
    sdsa: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "transformers" else found(name, *rest),
    )
    answer = sdsa("capture", "model", "--texts", "long.txt", "-o", "out")
    assert answer.exit_code == 3
    assert answer.stderr == (
        "error: captures need transformers, which is not installed: "
        "pip install 'transformers==5.24.0'\n"
    )


@pytest.mark.usefixtures("model")
def test_a_capture_is_inspected_and_studied_without_a_flag(sdsa: Run) -> None:
    sdsa("capture", "model", "--texts", "long.txt", "short.txt", "-o", "out").is_clean()
    document = sdsa("inspect", "out", "--json").document
    uses = {each["name"]: each["use"] for each in document["tensors"]}
    assert {
        name.removeprefix("layers.0."): use
        for name, use in uses.items()
        if name.startswith("layers.0.") and use
    } == {
        name: name
        for name in (
            "keys",
            "lengths",
            "positions",
            "queries",
            "requests",
            "selected",
            "weights",
        )
    }
    shown = sdsa("inspect", "out").stdout
    assert "2 texts, 207 tokens" in shown
    assert "tokens:32" in shown
    words = ("study", "out", "out", "-o", "report", "--formats", "bf16,nvfp4", "--top-k", "32")
    report = sdsa(*words, "--no-plots", "--workers", "1", "--json").document
    assert report["inputs"]["score"] == "relu-sum"
    assert report["results"][0]["accuracy"]["top_k"][0]["recall"]["mean"] == 1
