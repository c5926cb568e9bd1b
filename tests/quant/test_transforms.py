"""The algebra of the transforms: what they keep, how they are undone, and what the gain is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdsa_quant.errors import InputError
from sdsa_quant.formats import blocks
from sdsa_quant.formats.nvfp4 import quantize_nvfp4
from sdsa_quant.formats.transforms import (
    KeyMean,
    KeyTransform,
    TransformChoice,
    automatic_gain,
    fit_transforms,
    gain_text,
    hadamard,
    parse_gain,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "none"), (128.0, "128"), (0.125, "0.125"), (2.0**21, "2^21"), (2.0**-40, "2^-40")],
    ids=["none", "whole", "fraction", "large", "small"],
)
def test_gains_are_written_exactly(value: float, text: str) -> None:
    assert gain_text(value) == text
    assert parse_gain(text) == value


def hadamard_matrix() -> torch.Tensor:
    """float64 ``[128, 128]`` by its definition."""
    signs = [[(-1) ** bin(i & j).count("1") for j in range(128)] for i in range(128)]
    return torch.tensor(signs, dtype=torch.float64) / math.sqrt(128)


def test_hadamard_is_its_matrix(generator: torch.Generator) -> None:
    values = torch.randn(3, 5, 128, generator=generator)
    wanted = values.double() @ hadamard_matrix()
    assert hadamard(values).shape == values.shape
    assert torch.allclose(hadamard(values).double(), wanted, atol=1e-6, rtol=0)
    matrix = hadamard_matrix()
    assert torch.allclose(matrix @ matrix.T, torch.eye(128, dtype=torch.float64))


def test_hadamard_of_one_hot_is_exact() -> None:
    rotated = hadamard(torch.eye(128))
    assert torch.equal(rotated, rotated.T)
    assert torch.equal(rotated.sign(), hadamard_matrix().sign().float())
    assert rotated.abs().unique().tolist() == [pytest.approx(1 / math.sqrt(128), rel=1e-7)]


def test_hadamard_of_small_integers_is_exact(generator: torch.Generator) -> None:
    # Sums of integers round nowhere, so that only the last factor does.
    values = torch.randint(-8, 9, (50, 128), generator=generator).bfloat16()
    sums = values.double() @ hadamard_matrix().sign()
    assert torch.equal(hadamard(values), sums.float() * (1 / math.sqrt(128)))


def test_hadamard_does_not_depend_on_the_pass(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    values = torch.randn(70, 128, generator=generator)
    whole = hadamard(values)
    monkeypatch.setattr(blocks, "values_per_pass", lambda device: 3 * 128)
    assert torch.equal(hadamard(values), whole)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("transform", ["hadamard", "center", "gain"])
def test_keys_are_not_written(count: int, transform: str, generator: torch.Generator) -> None:
    keys = torch.randn(count, 128, generator=generator)
    before = keys.clone()
    made = TRANSFORMS[transform]
    made.restore_keys(made.apply_keys(keys))
    made.apply_query(keys)
    assert torch.equal(keys, before)


def test_hadamard_refuses_another_size() -> None:
    with pytest.raises(InputError, match=r"values must be \[..., 128\], got \[2, 64\]"):
        hadamard(torch.zeros(2, 64))


TRANSFORMS = {
    "none": KeyTransform(),
    "hadamard": KeyTransform(rotate="hadamard"),
    "gain": KeyTransform(gain=2.0**9),
    "center": KeyTransform(mean=torch.linspace(-3, 3, 128)),
    "all": KeyTransform("hadamard", 2.0**-5, torch.linspace(-3, 3, 128)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_scores_are_kept(transform: KeyTransform, generator: torch.Generator) -> None:
    keys = torch.randn(200, 128, generator=generator).bfloat16()
    query = torch.randn(4, 128, generator=generator).bfloat16()
    transformed = transform.apply_query(query).double() @ transform.apply_keys(keys).double().T
    scores = transformed / transform.gain + transform.score_shifts(query)[:, None]
    assert torch.allclose(scores, query.double() @ keys.double().T, atol=1e-4, rtol=0)
    # The ranking needs neither the gain nor the shift undone.
    ranking = transformed.argsort(dim=1, descending=True)
    assert torch.equal(ranking, scores.argsort(dim=1, descending=True))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_keys_come_back(transform: KeyTransform, generator: torch.Generator) -> None:
    keys = torch.randn(200, 128, generator=generator).bfloat16()
    before = keys.clone()
    restored = transform.restore_keys(transform.apply_keys(keys).float())
    assert torch.allclose(restored, keys.float(), atol=2e-6, rtol=0)
    assert torch.equal(keys, before)


def test_a_gain_is_undone_exactly(generator: torch.Generator) -> None:
    keys = torch.randn(200, 128, generator=generator).bfloat16()
    transform = KeyTransform(gain=2.0**-30)
    assert torch.equal(transform.restore_keys(transform.apply_keys(keys)), keys.float())


def test_a_transform_that_changes_nothing_copies_nothing() -> None:
    keys = torch.zeros(3, 128, dtype=torch.bfloat16)
    assert KeyTransform().apply_keys(keys) is keys
    assert KeyTransform().changes_nothing
    assert not any(t.changes_nothing for name, t in TRANSFORMS.items() if name != "none")


@given(
    amax=st.floats(min_value=2.0**-25, max_value=2.0**50, allow_subnormal=False, width=32),
)
def test_automatic_gain_is_the_largest_that_saturates_nothing(amax: float) -> None:
    gain = automatic_gain(amax)
    assert math.frexp(gain)[0] == 0.5
    assert gain * amax <= 1792 < 2 * gain * amax


@pytest.mark.parametrize(("amax", "gain"), [(1792, 1), (1792.5, 0.5), (896, 2), (0, 1)])
def test_automatic_gain_at_its_edges(amax: float, gain: float) -> None:
    assert automatic_gain(amax) == gain


def test_automatic_gain_takes_small_keys_out_of_the_subnormal_scales(
    generator: torch.Generator,
) -> None:
    keys = (torch.randn(100, 128, generator=generator) * 0.004).bfloat16()
    plain = quantize_nvfp4(keys)[1].view(torch.uint8)
    assert (plain < 8).float().mean() > 0.9
    (transform,) = fit_transforms(lambda: (keys[:30], keys[30:]), [TransformChoice(gain="auto")])
    gained = quantize_nvfp4(transform.apply_keys(keys))[1].view(torch.uint8)
    assert (gained >= 8).all()
    assert (gained <= 0x7E).all()


def test_the_automatic_gain_is_that_of_the_transformed_keys() -> None:
    # One-hot keys of 2048: rotated, their magnitudes are 2048 / sqrt(128) = 181.
    keys = torch.eye(128) * 2048
    plain, rotated = fit_transforms(
        lambda: iter(keys), [TransformChoice(gain="auto"), TransformChoice("hadamard", "auto")]
    )
    assert (plain.gain, rotated.gain) == (0.5, 8)
    # The mean key of two is their middle, and 1024 from each.
    two = torch.zeros(2, 128)
    two[0, 0] = 2048
    choices = [TransformChoice("none", gain, "channel") for gain in ("auto", "2^-1")]
    centered, fixed = fit_transforms(lambda: (two[:1], two[1:]), choices)
    assert (centered.gain, fixed.gain) == (1, 0.5)
    assert centered.mean is not None
    assert centered.mean[0] == 1024
    assert fit_transforms(lambda: (), [TransformChoice(gain="auto")])[0].gain == 1


@pytest.mark.parametrize(
    ("text", "factor"),
    [("none", 1.0), ("auto", None), ("64", 64.0), ("0.25", 0.25), ("2^-3", 0.125), ("2^40", 2**40)],
)
def test_gains_by_name(text: str, factor: float | None) -> None:
    assert parse_gain(text) == factor


@pytest.mark.parametrize("text", ["3", "0", "-2", "nan", "inf", "2^41", "2^x", "2^", "", "fast"])
def test_refuses_a_gain(text: str) -> None:
    with pytest.raises(InputError, match=r"gain must be none, auto or a power of two"):
        parse_gain(text)


def test_the_mean_of_parts_is_the_mean_of_all(generator: torch.Generator) -> None:
    keys = torch.randint(-9, 9, (96, 128), generator=generator).bfloat16()
    mean = KeyMean()
    for part in (keys[:10], keys[10:10], keys[10:]):
        mean.add(part)
    assert torch.equal(mean.mean(), keys.double().mean(0).float())
    assert not KeyMean().mean().any()
