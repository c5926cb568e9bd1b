"""Numbers and texts as a reader wants them in tables."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

_MOST_QUOTED = 60  # characters
_LISTED_LENGTHS = 8
_BETWEEN = " \u00b7 "  # numbers of a list, whose thousands have commas
# Control characters except the line break: names in files may hold them, and terminals obey them.
# Halves of surrogate pairs stand for the bytes of a file name that is not text.
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
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
    r"""`text` with its control characters, all except line breaks, written out as ``\x1b``."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
