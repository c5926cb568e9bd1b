"""What `print` shows of records that hold tensors: their shapes, not their values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

_MOST_ITEMS = 4  # of a list
_MOST_CHARACTERS = 80  # of any other value


def short_repr(record: Any) -> str:
    """A dataclass as ``Name(field=value, ...)`` in a few hundred characters.

    Tensors are ``int32 [3, 7]``, long lists their first items and their length; fields that begin
    with an underscore are left out.
    """
    fields = ", ".join(
        f"{field.name}={_short(getattr(record, field.name))}"
        for field in dataclasses.fields(record)
        if not field.name.startswith("_")
    )
    return f"{type(record).__name__}({fields})"


def _short(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        device = "" if str(getattr(value, "device", "cpu")) == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{device}"
    if isinstance(value, Path):
        return f"'{value}'"
    if isinstance(value, list | tuple) and len(value) > _MOST_ITEMS:
        first = ", ".join(map(_short, value[:_MOST_ITEMS]))
        return f"[{first}, ... {len(value):,} items]"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
