"""JSON documents that any strict parser reads: versioned, without NaN or Infinity.

Every document begins with ``schema``, such as ``sdsa.score/1``, and ``command``. A number that is
undefined (NaN) or infinite is ``null``.
"""

from __future__ import annotations

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


def write_document(path: Path, document: object, *, force: bool) -> None:
    """Write a document to a file atomically, and make the folders above it."""
    from sdsa_quant.files.atomic_file import write_text

    with folders_made([path]):
        write_text(path, strict_json(document) + "\n", force=force)
