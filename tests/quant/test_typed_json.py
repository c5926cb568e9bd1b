"""JSON documents as dataclasses: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from sdsa_quant.errors import InputError
from sdsa_quant.files.typed_json import (
    field_docs,
    from_json,
    json_schema,
    json_text,
    to_json,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A part."""

    name: str
    """What it is called."""

    sizes: tuple[int, ...]
    """Its sizes,
    in keys."""

    undocumented: float | None = None


@dataclass(frozen=True, slots=True)
class Whole:
    """A document."""

    schema: Literal["sdsa.whole/1"]
    """Which document this is."""

    parts: tuple[Part, ...]
    """The parts."""

    by_name: dict[str, Part]
    """The same, by name."""

    file: Path
    """Where it is from."""

    requests: tuple[int, ...] | str | None
    """Numbers, or a name."""

    pair: tuple[str, float]
    """Two things."""

    flag: bool
    """Yes or no."""

    anything: Any
    """What is not looked at."""


PART = Part("a", (1, 2), 0.5)
WHOLE = Whole(
    schema="sdsa.whole/1",
    parts=(PART, Part("b", ())),
    by_name={"a": PART},
    file=Path("keys.safetensors"),
    requests=(0, 1),
    pair=("x", 1.0),
    flag=True,
    anything={"free": [1, None]},
)


def written() -> Any:
    """The document of `WHOLE` as a file would hold it."""
    return json.loads(json.dumps(to_json(WHOLE), allow_nan=False))


def test_what_is_written_is_read_back() -> None:
    assert from_json(Whole, written(), source="whole.json") == WHOLE


def test_fields_keep_their_names_and_their_order() -> None:
    assert list(to_json(WHOLE)) == list(Whole.__dataclass_fields__)
    assert to_json(WHOLE)["parts"][1] == {"name": "b", "sizes": [], "undocumented": None}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_write_is_null(value: float) -> None:
    assert to_json(Part("a", (), value))["undocumented"] is None


@pytest.mark.parametrize("requests", [None, "layers.*.requests", (3,)])
def test_a_union_reads_each_of_its_types(requests: object) -> None:
    data = written() | {"requests": to_json(requests)}

    assert from_json(Whole, data, source="whole.json").requests == requests


def test_a_whole_number_is_a_float_where_one_is_wanted() -> None:
    part = from_json(Part, {"name": "a", "sizes": [], "undocumented": 2}, source="part.json")

    assert isinstance(part.undocumented, float)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("flag",), 1, "field flag must be true or false, got 1"),
        (("file",), 7, "field file must be a path, got 7"),
        (("parts",), {}, "field parts must be a list, got an object"),
        (("parts", 1), [], r"field parts\[1\] must be an object, got a list of 0"),
        (("parts", 1, "name"), None, r"field parts\[1\].name must be a string, got null"),
        (("parts", 0, "sizes", 1), 2.5, r"field parts\[0\].sizes\[1\] must be an integer, got 2.5"),
        (("parts", 0, "sizes", 1), True, r"field parts\[0\].sizes\[1\] must be an integer"),
        (
            ("by_name", "a", "undocumented"),
            "x",
            "field by_name.a.undocumented must be a number or null",
        ),
        (("requests",), 1, "field requests must be a list or a string or null, got 1"),
        (("requests",), [0, "1"], r'field requests\[1\] must be an integer, got "1"'),
        (("pair",), ["x"], "field pair must have 2 items, got 1"),
        (("schema",), "sdsa.whole/2", 'must be an sdsa.whole/1 document, got schema "sdsa.whole/2'),
        (("schema",), 1, "must be an sdsa.whole/1 document, got schema 1"),
    ],
)
def test_a_wrong_value_is_named(path: tuple[str | int, ...], value: object, message: str) -> None:
    data = written()
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value

    with pytest.raises(InputError, match=rf"^whole.json: {message}"):
        from_json(Whole, data, source="whole.json")


@pytest.mark.parametrize("name", [name for name in to_json(WHOLE) if name != "schema"])
def test_a_missing_field_is_named(name: str) -> None:
    data = written()
    del data[name]

    with pytest.raises(InputError, match=rf"^whole.json: field {name} is missing$"):
        from_json(Whole, data, source="whole.json")


def test_a_missing_field_inside_is_named() -> None:
    data = written()
    del data["parts"][1]["undocumented"]

    with pytest.raises(InputError, match=r"field parts\[1\].undocumented is missing"):
        from_json(Whole, data, source="whole.json")


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(InputError, match=r"^whole.json: field more is unknown$"):
        from_json(Whole, written() | {"more": 1}, source="whole.json")


def test_a_document_without_a_schema_says_what_to_do() -> None:
    data = written()
    del data["schema"]

    with pytest.raises(InputError, match=r"has no field schema.* it has to be made again"):
        from_json(Whole, data | {"schema_version": 1}, source="whole.json")


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_what_is_not_an_object_is_refused(data: object) -> None:
    with pytest.raises(InputError, match=r"^whole.json: must be an object, got "):
        from_json(Whole, data, source="whole.json")


def test_field_docs_are_the_strings_below_the_fields() -> None:
    assert field_docs(Part) == {"name": "What it is called.", "sizes": "Its sizes,\nin keys."}
    assert set(field_docs(Whole)) == set(to_json(WHOLE))


def test_field_docs_come_from_parents_too() -> None:
    @dataclass(frozen=True)
    class More(Part):
        """A part with more."""

        extra: int = 0
        """What is more."""

    assert list(field_docs(More)) == ["name", "sizes", "extra"]


def test_the_json_schema_of_a_document() -> None:
    schema = json_schema(Whole)

    assert schema["required"] == list(to_json(WHOLE))
    assert schema["additionalProperties"] is False
    assert schema["description"] == " ".join((Whole.__doc__ or "").split())
    assert schema["properties"]["schema"] == {
        "description": "Which document this is.",
        "const": "sdsa.whole/1",
    }
    assert schema["properties"]["requests"]["anyOf"] == [
        {"type": "array", "items": {"type": "integer"}},
        {"type": "string"},
        {"type": "null"},
    ]
    assert schema["properties"]["by_name"]["additionalProperties"] == {"$ref": "#/$defs/Part"}
    assert schema["$defs"]["Part"]["properties"]["sizes"] == {
        "description": "Its sizes, in keys.",
        "type": "array",
        "items": {"type": "integer"},
    }


def test_the_text_has_no_character_that_a_terminal_obeys() -> None:
    text = json_text({"name": "a\x9b\udcff", "value": math.nan})

    assert text == '{\n  "name": "a\\u009b\\udcff",\n  "value": null\n}'
    assert json.loads(text) == {"name": "a\x9b\udcff", "value": None}
