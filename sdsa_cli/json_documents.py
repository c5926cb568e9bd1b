"""JSON documents that any strict parser reads: versioned, without NaN or Infinity.

Every document begins with ``schema``, such as ``sdsa.score/1``, and ``command``. A number that is
undefined (NaN) or infinite is ``null``.
"""

from __future__ import annotations

import json
from pathlib import Path

from sdsa_quant.files.outputs import folders_made


def strict_json(document: object) -> str:
    """JSON text of a document of dataclasses, mappings, sequences, paths and plain values.

    Raises
    ------
    TypeError
        The document holds a value of any other type.
    """
    from sdsa_quant.files.typed_json import json_text

    return json_text(document)


def json_for(text: str, encoding: str | None) -> str:
    r"""JSON text for a stream of this encoding: what it lacks becomes ``\uXXXX``, the same JSON."""
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(json.loads(text), indent=2)
    return text


def write_document(path: Path, document: object, *, force: bool) -> None:
    """Write a document to a file atomically, and make the folders above it."""
    from sdsa_quant.files.atomic_file import write_text

    with folders_made([path]):
        write_text(path, strict_json(document) + "\n", force=force)
