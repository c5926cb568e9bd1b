"""Studies of what models select: blocks by the maximum of each head, and pooled keys.

The oracle ranks by `select_blocks` and `top_k_indices` on whole score matrices in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdsa_quant import mean_pooled_keys
from sdsa_quant.accuracy.metrics import RowAccuracy
from sdsa_quant.accuracy.top_k import top_k_indices
from sdsa_quant.errors import InputError
from sdsa_quant.formats.fp8 import dequantize_fp8, quantize_fp8
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from sdsa_quant.formats.transforms import TransformChoice
from sdsa_quant.selection.scores import block_max_scores, relu_sum_scores, select_blocks
from sdsa_quant.study import run
from sdsa_quant.study.inputs import Selection, StudyInputs, parse_selection
from sdsa_quant.study.layers import open_layers
from sdsa_quant.study.settings import StudySettings
from sdsa_quant.study.unit import fit_layer, measure_unit, unpack_rows

ROWS, HEADS, BLOCK, K = 5, 4, 16, 6


@pytest.fixture(params=["random", "real"])
def tensors(
    request: pytest.FixtureRequest, generator: torch.Generator, fixtures: Path
) -> dict[str, torch.Tensor]:
    """One request: random keys with an offset, or the keys and query rows of a real layer."""
    if request.param == "random":
        keys = (torch.randn(333, 128, generator=generator) + 0.5).bfloat16()
        queries = torch.randn(ROWS, HEADS, 128, generator=generator).bfloat16()
    else:
        real = load_file(fixtures / "smollm2-layer12.safetensors")
        keys = real["keys"][:1001].clone()
        # Real query rows stand for heads, of rows that see the same keys.
        queries = torch.stack([real["queries"].roll(row, 0)[:HEADS] for row in range(ROWS)])
    weights = torch.rand(ROWS, HEADS, generator=generator)
    return {"keys": keys, "queries": queries.contiguous(), "weights": weights}


@pytest.fixture
def capture(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, tmp_path / "capture.safetensors")
    return tmp_path / "capture.safetensors"


def _measure(path: Path, settings: StudySettings, **options: Any) -> list[list[RowAccuracy]]:
    """Rows of each setting."""
    (layer,) = open_layers(StudyInputs(path, path, causal=True, **options))
    result = measure_unit(layer, 0, settings, fit_layer(layer, settings))
    forced = layer.ranking.local
    return [unpack_rows(rows, settings.top_k, forced) for rows in result.rows]


def _nvfp4(values: torch.Tensor) -> torch.Tensor:
    return dequantize_nvfp4(*quantize_nvfp4(values)).view(values.shape)


def _fp8(values: torch.Tensor) -> torch.Tensor:
    return dequantize_fp8(*quantize_fp8(values)).view(values.shape)


@pytest.mark.parametrize("local", [0, 2])
def test_block_selection_is_that_of_float64(
    capture: Path, tensors: dict[str, torch.Tensor], local: int
) -> None:
    settings = StudySettings(formats=("nvfp4", "fp8", "bf16"), top_k=(K,), softmax_scale=0.02)
    found = _measure(capture, settings, score="block-max", block=BLOCK, local_blocks=local)
    keys, query = tensors["keys"], tensors["queries"]
    lengths = len(keys) - ROWS + 1 + torch.arange(ROWS)

    def scores_of(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return block_max_scores(query, keys, lengths, block=BLOCK).float()

    exact = scores_of(query, keys)
    best = select_blocks(exact, K, lengths, block=BLOCK, local=local)
    for rows, stored in zip(found, (_nvfp4, _fp8, lambda values: values), strict=True):
        chosen = select_blocks(
            scores_of(stored(query), stored(keys)), K, lengths, block=BLOCK, local=local
        )
        assert [row.row for row in rows] == list(range(ROWS * HEADS))
        for row in rows:
            at, head = divmod(row.row, HEADS)
            of_row, blocks = exact[at, head].double(), -(-int(lengths[at]) // BLOCK)
            ours, theirs = chosen[at, head], best[at, head]
            assert row.length == blocks
            assert row.top_k[0].recall == len(set(ours.tolist()) & set(theirs.tolist())) / K
            masses = [(of_row[each] * 0.02).exp().sum() for each in (ours, theirs)]
            assert row.top_k[0].mass == pytest.approx(float(masses[0] / masses[1]), rel=1e-9)
            free = K - local
            chance = (local + free * free / (blocks - local)) / K
            assert row.top_k[0].chance == pytest.approx(chance)
    recalls = [[row.top_k[0].recall for row in rows] for rows in found]
    assert min(recalls[0]) < 1
    assert sum(recalls[0]) < sum(recalls[1]) < sum(recalls[2]) == ROWS * HEADS


@pytest.mark.parametrize("score", ["relu-sum", "block-max", "rows"])
def test_pooled_keys(capture: Path, tensors: dict[str, torch.Tensor], score: str) -> None:
    pool = 4
    keys = mean_pooled_keys(tensors["keys"], pool)
    assert keys.shape[0] == len(tensors["keys"]) // pool
    means = tensors["keys"][:8].double().view(2, 4, 128).mean(1)
    assert torch.equal(keys[:2], means.bfloat16())
    query = tensors["queries"]
    if score == "rows":
        save_file({**tensors, "queries": query[:, 0].contiguous()}, capture)
        query = query[:, :1]
    weights = "weights" if score == "relu-sum" else None
    block = 2 if score == "block-max" else 1
    settings = StudySettings(formats=("nvfp4",), top_k=(K,))
    (rows,) = _measure(capture, settings, score=score, weights=weights, mean_pool=pool, block=block)
    lengths = (len(tensors["keys"]) - ROWS + 1 + torch.arange(ROWS)) // pool
    if score == "block-max":
        assert [row.length for row in rows[::HEADS]] == (-(-lengths // 2)).tolist()
        return  # blocks of pooled keys: lengths above, scores in the test before
    exact, stored = (
        relu_sum_scores(q, k, tensors["weights"]) if weights else (q[:, 0].double() @ k.double().T)
        for q, k in ((query, keys), (_nvfp4(query), _nvfp4(keys)))
    )
    best, chosen = (top_k_indices(each.float(), K, lengths).tolist() for each in (exact, stored))
    assert [row.length for row in rows] == lengths.tolist()
    assert [row.top_k[0].recall for row in rows] == [
        len(set(a) & set(b)) / K for a, b in zip(best, chosen, strict=True)
    ]


def test_transforms_change_no_selection_of_exact_formats(capture: Path) -> None:
    transforms = tuple(
        TransformChoice(gain=gain, center=c)
        for gain, c in (("none", "none"), ("8", "none"), ("none", "channel"))
    )
    settings = StudySettings(formats=("bf16",), transforms=transforms, top_k=(K,))
    plain, gained, centered = _measure(capture, settings, score="block-max", block=BLOCK)
    assert {row.top_k[0].recall for row in plain} == {1.0}
    assert gained == plain
    # Centered keys are rounded to BF16 again; the shift is added back before the maxima.
    assert all(row.relative_l2 < 0.01 for row in centered if row.relative_l2 is not None)
    assert min(row.top_k[0].recall for row in centered) >= 1 - 1 / K


@pytest.mark.parametrize("score", ["block-max", "relu-sum", "rows"])
def test_chunks_of_keys_and_rows_change_nothing(
    capture: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, score: str
) -> None:
    if score == "rows":
        save_file({**tensors, "queries": tensors["queries"][:, 0].contiguous()}, capture)
    settings = StudySettings(formats=("nvfp4", "fp8"), top_k=(K,))
    options = {"score": score, "block": BLOCK, "local_blocks": 1, "mean_pool": 2}
    whole = _measure(capture, settings, **options)
    monkeypatch.setattr("sdsa_quant.study.layers.KEYS_AT_A_TIME", 50)  # not whole blocks
    monkeypatch.setattr("sdsa_quant.study.unit.SCORE_BUDGET_BYTES", 1)  # one row at a time
    assert _measure(capture, settings, **options) == whole


def test_a_block_longer_than_a_chunk(capture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StudySettings(formats=("nvfp4",), top_k=(1,))
    whole = _measure(capture, settings, score="block-max", block=128)
    monkeypatch.setattr("sdsa_quant.study.layers.KEYS_AT_A_TIME", 50)
    assert _measure(capture, settings, score="block-max", block=128) == whole


def test_what_does_not_fit_is_refused(capture: Path, tmp_path: Path) -> None:
    def study(**options: Any) -> None:
        run(capture, capture, tmp_path / "report", formats=("nvfp4",), causal=True, **options)

    for text in ("blocks:16", "tokens:16:2", "keys:2", "tokens:0", "blocks:1:4", "blocks:x:2"):
        with pytest.raises(InputError, match=r"must be like tokens:2048 or blocks:128:16"):
            parse_selection(text)
    assert parse_selection("tokens:7") == Selection(1, (7,))
    with pytest.raises(InputError, match="select must name blocks for the score block-max"):
        study(score="block-max")
    with pytest.raises(InputError, match="select must name blocks"):
        study(score="block-max", select="tokens:4")
    with pytest.raises(InputError, match="top_k must be left out with select"):
        study(score="relu-sum", select="tokens:4", top_k=(4,))
    with pytest.raises(InputError, match="local_blocks must be fewer than are selected, 4, got 4"):
        study(score="block-max", select="blocks:16:4", local_blocks=4)
    with pytest.raises(InputError, match="local_blocks must be at least 0, and 0 where keys"):
        study(score="block-max", select="blocks:16:4", local_blocks=-1)
    with pytest.raises(InputError, match="local_blocks must be at least 0, and 0 where keys"):
        study(score="relu-sum", select="tokens:4", local_blocks=1)
    with pytest.raises(InputError, match="weights must be left out where each head"):
        study(score="block-max", select="blocks:16:4", weights="weights")
    with pytest.raises(InputError, match="mean_pool must be at least 1, got 0"):
        study(score="relu-sum", mean_pool=0)


def test_a_study_of_blocks_says_what_it_selects(capture: Path, tmp_path: Path) -> None:
    report = run(
        capture,
        capture,
        tmp_path / "report",
        score="block-max",
        select="blocks:16:6",
        local_blocks=1,
        formats=("nvfp4",),
        causal=True,
    )
    assert (report.inputs.block, report.inputs.local_blocks, report.settings.top_k) == (16, 1, (6,))
    assert report.layers[0].heads == HEADS
    assert report.layers[0].rows == ROWS
    assert report.overall[0].accuracy.rows == ROWS * HEADS
    assert report.overall[0].no_better_than_chance == (False,)
    worst = report.overall[0].recall(0).worst
    assert worst is not None
    assert worst.row < ROWS * HEADS
