"""Numbers and files that users give, however odd: one clear error and no wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sdsa_quant.errors import InputError
from sdsa_quant.files.text import numbers_in, read_json, read_text, whole_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        (" 64 ", 64),
        ("007", 7),
        ("0" * 5000 + "8", 8),
        ("2147483647", 2**31 - 1),
        ("2147483648", None),
        ("1" + "0" * 21, None),
        ("9" * 5000, None),
        ("-1", None),
        ("1.5", None),
        ("\u0663", None),
        ("\u00b2", None),
        ("", None),
    ],
    ids=["zero", "spaces", "zeros", "many-zeros", "largest", "too-large", "10^21", "5000-digits",
         "negative", "fraction", "other-digits", "superscript", "empty"],
)  # fmt: skip
def test_whole_numbers_are_ascii_digits_of_an_int32(text: str, number: int | None) -> None:
    assert whole_number(text) == number


def test_numbers_in_names_compare_as_numbers_of_any_length() -> None:
    assert numbers_in("layers.007.k") == numbers_in("h7")
    assert numbers_in("a" + "9" * 5000) != numbers_in("a" + "9" * 4999)
    assert numbers_in("a1\u00b2") == ("1",)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"pipe: must be a regular file, but is not"):
        read_text(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "is not usable JSON: it is nested too deeply"),
        (rb'{"\ud800": 1}', "contains a string that is not valid Unicode"),
        (b"{", "is not JSON: "),
        (b"\xff", "is not UTF-8 text: "),
        (b"9" * 5000, "is not JSON: "),
    ],
    ids=["nested", "surrogate", "cut", "bytes", "5000-digits"],
)
def test_json_that_cannot_be_used_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"x\.json: {message}"):
        read_json(tmp_path / "x.json")


def test_what_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        read_text(tmp_path / "nope")
    assert str(refused.value) == f"{tmp_path}/nope: cannot be read: No such file or directory"
