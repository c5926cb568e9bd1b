"""What a study compares: labels, combinations, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sdsa_cli.options import DEFAULT_TOP_K_TEXT, choose_softmax_scale, parse_top_k
from sdsa_quant.errors import InputError
from sdsa_quant.formats.key_formats import key_format
from sdsa_quant.layout import DEFAULT_SOFTMAX_SCALE, DEFAULT_TOP_K
from sdsa_quant.study.settings import Setting, StudySettings, TransformChoice, transform_choices


@pytest.mark.parametrize(
    ("choice", "label"),
    [
        (TransformChoice(), "none"),
        (TransformChoice(rotate="hadamard"), "hadamard"),
        (TransformChoice(center="channel", gain="2^-3"), "center + gain 2^-3"),
        (TransformChoice("hadamard", "auto", "channel"), "center + hadamard + gain auto"),
    ],
)
def test_labels(choice: TransformChoice, label: str) -> None:
    assert choice.label == label
    setting = Setting(key_format("fp8"), choice)
    assert setting.label == ("fp8" if label == "none" else f"fp8, {label}")


def test_the_command_and_the_call_have_the_same_defaults() -> None:
    # 1 / sqrt(128) and 128 ** -0.5 are different floats, and make different studies.
    assert choose_softmax_scale(None) == StudySettings().softmax_scale == DEFAULT_SOFTMAX_SCALE
    assert parse_top_k(DEFAULT_TOP_K_TEXT) == StudySettings().top_k == DEFAULT_TOP_K


def test_every_combination_is_a_setting() -> None:
    choices = transform_choices(("none", "hadamard"), ("none", "auto"), ("none", "channel"))
    assert len(set(choices)) == 8
    assert choices[0] == TransformChoice()
    settings = StudySettings(formats=("nvfp4", "fp8"), transforms=choices)
    assert len(settings.settings) == 16
    assert [setting.format.name for setting in settings.settings[:3]] == ["nvfp4", "fp8", "nvfp4"]
    assert settings.settings[1].transform == choices[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"formats": ("int4",)}, "format must be one of"),
        ({"formats": ()}, "formats must be given, each once"),
        ({"formats": ("fp8", "fp8")}, "formats must be given, each once"),
        ({"transforms": ()}, "transforms must be given"),
        ({"top_k": (0,)}, "top_k must be distinct numbers from 1"),
        ({"top_k": (4, 4)}, "top_k must be distinct numbers from 1"),
        ({"top_k": ()}, "top_k must be distinct numbers from 1"),
        ({"softmax_scale": math.inf}, "softmax_scale must be positive and finite"),
        ({"softmax_scale": 0.0}, "softmax_scale must be positive and finite"),
    ],
)
def test_refuses_settings(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        StudySettings(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rotate": "givens"}, "rotate must be one of none, hadamard, got 'givens'"),
        ({"center": "mean"}, "center must be one of none, channel, got 'mean'"),
        ({"gain": "3"}, "gain must be none, auto or a power of two"),
    ],
)
def test_refuses_transforms(options: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TransformChoice(**options)
