"""Faults of captures are seen before anything is measured, and right captures have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.captures.check import check_capture
from sdsa_quant.files.tensor_source import open_tensors
from sdsa_quant.formats.fp8 import dequantize_fp8, quantize_fp8

Tensors = dict[str, torch.Tensor]
FIXTURE = Path(__file__).parents[2] / "fixtures" / "smollm2-layer12.safetensors"


def right() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2000, 128, generator=generator).bfloat16()
    queries = torch.randn(8, 128, generator=generator).bfloat16()
    return {"keys": keys, "queries": queries, "lengths": torch.tensor([1200, 800])}


def zeros(tensors: Tensors) -> None:
    tensors["keys"][1500:] = 0


def all_zeros(tensors: Tensors) -> None:
    tensors["keys"].zero_()


def zero_queries(tensors: Tensors) -> None:
    tensors["queries"][3] = 0


def repeated(tensors: Tensors) -> None:
    tensors["keys"][1000:] = tensors["keys"][:1000].clone()


def without_positions(tensors: Tensors) -> None:
    words = torch.randint(0, 300, (2000,), generator=torch.Generator().manual_seed(1))
    tensors["keys"] = tensors["keys"][words]


def constant(tensors: Tensors) -> None:
    tensors["keys"][7] = 2.5


def not_finite(tensors: Tensors) -> None:
    tensors["keys"][5, 5] = torch.nan


def wrong_lengths(tensors: Tensors) -> None:
    tensors["lengths"] = torch.tensor([1200, 799])


def heads(tensors: Tensors) -> None:
    tensors["keys"] = tensors["keys"].view(250, 8, 128)
    del tensors["lengths"]


def query_heads(tensors: Tensors) -> None:
    tensors["queries"] = torch.randn(8, 64, 128).bfloat16()


def fp8_per_row(tensors: Tensors) -> None:
    tensors["keys"] = dequantize_fp8(*quantize_fp8(tensors["keys"])).bfloat16()


def fp8_plain(tensors: Tensors) -> None:
    tensors["keys"] = tensors["keys"].to(torch.float8_e4m3fn).bfloat16()


def fp8_in_float32(tensors: Tensors) -> None:
    tensors["keys"] = (tensors["keys"].float() * 3.7).to(torch.float8_e4m3fn).float() / 3.7


WRONG: dict[Callable[[Tensors], None], str] = {
    zeros: "keys: 500 of 2,000 rows are zeros",
    all_zeros: "keys: 2,000 of 2,000 rows are zeros",
    zero_queries: "queries: 1 of 8 rows are zeros",
    repeated: "keys: 1,000 of 2,000 rows repeat an earlier one",
    without_positions: "before positions (RoPE) were applied",
    constant: "keys: 1 of 2,000 rows have one value",
    not_finite: "keys: 1 of 2,000 rows have values that are not finite",
    wrong_lengths: "keys: its lengths do not fit: ",
    heads: "keys: [250, 8, 128] without lengths of 250 requests: the middle dimension may be heads",
    query_heads: "queries: [8, 64, 128]: groups of 64 rows are more than 8",
    fp8_per_row: "were rounded to 8 bits or fewer",
    fp8_plain: "were rounded to 8 bits or fewer",
    fp8_in_float32: "were rounded to 8 bits or fewer",
}


def findings(path: Path) -> list[str]:
    return [f"{each.tensor}: {each.text}" for each in check_capture(open_tensors(path))]


@pytest.mark.parametrize(("break_it", "text"), WRONG.items(), ids=[each.__name__ for each in WRONG])
def test_a_fault_is_seen_and_no_other(
    tmp_path: Path, break_it: Callable[[Tensors], None], text: str
) -> None:
    tensors = right()
    break_it(tensors)
    save_file(tensors, tmp_path / "capture.safetensors")
    (found,) = findings(tmp_path / "capture.safetensors")
    assert text in found


def test_a_right_capture_has_none(tmp_path: Path) -> None:
    save_file(right(), tmp_path / "capture.safetensors")
    assert findings(tmp_path / "capture.safetensors") == []
    assert findings(FIXTURE) == []


def test_padding_and_weighted_heads_are_no_faults(tmp_path: Path) -> None:
    keys = torch.randn(2, 300, 128).bfloat16()
    keys[1, 120:] = 0
    heads = {"queries": torch.randn(8, 64, 128), "weights": torch.rand(8, 64)}
    save_file(
        {"keys": keys, "lengths": torch.tensor([300, 120]), **heads}, tmp_path / "p.safetensors"
    )
    assert findings(tmp_path / "p.safetensors") == []
    del heads["weights"]
    save_file(
        {**heads, "keys": keys[0].clone()}, tmp_path / "q.safetensors", {"score": "block-max"}
    )
    assert findings(tmp_path / "q.safetensors") == []
