"""Captures of every class of indexer: they select what the model selected, and say so if not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from sdsa_quant.capturing.attention import attention_capture
from sdsa_quant.capturing.capture import sdsa_capture
from sdsa_quant.capturing.check import compare_selection
from sdsa_quant.capturing.indexers import IndexerCall, find_indexers
from sdsa_quant.capturing.rule import SelectionRule, rule_of
from sdsa_quant.errors import CheckFailedError, InputError, UnsupportedError
from sdsa_quant.files.tensor_source import open_tensors
from sdsa_quant.selection.scores import block_max_scores, relu_sum_scores, select_blocks
from support.tiny_models import NAMES, dense_model, tiny_model, token_ids

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers

# Heads, what is selected and tokens of a key, of the tiny models.
RULES = {
    **dict.fromkeys(NAMES, (8, "tokens:32", 1)),
    "DeepseekV4": (8, "tokens:8", 4),
    "Glm5NextText": (8, "tokens:4", 16),
    "Qwen4ExpTextQSA": (4, "tokens:8", 4),
    "MiniMaxM3VL": (4, "blocks:16:3", 1),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_row_selects_what_the_model_selected(name: str, tmp_path: Path) -> None:
    model, ids = tiny_model(name, torch.bfloat16), token_ids(2, 90)
    with torch.no_grad(), sdsa_capture(model, tmp_path / "out") as capture:
        model(ids)
        # One more text in three parts: a prefill, a single token, and a second prefill.
        cache = model(ids[:1, :50], use_cache=True).past_key_values
        cache = model(ids[:1, 50:51], past_key_values=cache, use_cache=True).past_key_values
        model(ids[:1, 51:], past_key_values=cache, use_cache=True)
    heads, select, pool = RULES[name]
    number = 2 if name == "GlmMoeDsa" else 1  # layer 1 shares the selection of layer 0
    assert list(capture.layers) == ["layers.0", f"layers.{number}"]
    for layer, agreement in capture.agreements.items():
        assert agreement.same == agreement.rows == 3 * (90 - (pool - 1))
        assert agreement.first_other is None
        source = open_tensors(capture.paths[layer])
        read = {each: source.read(f"{layer}.{each}") for each in ("keys", "queries", "selected")}
        assert read["keys"].shape == (3 * (90 // pool), 128)
        assert read["queries"].shape == (270, heads, 128)
        assert source.read(f"{layer}.lengths").tolist() == [90 // pool] * 3
        assert source.read(f"{layer}.positions").tolist() == list(range(90)) * 3
        assert source.read(f"{layer}.requests").tolist() == [0] * 90 + [1] * 90 + [2] * 90
        assert (f"{layer}.weights" in source) is (name not in ("Qwen4ExpTextQSA", "MiniMaxM3VL"))
        rule = rule_of(source.metadata, "here")
        assert (rule.heads, rule.select, rule.pool) == (heads, select, pool)
        assert source.metadata["checked"] == f"{agreement.rows} of {agreement.rows} rows"
        assert source.metadata["indexer"] == f"{name}Indexer"
        # The parts of the third text are scored as the same text at once, near enough.
        first, third = read["keys"][: 90 // pool].float(), read["keys"][-(90 // pool) :].float()
        assert (first - third).abs().max() <= 0.05 * first.abs().max()


@pytest.mark.parametrize("name", ["DeepseekV32", "DeepseekV4", "Qwen4ExpTextQSA", "MiniMaxM3VL"])
def test_the_indices_are_those_of_the_public_formulas(name: str, tmp_path: Path) -> None:
    model, ids = tiny_model(name), token_ids(1, 80)
    with torch.no_grad(), sdsa_capture(model, tmp_path) as capture:
        model(ids)
    source = open_tensors(capture.paths["layers.1"])
    read = {each.name.removeprefix("layers.1."): source.read(each.name) for each in source}
    rule = rule_of(source.metadata, "here")
    lengths = rule.visible(read["positions"])
    row = 79
    if name == "MiniMaxM3VL":
        scores = block_max_scores(read["queries"], read["keys"], lengths, block=rule.block)
        chosen = select_blocks(scores, rule.k, lengths, block=rule.block, local=rule.local)
        assert torch.equal(chosen[row], read["selected"][row].long())
        return
    scores = relu_sum_scores(read["queries"], read["keys"], read.get("weights"))
    best = scores[row].sort(descending=True).indices[: rule.k].sort().values
    assert torch.equal(best, read["selected"][row].long())


def spoil_keys(call: IndexerCall) -> Any:
    return {"keys": call.keys.roll(1, dims=1)}


def spoil_heads(call: IndexerCall) -> Any:
    return {"query": call.query.roll(1, dims=2)}


def spoil_weights(call: IndexerCall) -> Any:
    return {"weights": call.weights * 0 + 1}


def spoil_first(call: IndexerCall) -> Any:
    return {"selected": call.selected.roll(1, dims=1)}


@pytest.mark.parametrize("spoil", [spoil_keys, spoil_heads, spoil_weights, spoil_first])
def test_a_capture_that_selects_something_else_is_not_written(
    spoil: Callable[[IndexerCall], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from sdsa_quant.capturing import layer

    add = layer.CapturedLayer.add

    def spoiled(self: Any, call: IndexerCall, every: int, offset: int) -> None:
        add(self, replace(call, **spoil(call)), every, offset)

    monkeypatch.setattr(layer.CapturedLayer, "add", spoiled)
    model = tiny_model("DeepseekV32")
    with (
        pytest.raises(CheckFailedError, match=r"layers\.0: .* rows select .* did not, first row"),
        torch.no_grad(),
        sdsa_capture(model, tmp_path / "out"),
    ):
        model(token_ids(1, 80))
    assert not (tmp_path / "out").exists()


def test_ties_of_float32_are_no_difference_and_real_ones_are() -> None:
    rule = SelectionRule("relu-sum", 1, 2)
    query, keys = torch.zeros(1, 1, 128), torch.zeros(4, 128)
    query[0, 0, 0], keys[:, 0] = 1, torch.tensor([3.0, 1.0, 1.0 + 2**-23, 0.5])
    lengths = torch.tensor([4])

    def agreement(*selected: int) -> tuple[int, int]:
        chosen = torch.tensor([selected])
        found = compare_selection(rule, query, keys, None, chosen, lengths)
        return found.same, found.tied

    assert agreement(0, 2) == (1, 0)
    assert agreement(0, 1) == (1, 1)
    assert agreement(0, 3) == agreement(0, -1) == agreement(0, 0) == agreement(0, 4) == (0, 0)


def test_a_model_is_as_it_was_afterwards(tmp_path: Path) -> None:
    model, ids = tiny_model("AXK2"), token_ids(1, 40)
    with torch.no_grad():
        before = model(ids).logits
        with sdsa_capture(model, tmp_path) as capture:
            during = model(ids).logits
        assert torch.equal(before, during)
        assert torch.equal(before, model(ids).logits)
    assert capture.layers["layers.0"].rows == 40
    assert all("forward" not in vars(each.module) for each in find_indexers(model).values())


def test_rows_may_be_thinned(tmp_path: Path) -> None:
    model = tiny_model("HYV4")
    with torch.no_grad(), sdsa_capture(model, tmp_path, every=8) as capture:
        for length in (33, 20):
            capture.offset = (length - 1) % 8
            model(token_ids(1, length))
    source = open_tensors(tmp_path)
    assert source.read("layers.0.positions").tolist() == [0, 8, 16, 24, 32, 3, 11, 19]
    assert source.read("layers.0.requests").tolist() == [0] * 5 + [1] * 3
    assert source.read("layers.0.keys").shape == (53, 128)


def test_what_cannot_be_captured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Linear has no indexer; known are Deepseek"):
        sdsa_capture(torch.nn.Linear(2, 2), tmp_path).__enter__()

    class NewIndexer(torch.nn.Module):
        pass

    with pytest.raises(UnsupportedError, match="a NewIndexer, an indexer that is not known"):
        sdsa_capture(torch.nn.Sequential(NewIndexer()), tmp_path).__enter__()
    model, ids = tiny_model("DeepseekV32"), token_ids(1, 20)
    with pytest.raises(InputError, match="every must be at least 1, got 0"):
        sdsa_capture(model, tmp_path, every=0).__enter__()
    with (
        pytest.raises(InputError, match=r"layers\.0 was not called"),
        sdsa_capture(model, tmp_path),
    ):
        pass
    mask = torch.ones(1, 20, dtype=torch.int64)
    mask[0, 0] = 0
    with (
        pytest.raises(InputError, match="must not be padded"),
        torch.no_grad(),
        sdsa_capture(model, tmp_path),
    ):
        model(ids, attention_mask=mask)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        with (
            pytest.raises(InputError, match=r"must begin a text or go on .* got position 20"),
            sdsa_capture(model, tmp_path),
        ):
            model(ids, past_key_values=cache)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "layers.1.safetensors").write_text("here")
    with pytest.raises(InputError, match="exists already"):
        sdsa_capture(model, tmp_path).__enter__()


def test_attention_heads_are_captured_after_rope(tmp_path: Path) -> None:
    model, ids = dense_model(), token_ids(1, 30)
    with torch.no_grad():
        before = model(ids).logits
        model.set_attn_implementation("eager")
        weights = model(ids, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")
        with attention_capture(model, tmp_path, [0, 3]) as capture:
            assert torch.allclose(model(ids).logits, before, atol=1e-6)
    names = [f"layers.{layer}.heads.{head}" for layer in (0, 1) for head in (0, 3)]
    assert list(capture.layers) == names
    for name in names:
        layer, head = (int(part) for part in name.split(".")[1::2])
        source = open_tensors(capture.paths[name])
        query, keys = source.read(f"{name}.queries")[:, 0], source.read(f"{name}.keys")
        scores = query @ keys.T / 128**0.5
        future = torch.ones(30, 30, dtype=torch.bool).triu(1)
        expected = scores.masked_fill(future, -torch.inf).softmax(-1)
        assert torch.allclose(expected, weights[layer][0, head], atol=1e-5)
    with pytest.raises(InputError, match="attention must be heads from 0 to 3, got 4"):
        attention_capture(model, tmp_path, [4]).__enter__()


def test_a_rule_is_read_as_it_is_written() -> None:
    for rule in (
        SelectionRule("relu-sum", 64, 2048, scale=128**-0.5),
        SelectionRule("block-max", 4, 16, block=128, local=1),
        SelectionRule("relu-sum", 32, 128, pool=16),
    ):
        assert rule_of(rule.metadata(), "file") == rule
    good = SelectionRule("relu-sum", 64, 2048).metadata()
    for name, value in (
        ("score", "max"),
        ("heads", "0"),
        ("select", "tokens"),
        ("select", "pages:3"),
        ("select", "tokens:0"),
        ("select", "blocks:128"),
        ("pool", "-1"),
        ("scale", "nan"),
        ("local", "x"),
    ):
        with pytest.raises(InputError, match="file: header field"):
            rule_of({**good, name: value}, "file")
    del good["pool"]
    with pytest.raises(InputError, match="header field pool is missing"):
        rule_of(good, "file")


def test_files_have_one_tensor_of_each_kind(tmp_path: Path) -> None:
    model = tiny_model("DeepseekV32")
    with torch.no_grad(), sdsa_capture(model, tmp_path, metadata={"model": "tiny"}):
        model(token_ids(1, 40))
    with safe_open(tmp_path / "layers.1.safetensors", "pt") as file:
        assert sorted(file.keys()) == [
            f"layers.1.{name}"
            for name in (
                "keys",
                "lengths",
                "norm",
                "norms",
                "positions",
                "queries",
                "requests",
                "rope",
                "selected",
                "weights",
            )
        ]
        metadata = file.metadata()
    assert metadata["format"] == "sdsa-capture"
    assert metadata["model"] == "tiny"
    assert metadata["class"] == "DeepseekV32ForCausalLM"
