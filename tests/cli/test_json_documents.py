"""Documents that any strict parser reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from sdsa_cli.json_documents import strict_json
from support.command_line import parse_document


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    path: Path


def test_undefined_numbers_are_null_and_names_stay() -> None:
    document = {
        "NaN.Infinity": math.nan,
        "list": [math.inf, -math.inf, 1.5, (1, None, True)],
        "point": Point(math.nan, Path("a/b")),
        3: "schlüssel",
    }
    parsed = parse_document(strict_json(document))
    assert parsed == {
        "NaN.Infinity": None,
        "list": [None, None, 1.5, [1, None, True]],
        "point": {"x": None, "path": "a/b"},
        "3": "schlüssel",
    }


def test_other_types_are_an_error() -> None:
    with pytest.raises(TypeError, match="set"):
        strict_json({"a": {1, 2}})
