"""A study of what `sdsa_capture` wrote ranks as the model selects, and needs no flag for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdsa_quant import sdsa_capture
from sdsa_quant.capturing.rule import rule_of
from sdsa_quant.errors import InputError
from sdsa_quant.files.safetensors_reader import header_metadata
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from sdsa_quant.selection.scores import block_max_scores, relu_sum_scores, select_blocks
from sdsa_quant.study import run
from support.tiny_models import tiny_model, token_ids

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers
# What each tiny model selects, and tokens of a key.
SELECTS = {"DeepseekV32": (32, 1), "DeepseekV4": (8, 4), "Qwen4ExpTextQSA": (8, 4)}


def captured(name: str, folder: Path) -> Path:
    """A capture of texts of 120, 120 and 75 tokens."""
    model = tiny_model(name, torch.bfloat16)
    with torch.no_grad(), sdsa_capture(model, folder):
        model(token_ids(2, 120))
        model(token_ids(1, 75))
    return folder


@pytest.mark.parametrize("name", SELECTS)
def test_recall_is_the_share_that_the_model_selects_again(name: str, tmp_path: Path) -> None:
    folder, (k, pool) = captured(name, tmp_path / "captured"), SELECTS[name]
    report = run(folder, folder, tmp_path / "report", formats=("bf16", "nvfp4"), top_k=(k,))
    inputs = report.inputs
    assert (inputs.score, inputs.pool, inputs.causal) == ("relu-sum", pool, True)
    assert (inputs.requests, inputs.positions) == ("*.requests", "*.positions")
    assert inputs.weights == (None if name == "Qwen4ExpTextQSA" else "*.weights")
    bf16, nvfp4 = report.overall
    assert bf16.recall(0).mean == 1

    # The same from the model's own selections: what NVFP4 selects of them, over rows longer than k.
    kept = []
    for layer in (0, 1):
        tensors = load_file(folder / f"layers.{layer}.safetensors")
        read = {each.removeprefix(f"layers.{layer}."): tensors[each] for each in tensors}
        starts = [0, *read["lengths"].cumsum(0).tolist()]
        stored_query = dequantize_nvfp4(*quantize_nvfp4(read["queries"]))
        stored_keys = dequantize_nvfp4(*quantize_nvfp4(read["keys"]))
        weights = read.get("weights", torch.ones(read["queries"].shape[:2]))
        for row, position in enumerate(read["positions"].tolist()):
            length = (position + 1) // pool
            if length <= k:
                continue
            start = starts[int(read["requests"][row])]
            part = slice(row, row + 1)
            keys = stored_keys[start : start + length]
            scores = relu_sum_scores(stored_query[part], keys, weights[part])[0]
            again = set(scores.float().topk(k).indices.tolist())
            kept.append(len(again & set(read["selected"][row].tolist())) / k)
    assert nvfp4.accuracy.rows_measured == 2 * (120 + 120 + 75) - 2 * 3 * (pool - 1)
    assert nvfp4.recall(0).mean == pytest.approx(sum(kept) / len(kept), abs=2e-3)
    assert nvfp4.recall(0).mean < 0.99


def test_blocks_are_selected_as_the_files_state(tmp_path: Path) -> None:
    folder = captured("MiniMaxM3VL", tmp_path / "captured")
    rule = rule_of(header_metadata(folder / "layers.0.safetensors"), folder)
    report = run(folder, folder, tmp_path / "report", formats=("bf16", "nvfp4"))
    inputs = report.inputs
    assert (inputs.score, inputs.block, inputs.local_blocks) == ("block-max", rule.block, 1)
    assert report.settings.top_k == (rule.k,)
    assert report.layers[0].heads == rule.heads
    bf16, nvfp4 = report.overall
    assert bf16.recall(0).mean == 1

    kept = []
    for layer in (0, 1):
        tensors = load_file(folder / f"layers.{layer}.safetensors")
        read = {each.removeprefix(f"layers.{layer}."): tensors[each] for each in tensors}
        starts = [0, *read["lengths"].cumsum(0).tolist()]
        query = dequantize_nvfp4(*quantize_nvfp4(read["queries"])).view(read["queries"].shape)
        stored = dequantize_nvfp4(*quantize_nvfp4(read["keys"]))
        for row, position in enumerate(read["positions"].tolist()):
            length = torch.tensor([position + 1])
            if -(-(position + 1) // rule.block) <= rule.k:
                continue
            start = starts[int(read["requests"][row])]
            keys = stored[start : start + position + 1]
            scores = block_max_scores(query[row : row + 1], keys, length, block=rule.block).float()
            chosen = select_blocks(scores, rule.k, length, block=rule.block, local=rule.local)
            for ours, model in zip(chosen[0].tolist(), read["selected"][row].tolist(), strict=True):
                kept.append(len(set(ours) & set(model)) / rule.k)
    assert nvfp4.recall(0).rows == len(kept)
    assert nvfp4.recall(0).mean == pytest.approx(sum(kept) / len(kept), abs=2e-3)
    assert nvfp4.recall(0).mean < 1
    given = run(folder, folder, tmp_path / "given", formats=("bf16",), select="blocks:8:3")
    assert (given.inputs.block, given.inputs.local_blocks) == (8, 0)


def test_what_is_given_goes_before_what_files_state(tmp_path: Path) -> None:
    folder = captured("DeepseekV32", tmp_path / "captured")
    asked = {"formats": ("bf16",), "top_k": (8,)}
    with pytest.raises(InputError, match="must be the position of each of the 2520 query rows"):
        run(folder, folder, tmp_path / "rows", score="rows", **asked)
    requests = [0] * 120 + [1] * 120 + [2] * 75
    report = run(folder, folder, tmp_path / "last", causal=True, requests=requests, **asked)
    assert report.inputs.positions is None
    assert report.inputs.requests == tuple(requests)


def change(path: Path, fields: dict[str, str], heads: int | None = None) -> None:
    """Write a file of a capture again with other metadata, or with fewer heads."""
    tensors, metadata = load_file(path), header_metadata(path)
    if heads is not None:
        name = next(each for each in tensors if each.endswith(".queries"))
        tensors[name] = tensors[name][:, :heads].contiguous()
    save_file(tensors, path, {**metadata, **fields})


def test_files_that_contradict_each_other_or_themselves_are_refused(tmp_path: Path) -> None:
    folder = captured("AXK2", tmp_path / "captured")
    first, second = (folder / f"layers.{layer}.safetensors" for layer in (0, 1))
    change(second, {"pool": "4"})
    with pytest.raises(InputError, match=r"has pool 4 in its metadata, and layers\.0\.saf.* has 1"):
        run(folder, folder, tmp_path / "report")
    change(second, {"pool": "1"}, heads=4)
    with pytest.raises(InputError, match="must have the 8 heads that its file's metadata states"):
        run(folder, folder, tmp_path / "report")
    change(first, {"select": "everything"})
    change(second, {"select": "everything"})
    with pytest.raises(InputError, match="header fields must say how a model selects"):
        run(folder, folder, tmp_path / "report")
