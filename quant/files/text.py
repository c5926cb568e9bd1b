"""Text that users give: whole numbers in it, and files of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sdsa_quant.errors import InputError
from sdsa_quant.layout import INT32_MAX

# Ten digits are enough for an int32; Python itself refuses to convert some thousand.
_MAX_TEXT_BYTES = 200_000_000
_WHOLE_NUMBER = re.compile(r"0*([0-9]{1,10})")


def whole_number(text: str) -> int | None:
    """The number from 0 to 2^31 - 1 that `text` is in ASCII digits; None for any other text."""
    match = _WHOLE_NUMBER.fullmatch(text.strip())
    number = int(match[1]) if match else None
    return number if number is not None and number <= INT32_MAX else None


def numbers_in(name: str) -> tuple[str, ...]:
    """The runs of digits in a name, without leading zeros: equal where the numbers are equal."""
    return tuple(digits.lstrip("0") for digits in re.findall("[0-9]+", name))


def read_text(path: Path) -> str:
    """A whole UTF-8 text file.

    Raises
    ------
    InputError
        It is not a regular file (a pipe would be waited for), is larger than any that is written
        here, cannot be read, or is not UTF-8.
    """
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: must be a regular file, but is not")
        size = path.stat().st_size
        if size > _MAX_TEXT_BYTES:
            raise InputError(f"{path}: has {size:,} bytes, more than {_MAX_TEXT_BYTES:,}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text: {error}") from None


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises
    ------
    InputError
        As `read_text`; it is not JSON, or a string in it is not valid Unicode (half of a surrogate
        pair).
    """
    text = read_text(path)
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise InputError(f"{path}: is not usable JSON: it is nested too deeply") from None
    except UnicodeEncodeError:
        raise InputError(f"{path}: contains a string that is not valid Unicode") from None
    except ValueError as error:
        raise InputError(f"{path}: is not JSON: {error}") from None
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
