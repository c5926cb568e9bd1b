"""Rows of tensors of unknown number, streamed to a nameless file until their number is known.

A file without a name goes with the process that holds it, so that a killed capture leaves nothing.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from sdsa_quant.errors import InputError
from sdsa_quant.files.safetensors_writer import HeaderEntry, StreamedFile
from sdsa_quant.files.tensor_memory import tensor_memory

_COPIED_BYTES = 1 << 23  # at a time, from a spool to a file
DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int32: "I32",
}


class TensorSpool:
    """Rows of one tensor, appended in segments that belong to requests.

    Parameters
    ----------
    folder : Path
        Where the nameless file lies.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.dtype: torch.dtype | None = None
        self.row_shape: tuple[int, ...] = ()
        self._segments: list[tuple[int, int, int]] = []  # request, first row, rows
        self.rows = 0

    def append(self, rows: torch.Tensor, request: int = 0) -> None:
        """Add CPU rows of a request.

        Raises
        ------
        ValueError
            They have another dtype or shape than those before, or the disk is full.
        """
        if self.dtype is None:
            self.dtype, self.row_shape = rows.dtype, tuple(rows.shape[1:])
        if rows.dtype != self.dtype or tuple(rows.shape[1:]) != self.row_shape:
            raise InputError(
                f"rows must be {self.dtype} {list(self.row_shape)} as those before, got "
                f"{rows.dtype} {list(rows.shape[1:])}"
            )
        if not rows.shape[0]:
            return
        data = tensor_memory(rows.contiguous())
        offset = self.rows * self.row_bytes
        try:
            while data.nbytes:
                written = os.pwrite(self._file.fileno(), data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise InputError(f"a capture cannot be written: {error.strerror}") from error
        self._segments.append((request, self.rows, rows.shape[0]))
        self.rows += rows.shape[0]

    @property
    def row_bytes(self) -> int:
        assert self.dtype is not None
        return math.prod(self.row_shape) * self.dtype.itemsize

    def entry(self) -> HeaderEntry:
        """What a header says of it."""
        assert self.dtype is not None
        shape = (self.rows, *self.row_shape)
        return HeaderEntry(DTYPE_NAMES[self.dtype], shape, self.rows * self.row_bytes)

    def read(self, request: int, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of a request, as a tensor of its own."""
        assert self.dtype is not None
        wanted = torch.empty((stop - start, *self.row_shape), dtype=self.dtype, device="cpu")
        passed = 0
        for owner, first, count in self._segments:
            if owner != request:
                continue
            begin, end = max(start, passed), min(stop, passed + count)
            if begin < end:
                self._read_into(wanted[begin - start : end - start], first + begin - passed)
            passed += count
        return wanted

    def _read_into(self, rows: torch.Tensor, first: int) -> None:
        view = tensor_memory(rows)
        offset = first * self.row_bytes
        while view.nbytes:
            got = os.preadv(self._file.fileno(), [view], offset)
            if not got:
                raise InputError("a capture cannot be read back: its file is shorter than written")
            view, offset = view[got:], offset + got

    def pieces(self) -> Iterator[bytes]:
        """All bytes, request after request."""
        for _, segments in itertools.groupby(sorted(self._segments), key=lambda each: each[0]):
            for _, first, count in segments:
                offset, end = first * self.row_bytes, (first + count) * self.row_bytes
                while offset < end:
                    data = os.pread(self._file.fileno(), min(_COPIED_BYTES, end - offset), offset)
                    if not data:
                        raise InputError("a capture cannot be read back: its file is cut short")
                    yield data
                    offset += len(data)

    def close(self) -> None:
        """Let go of the file and what is in it."""
        self._file.close()


class SpooledFile(StreamedFile):
    """A safetensors file made of spools.

    Parameters
    ----------
    path : Path
        The file.
    spools : dict of str to TensorSpool
        Every tensor.
    metadata : dict of str to str
        The header's metadata.
    force : bool
        Whether to replace an existing file.

    Raises
    ------
    ValueError
        As `StreamedFile`.
    """

    def __init__(
        self, path: Path, spools: dict[str, TensorSpool], metadata: dict[str, str], *, force: bool
    ) -> None:
        entries = {name: spool.entry() for name, spool in spools.items()}
        super().__init__(
            path, entries, metadata, {}, parts=len(spools), noun="tensors", force=force
        )
        self._spools = spools

    def write(self) -> None:
        """Copy every spool."""
        for name, spool in self._spools.items():
            offset = self._offsets[name]
            for piece in spool.pieces():
                self._file.write_at(offset, piece)
                offset += len(piece)
            self._written += 1
