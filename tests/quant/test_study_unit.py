"""One unit: eight keys by hand with every format, pieces and parts, causal rows, transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.accuracy.metrics import RowAccuracy
from sdsa_quant.errors import InputError
from sdsa_quant.formats.key_formats import KEY_FORMATS
from sdsa_quant.formats.transforms import hadamard
from sdsa_quant.study import layers as study_layers
from sdsa_quant.study import unit as study_unit
from sdsa_quant.study.inputs import StudyInputs
from sdsa_quant.study.layers import open_layers
from sdsa_quant.study.settings import StudySettings, transform_choices
from sdsa_quant.study.unit import (
    ERROR_BINS,
    ERROR_STEPS,
    UnitResult,
    count_errors,
    fit_layer,
    measure_unit,
    pack_rows,
    unpack_rows,
)
from support.studies import LENGTHS, layer_inputs, save_layers

# Eight keys (6, v, 0, ...) and the query row (0, 6, 0, ...): the scores are 6 v. The 6 sets every
# scale: 1 for NVFP4 and MXFP4, 6 / 448 for FP8. What the formats make of v, by hand:
#   E2M1, scale 1: 3.25 and 3.375 to 3, 4.5 to 4, 1.25 (a tie) to 1, .3125 to .5, -5.25 to -6
#   4over6: the same except 4.5 = 3 x 1.5, for which scale 1.5 wins; the others are draws or worse
#   FP8: v x 448 / 6 = 448, 242.7, 336, 252, 93.3, 23.3, -46.7, -392 to the codes below
VALUES = [6.0, 3.25, 4.5, 3.375, 1.25, 0.3125, -0.625, -5.25]
E2M1 = [6.0, 3.0, 4.0, 3.0, 1.0, 0.5, -0.5, -6.0]
DECODED = {
    "bf16": VALUES,
    "nvfp4": E2M1,
    "nvfp4-mixed": E2M1,
    "nvfp4-4over6": [6.0, 3.0, 4.5, 3.0, 1.0, 0.5, -0.5, -6.0],
    "mxfp4": E2M1,
    "fp8": [code * 6 / 448 for code in (448, 240, 320, 256, 96, 24, -48, -384)],
}
# Top-3 of the baseline: keys 0, 2, 3. Keys 1 and 3 tie at 3 in E2M1, and the lower index wins.
RECALL_AT_3 = {
    "bf16": 1.0,
    "nvfp4": 2 / 3,
    "nvfp4-mixed": 2 / 3,
    "nvfp4-4over6": 2 / 3,
    "mxfp4": 2 / 3,
    "fp8": 1.0,
}
# Ranks of v from 8 down: 8 5 7 6 4 3 2 1; where keys 1 and 3 tie, both have 5.5. The ranks less
# their mean have squares 42, with the tie 41.5, and the product is 41.5: sqrt(41.5 / 42).
SPEARMAN = {
    name: 1.0 if recall == 1 else math.sqrt(41.5 / 42) for name, recall in RECALL_AT_3.items()
}


@pytest.fixture
def hand(tmp_path: Path) -> StudyInputs:
    keys = torch.zeros(8, 128)
    keys[:, 0] = 6.0
    keys[:, 1] = torch.tensor(VALUES)
    query = torch.zeros(1, 128)
    query[0, 1] = 6.0
    path = tmp_path / "hand.safetensors"
    save_file({"keys": keys.bfloat16(), "queries": query.bfloat16()}, path)
    return StudyInputs(path, path)


def measure(inputs: StudyInputs, settings: StudySettings, request: int = 0) -> UnitResult:
    layer = open_layers(inputs)[0]
    return measure_unit(layer, request, settings, fit_layer(layer, settings))


def rows_of(result: UnitResult, settings: StudySettings) -> list[list[RowAccuracy]]:
    return [unpack_rows(rows, settings.top_k) for rows in result.rows]


@pytest.mark.parametrize("name", KEY_FORMATS)
def test_eight_keys_by_hand(name: str, hand: StudyInputs) -> None:
    settings = StudySettings(formats=(name,), top_k=(3, 8), softmax_scale=0.1)
    result = measure(hand, settings)
    (row,) = rows_of(result, settings)[0]
    scores, baseline = [6 * v for v in DECODED[name]], [6 * v for v in VALUES]
    differences = [s - b for s, b in zip(scores, baseline, strict=True)]
    norm = math.hypot(*baseline)
    assert (row.row, row.request, row.length) == (0, 0, 8)
    assert row.relative_l2 == pytest.approx(math.hypot(*differences) / norm, rel=1e-5)
    assert row.max_abs == pytest.approx(max(map(abs, differences)), rel=1e-5)
    product = math.fsum(s * b for s, b in zip(scores, baseline, strict=True))
    assert row.cosine == pytest.approx(product / norm / math.hypot(*scores), rel=1e-6)
    assert row.spearman == pytest.approx(SPEARMAN[name])
    at_3, at_8 = row.top_k
    assert at_3.recall == RECALL_AT_3[name]
    kept = (0, 2, 1 if at_3.recall < 1 else 3)
    masses = [
        math.fsum(math.exp(0.1 * baseline[key]) for key in some) for some in (kept, (0, 2, 3))
    ]
    assert at_3.mass == pytest.approx(masses[0] / masses[1])
    assert at_3.chance == 3 / 8
    assert (at_8.recall, at_8.mass, at_8.chance) == (1.0, 1.0, 1.0)
    errors = [d - v for d, v in zip(DECODED[name], VALUES, strict=True)]
    wanted = torch.zeros(128, dtype=torch.float64)
    wanted[1] = math.fsum(error**2 for error in errors)
    # FP8's scale 6 / 448 is rounded, and so is what it makes of 6.
    assert torch.allclose(result.channel_errors[0], wanted, rtol=1e-4, atol=1e-10)
    assert result.channel_squares[:2].tolist() == [8 * 36, math.fsum(v**2 for v in VALUES)]
    assert result.error_counts[0].sum() == 8


def test_the_error_histogram_by_hand() -> None:
    # Baseline -1, 1, -1, 1: deviation 1. Errors 0, 1/64, -1/128, 3: bins 0, 1, -1, the last.
    baseline = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    scores = baseline + torch.tensor([0.0, 1 / 64, -1 / 128, 3.0])
    counts = count_errors(scores, baseline)
    assert counts.shape == (ERROR_BINS,)
    used = {place - ERROR_STEPS: int(count) for place, count in enumerate(counts) if count}
    assert used == {0: 1, 1: 1, -1: 1, ERROR_STEPS - 1: 1}


def test_the_error_histogram_of_constant_scores() -> None:
    constant = torch.full((5,), 2.0)
    assert count_errors(constant, constant)[ERROR_STEPS] == 5
    assert count_errors(constant - 1, constant)[0] == 5


ALL = StudySettings(
    formats=tuple(KEY_FORMATS),
    transforms=transform_choices(
        ("none", "hadamard"), ("none", "auto", "2^-3"), ("none", "channel")
    ),
    top_k=(5, 64),
)


def same(first: UnitResult, second: UnitResult) -> None:
    assert torch.equal(first.rows.nan_to_num(-1.0), second.rows.nan_to_num(-1.0))
    assert torch.equal(first.error_counts, second.error_counts)
    assert first.profiles == second.profiles
    assert first.query_profiles == second.query_profiles
    assert first.query_rows_lost == second.query_rows_lost
    assert first.gains == second.gains


def test_rows_do_not_depend_on_the_pieces(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = layer_inputs(save_layers(tmp_path / "layers.safetensors", generator, rows=5))
    whole = measure(inputs, ALL, request=2)
    monkeypatch.setattr(study_unit, "SCORE_BUDGET_BYTES", 2 * (4 * 6 + 28) * LENGTHS[2])  # two rows
    same(measure(inputs, ALL, request=2), whole)
    # Keys in parts only change the order in which float64 sums over keys are added.
    monkeypatch.setattr(study_layers, "KEYS_AT_A_TIME", 64)
    parts = measure(inputs, ALL, request=2)
    assert torch.allclose(parts.channel_errors, whole.channel_errors, rtol=1e-12)
    same(parts, whole)


def test_scores_are_those_of_decoded_vectors(tmp_path: Path, generator: torch.Generator) -> None:
    path = save_layers(tmp_path / "layers.safetensors", generator)
    settings = StudySettings(
        formats=("fp8",), transforms=transform_choices(("hadamard",), ("none",), ("channel",))
    )
    layer = open_layers(layer_inputs(path))[0]
    (row, _) = rows_of(measure(layer_inputs(path), settings, request=2), settings)[0]
    keys, query = layer.read_keys(2, 0, 300), layer.read_query([4])
    mean = torch.cat([layer.read_keys(r, 0, n) for r, n in enumerate(LENGTHS)]).double().mean(0)
    stored = KEY_FORMATS["fp8"].round_trip(hadamard(keys.float() - mean.float()))
    rows = KEY_FORMATS["fp8"].round_trip(hadamard(query))
    scores = rows.double() @ stored.double().T + query.double() @ mean.float().double()
    baseline = query.double() @ keys.double().T
    assert row.relative_l2 == pytest.approx(
        float((scores - baseline).norm() / baseline.norm()), rel=1e-5
    )
    assert row.max_abs == pytest.approx(float((scores - baseline).abs().max()), rel=1e-4)


def test_bf16_without_a_transform_is_the_baseline(
    tmp_path: Path, generator: torch.Generator
) -> None:
    inputs = layer_inputs(save_layers(tmp_path / "layers.safetensors", generator))
    settings = StudySettings(formats=("bf16",))
    for row in rows_of(measure(inputs, settings, request=0), settings)[0]:
        assert (row.relative_l2, row.max_abs, row.cosine, row.spearman) == (0, 0, 1, 1)


def test_causal_rows_see_the_keys_up_to_their_own(
    tmp_path: Path, generator: torch.Generator
) -> None:
    path = save_layers(tmp_path / "layers.safetensors", generator, lengths=(8,), rows=4)
    settings = StudySettings(formats=("nvfp4",), top_k=(2,))
    causal = rows_of(measure(layer_inputs(path, causal=True), settings), settings)[0]
    assert [row.length for row in causal] == [5, 6, 7, 8]
    # CASES 15: the same as rows of requests that are cut off there.
    keys = open_layers(layer_inputs(path))[0].read_keys(0, 0, 8)
    query = open_layers(layer_inputs(path))[0].read_query(range(4))
    for place, row in enumerate(causal):
        cut = tmp_path / f"cut-{place}.safetensors"
        save_file(
            {"keys": keys[: 5 + place].clone(), "queries": query[place : place + 1].clone()}, cut
        )
        (alone,) = rows_of(measure(StudyInputs(cut, cut), settings), settings)[0]
        assert alone.length == row.length
        assert (alone.top_k, alone.spearman) == (row.top_k, row.spearman)
        assert alone.cosine == row.cosine


def test_outlier_channels_are_what_rotation_helps(
    tmp_path: Path, generator: torch.Generator
) -> None:
    # CASES 38: Gaussian keys with channel 5 times 100, and without.
    keys = torch.randn(400, 128, generator=generator)
    queries = torch.randn(8, 128, generator=generator)
    errors = {}
    for name, factor in (("plain", 1.0), ("outlier", 100.0)):
        keys[:, 5] *= factor
        queries[:, 5] /= factor
        path = tmp_path / f"{name}.safetensors"
        save_file({"keys": keys.bfloat16(), "queries": queries.bfloat16()}, path)
        settings = StudySettings(
            formats=("nvfp4-mixed",),
            transforms=transform_choices(("none", "hadamard"), ("none",), ("none",)),
            top_k=(16,),
        )
        errors[name] = [
            math.sqrt(math.fsum(row.relative_l2**2 for row in rows if row.relative_l2) / 8)
            for rows in rows_of(measure(StudyInputs(path, path), settings), settings)
        ]
    assert 0.8 < errors["plain"][1] / errors["plain"][0] < 1.25
    assert errors["outlier"][0] > errors["plain"][0]


def test_a_study_writes_nothing_into_its_inputs(tmp_path: Path, generator: torch.Generator) -> None:
    # FP32 keys and rows: what passes through unchanged must not be worked on in place.
    path = tmp_path / "keys.safetensors"
    keys, queries = (torch.randn(count, 128, generator=generator) for count in (70, 1))
    save_file({"keys": keys, "queries": queries}, path)
    (layer,) = open_layers(StudyInputs(path, path))
    measure_unit(layer, 0, ALL, fit_layer(layer, ALL))
    assert torch.equal(layer.keys.read(0), keys)
    assert torch.equal(layer.queries.read("queries"), queries)


def test_all_zero_keys_have_recall_1_and_undefined_ratios(tmp_path: Path) -> None:
    # CASES 25.
    path = tmp_path / "zero.safetensors"
    save_file({"keys": torch.zeros(130, 128).bfloat16(), "queries": torch.ones(2, 128)}, path)
    result = measure(StudyInputs(path, path), ALL)
    assert result.gains == (1.0, 1.0, 0.125) * 4
    for rows in rows_of(result, ALL):
        for row in rows:
            assert (row.relative_l2, row.cosine, row.spearman, row.max_abs) == (None, None, None, 0)
            assert [each.recall for each in row.top_k] == [1.0, 1.0]
    assert not result.channel_errors.any()


def test_a_request_without_rows_or_without_keys(tmp_path: Path, generator: torch.Generator) -> None:
    path = save_layers(tmp_path / "layers.safetensors", generator)
    empty = measure(layer_inputs(path), ALL, request=1)
    assert [row.length for row in rows_of(empty, ALL)[0]] == [0, 0]
    assert empty.profiles[0].blocks == 0
    no_rows = measure(layer_inputs(path, requests=(0, 0, 2, 3)), ALL, request=1)
    assert no_rows.rows.shape[:2] == (len(ALL.settings), 0)
    unseen = measure(layer_inputs(path, requests=(0, 0, 0, 3)), ALL, request=2)
    assert unseen.rows.shape[1] == 0
    assert unseen.profiles[0].blocks == 8 * LENGTHS[2]
    assert unseen.channel_errors[1].sum() > 0


@pytest.mark.parametrize("where", ["keys", "queries"])
def test_refuses_what_is_not_finite(where: str, tmp_path: Path) -> None:
    tensors = {"keys": torch.ones(40, 128), "queries": torch.ones(2, 128)}
    tensors[where][1, 7] = math.nan
    path = tmp_path / "nan.safetensors"
    save_file(tensors, path)
    words = {
        "keys": "tensor keys must be finite, but key 1 of request 0",
        "queries": "row 1 is not",
    }
    with pytest.raises(InputError, match=words[where]):
        measure(StudyInputs(path, path), StudySettings(formats=("nvfp4",)))


def test_scores_beyond_float32_are_invalid_rows(tmp_path: Path) -> None:
    # CASES 56: a row whose scores are not finite is marked, the other is not touched by it.
    queries = torch.ones(2, 128)
    queries[1] = 3e38
    path = tmp_path / "large.safetensors"
    save_file({"keys": torch.full((20, 128), 100.0), "queries": queries}, path)
    settings = StudySettings(formats=("fp8",), top_k=(2,))
    good, bad = rows_of(measure(StudyInputs(path, path), settings), settings)[0]
    assert good.valid
    assert good.top_k[0].recall == 1.0
    assert not bad.valid
    assert (bad.nonfinite_baseline, bad.top_k, bad.cosine) == (20, (), None)


def pack_and_unpack(rows: Sequence[RowAccuracy], top_k: Sequence[int]) -> list[RowAccuracy]:
    return unpack_rows(pack_rows(rows, top_k), top_k)


def test_rows_survive_packing(tmp_path: Path, generator: torch.Generator) -> None:
    inputs = layer_inputs(save_layers(tmp_path / "layers.safetensors", generator))
    for request in range(len(LENGTHS)):
        for rows in rows_of(measure(inputs, ALL, request), ALL):
            assert pack_and_unpack(rows, ALL.top_k) == rows
    invalid = RowAccuracy(3, 1, 9, 2, 0)
    assert pack_and_unpack([invalid], ALL.top_k) == [invalid]
    assert pack_and_unpack([], ALL.top_k) == []
