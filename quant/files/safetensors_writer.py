"""Pieces of writing a safetensors file at known offsets, for files too large to hold in memory.

The library's own writer takes every tensor at once. Here the header is made from the tensors' sizes
alone, and their data is written later, in any order and in parts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from sdsa_quant.errors import InputError

from .atomic_file import AtomicFile
from .tensor_memory import tensor_memory

if TYPE_CHECKING:
    import torch

Self = TypeVar("Self", bound="StreamedFile")

_HEADER_ALIGNMENT = 64  # so that the first tensor starts at a multiple of it in the mapped file


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """What a header says of one tensor."""

    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]
    bytes: int


def header_bytes(
    tensors: dict[str, HeaderEntry], metadata: dict[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The file's first bytes, and where each tensor starts in the file."""
    entries: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.bytes
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    start = 8 + len(text)
    offsets = {}
    for name, tensor in tensors.items():
        offsets[name] = start
        start += tensor.bytes
    return len(text).to_bytes(8, "little") + text, offsets


class StreamedFile:
    """A safetensors file that is written in parts, in any order, in bounded memory and atomically.

    A context manager: the file gets its final name when the block ends without an exception and
    every part was written, and is removed otherwise.

    Parameters
    ----------
    path : str or Path
        The file.
    tensors : dict of str to HeaderEntry
        Every tensor, in file order.
    metadata : dict of str to str
        The header's metadata.
    known : dict of str to torch.Tensor
        Tensors that are written at once.
    parts : int
        How many parts (pages, rows) there are to write besides.
    noun : str
        What a part is called.
    force : bool
        Whether to replace an existing file.

    Raises
    ------
    ValueError
        As `AtomicFile`; nothing is left behind then.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: dict[str, HeaderEntry],
        metadata: dict[str, str],
        known: dict[str, torch.Tensor],
        *,
        parts: int = 0,
        noun: str = "parts",
        force: bool = False,
    ) -> None:
        start, self._offsets = header_bytes(tensors, metadata)
        self.file_bytes = len(start) + sum(tensor.bytes for tensor in tensors.values())
        self._parts, self._noun, self._written = parts, noun, 0
        self._file = AtomicFile(path, force=force)
        try:
            self._file.write_at(0, start)
            for name, tensor in known.items():
                write_tensor(self._file, self._offsets[name], tensor)
        except BaseException:
            self._file.discard()
            raise

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._written != self._parts:
            missing = InputError(f"{self._parts} {self._noun} must be written, got {self._written}")
            self._file.__exit__(InputError, missing, None)
            raise missing
        self._file.__exit__(kind, error, trace)


def write_tensor(file: AtomicFile, offset: int, tensor: torch.Tensor) -> None:
    """Write a CPU tensor's values at `offset` bytes; errors as `AtomicFile.write_at`."""
    if tensor.numel():
        file.write_at(offset, tensor_memory(tensor.detach().contiguous()))
