"""Pieces of writing a safetensors file at known offsets, for files too large to hold in memory.

The library's own writer takes every tensor at once. Here the header is made from the tensors' sizes
alone, and their data is written later, in any order and in parts.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from .atomic_file import AtomicFile

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


def begin_file(
    path: str | Path,
    tensors: dict[str, HeaderEntry],
    metadata: dict[str, str],
    known: dict[str, torch.Tensor],
    *,
    force: bool,
) -> tuple[AtomicFile, dict[str, int], int]:
    """Start a file: its header and the tensors that are `known` already are written.

    Returns the open file, where each tensor starts in it, and the bytes that it will have in the
    end. Errors are as those of `AtomicFile`; nothing is left behind then.
    """
    start, offsets = header_bytes(tensors, metadata)
    file = AtomicFile(path, force=force)
    try:
        file.write_at(0, start)
        for name, tensor in known.items():
            write_tensor(file, offsets[name], tensor)
    except BaseException:
        file.discard()
        raise
    return file, offsets, len(start) + sum(tensor.bytes for tensor in tensors.values())


def write_tensor(file: AtomicFile, offset: int, tensor: torch.Tensor) -> None:
    """Write a CPU tensor's values at `offset` bytes; errors as `AtomicFile.write_at`."""
    if tensor.numel():
        contiguous = tensor.detach().contiguous()
        size = contiguous.numel() * contiguous.element_size()
        # A view of the tensor's memory that needs no numpy, which torch can do without.
        data = (ctypes.c_char * size).from_address(contiguous.data_ptr())
        file.write_at(offset, memoryview(data))
