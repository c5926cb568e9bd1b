"""The header of a cache file: what its metadata says about the keys, written and checked.

Version 1 is for keys as they were captured. Keys that were transformed before they were stored have
version 2 and three more fields, so that a reader of version 1 cannot take them for plain ones.
Version 3 is for the rules that version 2 does not know, ``search`` and ``covariance``. It has those
three fields, and the digest of the calibration that the keys were quantized with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sdsa_quant.arguments import check_fields
from sdsa_quant.errors import InputError
from sdsa_quant.formats.nvfp4 import AMAX_OVER_6, COVARIANCE, FOUR_OVER_SIX
from sdsa_quant.formats.nvfp4 import RULES as SCALE_RULES
from sdsa_quant.formats.scale_order import LINEAR, SCALE_ORDERS, TILED
from sdsa_quant.formats.transforms import (
    CENTERS,
    NONE,
    ROTATIONS,
    KeyTransform,
    gain_text,
    require_gain,
    transform_label,
)
from sdsa_quant.layout import BF16, DIM, FORMATS, NVFP4, PAGE

from .kinds import CACHE

FORMAT = CACHE
VERSION = "1"
TRANSFORMED_VERSION = "2"
RULE_VERSION = "3"
NIBBLE_ORDER = "low-first"
_FIRST_RULES = (AMAX_OVER_6, FOUR_OVER_SIX)  # all that versions 1 and 2 know
RULES = {NVFP4: SCALE_RULES, BF16: (NONE,)}

INTERLEAVED = "interleaved"
SEPARATE = "separate"
LAYOUTS = (INTERLEAVED, SEPARATE)

_TRANSFORM_FIELDS = ("rotate", "gain", "center")
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class CacheHeader:
    """How a cache stores its keys."""

    format: str  # "nvfp4" or "bf16"; the file's header says "values"
    layout: str = INTERLEAVED  # or "separate"
    scale_order: str = LINEAR  # or "128x4", with NVFP4 in the separate layout
    source: str = ""  # name of the file that the keys came from
    rule: str = AMAX_OVER_6  # of NVFP4 codes and scales, or "4over6", "search", "covariance"
    rotate: str = NONE  # or "hadamard"
    gain: float = 1.0  # a power of two that the stored keys are multiplied by
    center: str = NONE  # or "channel": the file's key_mean was subtracted
    calibration: str = NONE  # of the rule covariance: the digest of its statistics

    def __post_init__(self) -> None:
        check_fields(self)
        _require_choice("format", self.format, FORMATS)
        _require_choice("layout", self.layout, LAYOUTS)
        _require_choice("scale_order", self.scale_order, SCALE_ORDERS)
        _require_choice("rule", self.rule, SCALE_RULES)
        _require_choice("rotate", self.rotate, ROTATIONS)
        _require_choice("center", self.center, CENTERS)
        require_gain(self.gain, str(self.gain))
        if self.format == BF16 and self.rule != AMAX_OVER_6:
            raise InputError(
                f"{self.rule} needs format nvfp4, got format {self.format}", argument="rule"
            )
        if self.calibration != NONE and (
            self.rule != COVARIANCE or not _DIGEST.fullmatch(self.calibration)
        ):
            raise InputError(
                f"must be a SHA-256 digest, with the rule {COVARIANCE}, got {self.calibration!r} "
                f"and rule {self.rule}",
                argument="calibration",
            )
        if self.scale_order == TILED and (self.layout != SEPARATE or self.format != NVFP4):
            raise InputError(
                f"{TILED} needs layout separate and format nvfp4, "
                f"got layout {self.layout} and format {self.format}",
                argument="scale_order",
            )

    @property
    def is_transformed(self) -> bool:
        """Whether the stored keys are not the captured ones."""
        return (self.rotate, self.gain, self.center) != (NONE, 1.0, NONE)

    @property
    def transform_label(self) -> str:
        """What was done to the keys, in words: ``center + hadamard + gain 128``, or ``none``."""
        return transform_label(self.rotate, gain_text(self.gain), self.center)

    def with_transform(self, transform: KeyTransform) -> CacheHeader:
        """The header of the same cache of keys that went through `transform`."""
        return replace(self, rotate=transform.rotate, gain=transform.gain, center=transform.center)

    def metadata(self) -> dict[str, str]:
        """The header's metadata, strings only as safetensors wants them.

        Raises
        ------
        ValueError
            The rule is ``covariance`` and its calibration is not known.
        """
        if self.rule == COVARIANCE and self.calibration == NONE:
            raise InputError(f"must be given for the rule {COVARIANCE}", argument="calibration")
        version = TRANSFORMED_VERSION if self.is_transformed else VERSION
        if self.rule not in _FIRST_RULES:
            version = RULE_VERSION
        more = {"rotate": self.rotate, "gain": repr(self.gain), "center": self.center}
        if version == RULE_VERSION:
            more["calibration"] = self.calibration
        return {
            "format": FORMAT,
            "version": version,
            "values": self.format,
            "layout": self.layout,
            "scale_order": self.scale_order,
            "nibble_order": NIBBLE_ORDER,
            "page_size": str(PAGE),
            "dim": str(DIM),
            "rule": self.rule if self.format == NVFP4 else NONE,
            **(more if version != VERSION else {}),
            "source": self.source,
        }

    @classmethod
    def from_metadata(cls, metadata: dict[str, str]) -> CacheHeader:
        """Read a header back.

        Raises
        ------
        ValueError
            A field is missing or has a value that this version does not know; it is named.
        """
        _require_field(metadata, "format", (FORMAT,))
        version = _require_field(metadata, "version", (VERSION, TRANSFORMED_VERSION, RULE_VERSION))
        key_format = _require_field(metadata, "values", FORMATS)
        _require_field(metadata, "nibble_order", (NIBBLE_ORDER,))
        _require_field(metadata, "page_size", (str(PAGE),))
        _require_field(metadata, "dim", (str(DIM),))
        rules = RULES[key_format]
        if key_format == NVFP4:
            rules = tuple(
                each for each in rules if (each in _FIRST_RULES) == (version < RULE_VERSION)
            )
        rule = _require_field(metadata, "rule", rules)
        return cls(
            format=key_format,
            layout=_require_field(metadata, "layout", LAYOUTS),
            scale_order=_require_field(metadata, "scale_order", SCALE_ORDERS),
            source=metadata.get("source", ""),
            rule=rule if key_format == NVFP4 else AMAX_OVER_6,
            calibration=_calibration_field(metadata, rule),
            **_transform_fields(metadata, version),
        )


def _calibration_field(metadata: dict[str, str], rule: str) -> str:
    """The digest of the rule ``covariance``; ``none`` with another rule of version 3."""
    if rule != COVARIANCE:
        if metadata.get("calibration", NONE) != NONE:
            raise InputError(
                f"header field calibration goes with rule {COVARIANCE}, got rule {rule}"
            )
        return NONE
    digest = metadata.get("calibration", "")
    if not _DIGEST.fullmatch(digest):
        raise InputError(f"header field calibration must be a SHA-256 digest, got {digest!r}")
    return digest


def _transform_fields(metadata: dict[str, str], version: str) -> dict[str, Any]:
    """The transform of a header: three fields in versions 2 and 3, none of them in version 1."""
    if version == VERSION:
        for name in _TRANSFORM_FIELDS:
            if name in metadata:
                raise InputError(
                    f"header field {name} goes with version {TRANSFORMED_VERSION}, "
                    f"got version {version}"
                )
        return {}
    text = metadata.get("gain", "")
    try:
        gain = float(text)
        require_gain(gain, text)
    except ValueError:
        raise InputError(f"header field gain must be a power of two, got {text!r}") from None
    return {
        "rotate": _require_field(metadata, "rotate", ROTATIONS),
        "gain": gain,
        "center": _require_field(metadata, "center", CENTERS),
    }


def _require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InputError(f"must be one of {', '.join(choices)}, got {value!r}", argument=name)


def _require_field(metadata: dict[str, str], name: str, choices: Sequence[str]) -> str:
    value = metadata.get(name)
    if value is None:
        raise InputError(f"header field {name} is missing; it must be {' or '.join(choices)}")
    if value not in choices:
        raise InputError(f"header field {name} must be {' or '.join(choices)}, got {value!r}")
    return value
