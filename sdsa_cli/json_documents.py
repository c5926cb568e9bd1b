"""JSON documents that any strict parser reads: versioned, without NaN or Infinity.

Every document has ``schema_version`` and ``command`` first. A number that is undefined (NaN) or
infinite is ``null``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .output_paths import folders_made

SCHEMA_VERSION = 1
# What JSON allows in texts, but a terminal obeys, or UTF-8 cannot write: given as \uXXXX.
_UNSAFE = re.compile("[\x7f-\x9f\ud800-\udfff]")


def command_document(command: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Document of a command's result: ``schema_version`` and ``command``, then `fields`."""
    return {"schema_version": SCHEMA_VERSION, "command": command, **fields}


def strict_json(document: Any) -> str:
    """JSON text of a document of dataclasses, mappings, sequences, paths and plain values.

    Raises
    ------
    TypeError
        The document holds a value of any other type.
    """
    text = json.dumps(_plain(document), indent=2, allow_nan=False, ensure_ascii=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def write_document(path: Path, document: Mapping[str, Any], *, force: bool) -> None:
    """Write a document to a file atomically, and make the folders above it."""
    from sdsa_quant.files.atomic_file import write_text

    with folders_made([path]):
        write_text(path, strict_json(document) + "\n", force=force)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return value
