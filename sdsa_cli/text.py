"""Numbers and texts as a reader wants them in tables."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from html import escape

_MOST_QUOTED = 60  # characters
_LISTED_LENGTHS = 8
_BETWEEN = " \u00b7 "  # numbers of a list, whose thousands have commas
# What terminals and browsers obey instead of showing it, and names in files may hold: control
# characters, line breaks of every kind, marks of direction, spaces of no width. Halves of surrogate
# pairs stand for the bytes of a file name that is not text.
_OBEYED = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_NUMBERS = re.compile(r"[0-9]+(?:[.,][0-9]+)*(?:e[+-]?[0-9]+)?")
_BREAKS_AFTER = (
    "/._-:,;=+|\\"  # of words that have to break: as a reader would break a name or a path
)
# What tables themselves print beyond ASCII, for an encoding that lacks it.
_PLAIN = {"\u00b7": "-", "\u2500": "-", "\u2501": "=", "\u2026": "...", "\u00d7": "x"}


def shortened(text: str) -> str:
    """`text` as a message quotes it: the first 60 characters of a longer one."""
    return text if len(text) <= _MOST_QUOTED else text[:_MOST_QUOTED] + "..."


def encodable(text: str, encoding: str | None) -> str:
    """`text` as a stream of this encoding can write it.

    Rules and dots become ASCII where the encoding lacks them, and anything else that it lacks, such
    as letters of a tensor's name, ``\\xe9``. A result that cannot be shown is still a result.
    """
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        for character, plain in _PLAIN.items():
            text = text.replace(character, plain)
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def percent(share: float) -> str:
    """A share of 1 as a percentage to 3 digits, ``-`` where it is undefined."""
    return "-" if math.isnan(share) else f"{100 * share:.3g} %"


def byte_count(count: int) -> str:
    """Bytes in full and, from 1 MiB, also rounded: ``543,744`` or ``2,306,867,200 (2.15 GiB)``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count:,} ({count / size:.3g} {unit})"
    return f"{count:,}"


def similarity(value: float | None) -> str:
    """Four decimals, ``-`` where it is undefined; what is short of 1 never looks like 1."""
    if value is None:
        return "-"
    text = f"{value:.4f}"
    return ">0.9999" if text == "1.0000" and value < 1 else text


def error_size(value: float | None) -> str:
    """At most 4 significant digits and 8 characters besides a sign, ``-`` where it is undefined."""
    if value is None:
        return "-"
    # What 4 digits would write at length, 0.0001235 or 1.235e+06, has 3: 1.23e-04, 1.23e+06.
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 9999.5 else f"{value:.2e}"


def counted(count: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def ties_decide(rows: int, most: int) -> str:
    """What to say where ties decide the top-k of some rows, `most` equal keys left out in one."""
    return (
        f"TIES DECIDE {counted(rows, 'row')}: as many keys as are chosen, or more, equal the last "
        f"one chosen, up to {most:,}; their recall says little."
    )


def describe_lengths(lengths: Sequence[int]) -> str:
    """Context lengths in a few words: all of a few, otherwise their range and sum."""
    if not lengths:
        return "none"
    if len(lengths) == 1:
        return f"{lengths[0]:,}"
    total = f"sum {sum(lengths):,}"
    if min(lengths) == max(lengths):
        return f"{lengths[0]:,} each ({total})"
    if len(lengths) <= _LISTED_LENGTHS:
        return f"{_BETWEEN.join(f'{length:,}' for length in lengths)} ({total})"
    middle = statistics.median(lengths)
    return f"{min(lengths):,} to {max(lengths):,} (median {middle:,.0f}, {total})"


def visible(text: str) -> str:
    r"""`text` as one line that shows what is in it: ``\x1b``, ``\n`` and ``\u202e`` written out."""
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def longest_number(text: str) -> int:
    """Characters of the longest number in a text, 0 without any."""
    return max((len(match[0]) for match in _NUMBERS.finditer(text)), default=0)


def broken(text: str, width: int, *, within_words: bool = True) -> list[str]:
    """`text` in lines of at most `width` columns of a terminal.

    Lines break between words. A word that has no room in a line of its own breaks after a dot, a
    slash or the like, then between letters, and inside a number only where nothing else is left.

    Parameters
    ----------
    text : str
        One line; spaces at its beginning are kept.
    width : int
        Columns, at least 1.
    within_words : bool
        Whether long words break at all; else they stay whole in lines of their own, so that a path
        can be copied.
    """
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return [text]
    indent = text[: len(text) - len(text.lstrip(" "))]
    indent = indent if len(indent) < width else ""
    lines = [indent]
    for word in text.split():
        joined = lines[-1] + word if not lines[-1].strip() else f"{lines[-1]} {word}"
        if cell_len(joined) <= width:
            lines[-1] = joined
            continue
        parts = _word_parts(word, width - len(indent)) if within_words else [word]
        if lines[-1].strip():
            lines.append("")
        lines[-1] = indent + parts[0]
        lines += [indent + part for part in parts[1:]]
    return lines


def _word_parts(word: str, width: int) -> list[str]:
    """A word in parts of at most `width` columns, each broken off as late as reads well."""
    from rich.cells import cell_len

    parts = []
    while cell_len(word) > width:
        most = 1
        while most < len(word) and cell_len(word[: most + 1]) <= width:
            most += 1
        in_number = {
            end for span in _NUMBERS.finditer(word) for end in range(span.start() + 1, span.end())
        }
        ends = [end for end in range(1, most + 1) if end not in in_number]
        good = [end for end in ends if word[end - 1] in _BREAKS_AFTER]
        end = (good or ends or [most])[-1]
        parts.append(word[:end])
        word = word[end:]
    return [*parts, word]


def html_text(text: str) -> str:
    """`text` in an HTML page."""
    return escape(visible(text))


def as_csv_cell(text: str) -> str:
    """`text` for a cell of a CSV file, which spreadsheets take for a formula where it begins so."""
    shown = visible(text)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown
