"""Models with quantized indexers: nothing changes by identity, and selections are the format's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sdsa_quant.capturing.evaluate import evaluate_model, quantized_indexers
from sdsa_quant.errors import InputError, UnsupportedError
from support.tiny_models import NAMES, dense_model, save_model, tiny_model, token_ids

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers


@pytest.mark.parametrize("name", NAMES)
def test_identity_changes_nothing_and_fp4_does(name: str) -> None:
    model, ids = tiny_model(name, torch.bfloat16), token_ids(1, 160)
    with torch.no_grad():
        plain = model(ids)[0]
        with quantized_indexers(model, "bf16"):
            same = model(ids)[0]
        with quantized_indexers(model, "nvfp4", rotate="hadamard"):
            other = model(ids)[0]
        after = model(ids)[0]
    if name != "Dots3NoteText":  # whose keys are float32 in a model of BF16
        assert torch.equal(plain, same)
    assert torch.equal(plain, after)
    assert not torch.equal(plain, other)


def test_a_whole_evaluation(tmp_path: Path) -> None:
    save_model(tiny_model("DeepseekV32", torch.bfloat16), tmp_path / "model")
    (tmp_path / "text.txt").write_text("The keys of every request. " * 8)
    files = [tmp_path / "text.txt"]
    found = evaluate_model(str(tmp_path / "model"), files, ["bf16", "nvfp4", "fp8"], chunk=64)
    identity, nvfp4, fp8 = found.formats
    assert identity.tokens == nvfp4.tokens == 215
    assert (identity.kl_sum, identity.kl_largest, identity.same_top) == (0, 0, 215)
    assert identity.perplexity == found.perplexity
    assert identity.kept == {layer: float(rows) for layer, rows in identity.rows.items()}
    assert identity.rows == {"layers.0": 216 - 32, "layers.1": 216 - 32}
    shares = [each.kept["layers.0"] / each.rows["layers.0"] for each in (nvfp4, fp8)]
    assert shares[0] < shares[1] < 1
    assert nvfp4.kl_sum > fp8.kl_sum > 0
    assert found.texts[0].tokens == 216
    whole = evaluate_model(str(tmp_path / "model"), files, ["nvfp4"])
    assert whole.formats[0].kl_sum == pytest.approx(nvfp4.kl_sum, rel=0.5)


def test_what_cannot_be_evaluated_is_refused(tmp_path: Path) -> None:
    model = tiny_model("DeepseekV32")
    for given, match in (
        ({"key_format": "int3"}, "format must be one of bf16"),
        ({"key_format": "nvfp4-covariance"}, "formats must be formats without a calibration"),
        ({"key_format": "nvfp4", "rotate": "random"}, "rotate must be one of none, hadamard"),
    ):
        with pytest.raises(InputError, match=match):
            quantized_indexers(model, **given).__enter__()
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no indexer"):
        quantized_indexers(dense_model(), "nvfp4").__enter__()
    with pytest.raises(InputError, match="texts must be given, got none"):
        evaluate_model(str(tmp_path), [], ["nvfp4"])
