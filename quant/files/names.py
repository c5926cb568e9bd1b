"""Several names at once: their natural order, and what they begin and end with alike."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORDS = re.compile(r"\d+|[^\W\d_]+|[\W_]")


def natural_order(name: str) -> list[tuple[int, int, str, str]]:
    """Sort key under which runs of digits count as numbers: layers.2 before layers.10.

    The digits are compared as text, the longer run being the larger number, so that a run may have
    any length.
    """
    parts = [part for part in re.split("([0-9]+)", name) if part]
    return [_order_of_part(part) for part in parts]


def _order_of_part(part: str) -> tuple[int, int, str, str]:
    if not (part.isascii() and part.isdigit()):
        return 1, 0, part, ""
    digits = part.lstrip("0")
    return 0, len(digits), digits, part


def common_ends(names: Sequence[str]) -> tuple[str, str]:
    """What several names begin and end with alike, in whole words and numbers.

    ``layers.1.keys`` and ``layers.10.keys`` have ``("layers.", ".keys")`` in common.
    """
    words = [_WORDS.findall(name) for name in names]
    shortest = min(map(len, words))
    first = _common_count(words, shortest)
    last = _common_count([name[::-1] for name in words], shortest - first)
    return "".join(words[0][:first]), "".join(words[0][len(words[0]) - last :])


def without_common_ends(names: Sequence[str]) -> tuple[str, list[str]]:
    """Several names as a pattern with one ``*``, and what stands for it in each."""
    begin, end = common_ends(names) if len(names) > 1 else ("", "")
    return f"{begin}*{end}", [name[len(begin) : len(name) - len(end)] for name in names]


def _common_count(words: Sequence[Sequence[str]], most: int) -> int:
    """How many of the first words are the same in all."""
    for index in range(most):
        if len({name[index] for name in words}) > 1:
            return index
    return most
