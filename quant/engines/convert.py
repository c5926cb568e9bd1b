"""A dump of an engine's cache to a file of keys, as the commands that take captures read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.files.outputs import check_outputs, folders_made
from sdsa_quant.files.safetensors_writer import HeaderEntry, StreamedFile, write_tensor
from sdsa_quant.layout import DIM

from .dump import EngineCache, open_engine_cache

FORMAT = "sdsa-keys"
_ROW_BYTES = DIM * 4


@dataclass(frozen=True, slots=True)
class ConvertedKeys:
    """Keys of a dump, written."""

    path: Path
    """The file."""
    cache: EngineCache
    """The dump, and the layout that was found."""
    keys: int
    """Keys of all requests."""
    file_bytes: int
    """Size of the file."""


class _KeysFile(StreamedFile):
    def write_rows(self, first: int, rows: torch.Tensor) -> None:
        write_tensor(self._file, self._offsets["keys"] + first * _ROW_BYTES, rows)
        self._written += rows.shape[0]


@checked_arguments
def convert_engine_cache(
    path: str | Path,
    output: str | Path,
    *,
    pages: str | None = None,
    block_table: str = "block_table",
    lengths: str | None = None,
    layout: str | None = None,
    force: bool = False,
) -> ConvertedKeys:
    """Decode the keys that an engine holds: float32 ``keys`` and int32 ``lengths`` in a file.

    They are what the engine scores with, bit for bit: code times scale, rounded once. Memory does
    not grow with their number.

    Parameters
    ----------
    path, pages, block_table, lengths, layout
        As `open_engine_cache`.
    output : str or Path
        The file of keys.
    force : bool
        Whether to replace an existing file.

    Raises
    ------
    ValueError
        As `open_engine_cache`, or the file exists and `force` is false.
    """
    output = Path(output)
    check_outputs([output], [Path(path)], force=force)
    cache = open_engine_cache(
        path, pages=pages, block_table=block_table, lengths=lengths, layout=layout
    )
    count = sum(cache.context_lengths)
    requests = len(cache.context_lengths)
    tensors = {
        "keys": HeaderEntry("F32", (count, DIM), count * _ROW_BYTES),
        "lengths": HeaderEntry("I32", (requests,), requests * 4),
    }
    metadata = {
        "format": FORMAT,
        "served": cache.layout.name,
        "served_bytes_per_key": str(cache.bytes_per_key),
        "source": f"{cache.path.name}:{cache.name}",
    }
    known = {"lengths": torch.tensor(cache.context_lengths, dtype=torch.int32, device="cpu")}
    with (
        folders_made([output]),
        _KeysFile(output, tensors, metadata, known, parts=count, noun="keys", force=force) as file,
    ):
        first = 0
        for _, keys in cache.chunks():
            file.write_rows(first, keys)
            first += keys.shape[0]
    return ConvertedKeys(output, cache, count, output.stat().st_size)
