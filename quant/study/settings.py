"""What an accuracy study compares: every format with every transform, and how it measures them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sdsa_quant.arguments import check_fields
from sdsa_quant.errors import InputError
from sdsa_quant.formats.key_formats import KeyFormat, key_format
from sdsa_quant.formats.transforms import TransformChoice
from sdsa_quant.layout import DEFAULT_SOFTMAX_SCALE, DEFAULT_TOP_K

from .inputs import DEFAULT_FORMATS
from .results import SettingInfo, setting_label


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to store keys: a format after a transform."""

    format: KeyFormat
    transform: TransformChoice

    @property
    def label(self) -> str:
        """Short name for tables and plots: ``nvfp4``, or ``nvfp4, center + hadamard``."""
        return setting_label(self.format.name, self.transform.label)

    @property
    def info(self) -> SettingInfo:
        """The setting as a report names it."""
        return SettingInfo(self.format.name, self.transform.label, self.format.bytes_per_key)


@dataclass(frozen=True, slots=True)
class StudySettings:
    """Everything that a study measures at each layer and request."""

    formats: tuple[str, ...] = DEFAULT_FORMATS
    transforms: tuple[TransformChoice, ...] = (TransformChoice(),)
    top_k: tuple[int, ...] = DEFAULT_TOP_K
    softmax_scale: float = DEFAULT_SOFTMAX_SCALE

    def __post_init__(self) -> None:
        check_fields(self)
        for name, items in (("formats", self.formats), ("transforms", self.transforms)):
            if not items or len(set(items)) != len(items):
                raise InputError(f"must be given, each once, got {list(items)}", argument=name)
        for name in self.formats:
            key_format(name)
        if (
            not self.top_k
            or any(k < 1 for k in self.top_k)
            or len(set(self.top_k)) < len(self.top_k)
        ):
            raise InputError(
                f"must be distinct numbers from 1, got {list(self.top_k)}", argument="top_k"
            )
        if not (self.softmax_scale > 0 and math.isfinite(self.softmax_scale)):
            raise InputError(
                f"must be positive and finite, got {self.softmax_scale}", argument="softmax_scale"
            )

    @property
    def is_calibrated(self) -> bool:
        """Whether a format needs the statistics of other keys and query rows."""
        return any(key_format(name).is_calibrated for name in self.formats)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Transform by transform, every format."""
        return tuple(
            Setting(key_format(name), transform)
            for transform, name in itertools.product(self.transforms, self.formats)
        )


def transform_choices(
    rotations: Sequence[str], gains: Sequence[str], centers: Sequence[str]
) -> tuple[TransformChoice, ...]:
    """Every combination of the values given, the first of each first.

    Raises
    ------
    InputError
        One of them is empty, has a value twice, or a value is unknown.
    """
    for name, values in (("rotate", rotations), ("gain", gains), ("center", centers)):
        if not values or len(set(values)) < len(values):
            raise InputError(f"must be given, each once, got {list(values)}", argument=name)
    return tuple(
        TransformChoice(rotate, gain, center)
        for center, rotate, gain in itertools.product(centers, rotations, gains)
    )
