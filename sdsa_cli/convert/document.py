"""The JSON document of `sdsa convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sdsa_quant.environment import Environment, describe_environment

if TYPE_CHECKING:
    from sdsa_quant.engines.convert import ConvertedKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertDocument:
    """What `sdsa convert` read and wrote."""

    schema: Literal["sdsa.convert/1"] = "sdsa.convert/1"
    """Name and version of this document."""
    command: Literal["convert"] = "convert"
    """The command that wrote it."""
    dump: Path
    """The dump."""
    tensor: str
    """Tensor of the pages."""
    layout: str
    """The layout of a page: ``"fp8-rows"``, ``"fp8-planes"``, ``"mxfp4-rows"`` or
    ``"mxfp4-planes"``."""
    bytes_per_key: int
    """Bytes of a key with its scales in the dump."""
    path: Path
    """The file of keys."""
    file_bytes: int
    """Size of the file."""
    keys: int
    """Keys of all requests."""
    context_lengths: list[int]
    """Keys of each request."""
    environment: Environment
    """Where it was made."""


def convert_document(written: ConvertedKeys) -> ConvertDocument:
    """The document of a run."""
    cache = written.cache
    return ConvertDocument(
        dump=cache.path,
        tensor=cache.name,
        layout=cache.layout.name,
        bytes_per_key=cache.bytes_per_key,
        path=written.path,
        file_bytes=written.file_bytes,
        keys=written.keys,
        context_lengths=list(cache.context_lengths),
        environment=describe_environment(),
    )
