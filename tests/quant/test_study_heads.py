"""Studies of indexers with heads: rankings of the weighted sum of ReLUs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.accuracy.top_k import top_k_indices
from sdsa_quant.errors import InputError
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from sdsa_quant.formats.transforms import TransformChoice
from sdsa_quant.study.inputs import StudyInputs
from sdsa_quant.study.layers import open_layers
from sdsa_quant.study.settings import StudySettings
from sdsa_quant.study.unit import fit_layer, measure_unit, unpack_rows

KEYS, ROWS, HEADS, K = 300, 3, 16, 32


@pytest.fixture
def tensors(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "keys": (torch.randn(KEYS, 128, generator=generator) + 0.5).bfloat16(),
        "queries": torch.randn(ROWS, HEADS, 128, generator=generator).bfloat16(),
        "weights": torch.randn(ROWS, HEADS, generator=generator),
    }


@pytest.fixture
def capture(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, tmp_path / "capture.safetensors")
    return tmp_path / "capture.safetensors"


def _inputs(path: Path, **changes: Any) -> StudyInputs:
    return StudyInputs(path, path, **{"score": "relu-sum", "causal": True, **changes})


def _recalls(inputs: StudyInputs, settings: StudySettings) -> list[list[float]]:
    """Recall by setting and row."""
    (layer,) = open_layers(inputs)
    result = measure_unit(layer, 0, settings, fit_layer(layer, settings))
    return [
        [row.top_k[0].recall for row in unpack_rows(rows, settings.top_k)] for rows in result.rows
    ]


def _scores(query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    products = torch.einsum("rhd,kd->rhk", query.double(), keys.double()).relu()
    return (products * weights.double()[..., None]).sum(1).float()


@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "plain"])
def test_recall_is_that_of_the_weighted_sum(
    capture: Path, tensors: dict[str, torch.Tensor], weighted: bool
) -> None:
    keys, query = tensors["keys"], tensors["queries"]
    weights = tensors["weights"] if weighted else torch.ones(ROWS, HEADS)
    stored_keys = dequantize_nvfp4(*quantize_nvfp4(keys))
    stored_query = dequantize_nvfp4(*quantize_nvfp4(query))
    expected = []
    for row in range(ROWS):
        length = KEYS - ROWS + 1 + row
        part = slice(row, row + 1)
        exact = _scores(query[part], keys[:length], weights[part])
        stored = _scores(stored_query[part], stored_keys[:length], weights[part])
        best, chosen = (set(top_k_indices(each, K)[0].tolist()) for each in (exact, stored))
        expected.append(len(best & chosen) / K)
    inputs = _inputs(capture, weights="weights" if weighted else None)
    settings = StudySettings(formats=("nvfp4", "bf16"), top_k=(K,))
    recalls = _recalls(inputs, settings)
    assert recalls == [expected, [1.0] * ROWS]
    assert min(expected) < 1


def test_transforms_that_change_no_score_change_no_selection(capture: Path) -> None:
    # In bf16 a gain is exact; the shift of centered keys must be added before the ReLU.
    transforms = tuple(
        TransformChoice(gain=gain, center=c)
        for gain, c in (("none", "none"), ("8", "none"), ("none", "channel"), ("8", "channel"))
    )
    settings = StudySettings(formats=("bf16",), transforms=transforms, top_k=(K,))
    plain, gained, centered, both = _recalls(_inputs(capture, weights="weights"), settings)
    assert plain == gained == [1.0] * ROWS
    assert centered == both
    assert min(centered) >= 1 - 2 / K  # centered keys are rounded to BF16 again


def test_heads_are_not_taken_for_positions(capture: Path) -> None:
    with pytest.raises(InputError, match="groups of 16 rows, and a group has 1 to 8") as error:
        open_layers(_inputs(capture, score="rows"))
    assert error.value.hint is not None
    assert error.value.hint.argument == "score"
    (layer,) = open_layers(_inputs(capture))
    assert (layer.heads, layer.row_lengths) == (HEADS, (298, 299, 300))


def test_what_does_not_fit_is_refused(
    capture: Path, tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(
        InputError, match="score must be one of rows, relu-sum, block-max, got 'sum'"
    ):
        open_layers(_inputs(capture, score="sum"))
    with pytest.raises(InputError, match="weights must be left out"):
        open_layers(_inputs(capture, score="rows", weights="weights"))
    other = tmp_path / "other.safetensors"
    save_file({**tensors, "weights": tensors["weights"][:, :3].contiguous()}, other)
    with pytest.raises(InputError, match=r"weights must be BF16, F16, F32 \[3, 16\]"):
        open_layers(_inputs(other, weights="weights"))
    save_file({**tensors, "queries": tensors["queries"][:, 0].contiguous()}, other)
    with pytest.raises(InputError, match=r"must be \[rows, heads, 128\] for relu-sum"):
        open_layers(_inputs(other))
    weights = tensors["weights"].clone()
    weights[1, 2] = torch.nan
    save_file({**tensors, "weights": weights}, other)
    (layer,) = open_layers(_inputs(other, weights="weights"))
    with pytest.raises(InputError, match="weights must be finite, but row 1 is not"):
        layer.read_weights(range(ROWS))
