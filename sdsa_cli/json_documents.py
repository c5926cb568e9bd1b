"""JSON documents that any strict parser reads: versioned, without NaN or Infinity.

Every document begins with ``schema``, such as ``sdsa.score/1``, and ``command``. A number that is
undefined (NaN) or infinite is ``null``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from .output_paths import folders_made

# What JSON allows in texts, but a terminal obeys, or UTF-8 cannot write: given as \uXXXX.
_UNSAFE = re.compile("[\x7f-\x9f\ud800-\udfff]")


def strict_json(document: object) -> str:
    """JSON text of a document of dataclasses, mappings, sequences, paths and plain values.

    Raises
    ------
    TypeError
        The document holds a value of any other type.
    """
    from sdsa_quant.files.typed_json import to_json

    text = json.dumps(to_json(document), indent=2, allow_nan=False, ensure_ascii=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def write_document(path: Path, document: object, *, force: bool) -> None:
    """Write a document to a file atomically, and make the folders above it."""
    from sdsa_quant.files.atomic_file import write_text

    with folders_made([path]):
        write_text(path, strict_json(document) + "\n", force=force)
