"""Errors as data: the same error in the words of Python and in those of another caller."""

from __future__ import annotations

import pickle

import pytest

from sdsa_cli.flags import flag_spelling
from sdsa_quant.errors import CacheFormatError, DtypeError, Hint, InputError

FORCE = Hint("force", "to replace it", True)


@pytest.mark.parametrize(
    ("error", "python", "command_line"),
    [
        (InputError("no argument at all"), "no argument at all", "no argument at all"),
        (
            InputError("must be positive, got 0", argument="rows_per_group"),
            "rows_per_group must be positive, got 0",
            "--rows-per-group must be positive, got 0",
        ),
        (
            InputError("exists already", source="a.safetensors", hint=FORCE),
            "a.safetensors: exists already; give force=True to replace it",
            "a.safetensors: exists already; give --force to replace it",
        ),
        (
            InputError("8 rows", source="q", hint=Hint("requests", "to say whose they are")),
            "q: 8 rows; give requests to say whose they are",
            "q: 8 rows; give --requests to say whose they are",
        ),
        (
            InputError("too wide", hint=Hint("chunk", "to score it in chunks", 3)),
            "too wide; give chunk=3 to score it in chunks",
            "too wide; give --chunk 3 to score it in chunks",
        ),
    ],
    ids=["plain", "argument", "hint", "hint-without-value", "hint-with-value"],
)
def test_one_error_in_two_languages(error: InputError, python: str, command_line: str) -> None:
    assert str(error) == python
    assert error.text(flag_spelling) == command_line


@pytest.mark.parametrize("kind", [InputError, DtypeError, CacheFormatError])
def test_an_error_comes_back_whole_from_another_process(kind: type[InputError]) -> None:
    error = kind("is wrong", argument="keys", source="file", hint=FORCE)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.hint == FORCE
