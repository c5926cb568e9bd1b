"""Safetensors files to read: checked by their headers, then read in parts or mapped.

A file is eight bytes of the header's size, the header in JSON, and the tensors' bytes, one after
another without gaps. The library's own reader maps a file so that the whole of it has to fit into
memory, makes tensors on the caller's default device, and lets a name stand twice.

Parts are read, not mapped: where a file gets shorter meanwhile, a read says so, while touching a
mapping ends the process by SIGBUS.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sdsa_quant.errors import InputError

from .safetensors_writer import HeaderEntry
from .tensor_memory import tensor_memory

if TYPE_CHECKING:
    import torch

_MAX_HEADER_BYTES = 16 << 20  # of 100,000 tensors; the format allows 100 MB
_MAX_TENSORS = 100_000
MAPPED_BYTES = 1 << 20  # of a tensor, at least; smaller ones are read, which a short file survives
_METADATA = "__metadata__"
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has the name from 3.13 on
# Name of torch's dtype and bits of an element; None for what torch has no dtype for everywhere.
DTYPES: dict[str, tuple[str | None, int]] = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E8M0": ("float8_e8m0fnu", 8), "I16": ("int16", 16),
    "U16": ("uint16", 16), "F16": ("float16", 16), "BF16": ("bfloat16", 16), "I32": ("int32", 32),
    "U32": ("uint32", 32), "F32": ("float32", 32), "C64": ("complex64", 64),
    "F64": ("float64", 64), "I64": ("int64", 64), "U64": ("uint64", 64), "F4": (None, 4),
    "F6_E2M3": (None, 6), "F6_E3M2": (None, 6),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
}  # fmt: skip

Self = TypeVar("Self", bound="TensorFile")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: what it is and where its bytes are."""

    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]
    offset: int  # in the file
    bytes: int


class TensorFile:
    """The tensors of one file, read when they are asked for; a context manager that holds nothing.

    Parameters
    ----------
    path : Path
        The file.
    entries : dict of str to TensorEntry
        Its tensors.
    metadata : dict of str to str
        What its header says besides.
    status : os.stat_result
        Of the file when its header was read.
    """

    def __init__(
        self,
        path: Path,
        entries: dict[str, TensorEntry],
        metadata: dict[str, str],
        status: os.stat_result,
    ) -> None:
        self.path = path
        self._entries = entries
        self._metadata = metadata
        self._status = status
        self._mapping: mmap.mmap | None = None

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to close: a mapping lives as long as a tensor of it."""

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._entries)

    def metadata(self) -> dict[str, str]:
        """The header's metadata."""
        return self._metadata

    def entry(self, name: str) -> TensorEntry:
        """Dtype, shape and size of a tensor."""
        return self._entries[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU: a view of the mapped file, or a copy of a small one.

        Raises
        ------
        InputError
            The file has changed or cannot be read, or torch has no such dtype.
        """
        entry = self._entries[name]
        aligned = entry.offset % max(DTYPES[entry.dtype][1] // 8, 1) == 0
        if entry.bytes < MAPPED_BYTES or not aligned:
            return self._read(name, entry.offset, entry.bytes).view(entry.shape)
        import torch

        data = torch.frombuffer(self._mapped(), dtype=torch.uint8)
        part = data[entry.offset : entry.offset + entry.bytes]
        return part.view(self._dtype(name)).view(entry.shape)

    def read_rows(self, name: str, start: int, stop: int, width: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of a tensor seen as ``[rows, width]``, in memory of their own.

        Raises
        ------
        InputError
            The file has changed or cannot be read.
        """
        entry = self._entries[name]
        row_bytes = width * DTYPES[entry.dtype][1] // 8
        part = self._read(name, entry.offset + start * row_bytes, (stop - start) * row_bytes)
        return part.view(-1, width)

    def _dtype(self, name: str) -> torch.dtype:
        import torch

        dtype = DTYPES[self._entries[name].dtype][0]
        found = None if dtype is None else getattr(torch, dtype, None)
        if found is None:
            raise InputError(
                f"tensor {name} is {self._entries[name].dtype}, which torch {torch.__version__} "
                f"does not have",
                source=self.path,
            )
        assert isinstance(found, torch.dtype)
        return found

    def _read(self, name: str, offset: int, size: int) -> torch.Tensor:
        """1-D tensor of `size` bytes of a tensor's, in its dtype."""
        import torch

        dtype = self._dtype(name)
        data = torch.empty(size, dtype=torch.uint8, device="cpu")
        if size:
            buffer = tensor_memory(data)
            fd = self._open()
            try:
                self._fill(fd, buffer, offset)
            finally:
                os.close(fd)
        return data.view(dtype)

    def _fill(self, fd: int, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise InputError(f"cannot be read: {error.strerror}", source=self.path) from None
            if count == 0:
                raise self._changed()
            done += count

    def _open(self) -> int:
        """The file again; refused where it is not the one whose header was read."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", source=self.path) from None
        status = os.fstat(fd)
        if not os.path.samestat(status, self._status) or status.st_size != self._status.st_size:
            os.close(fd)
            raise self._changed()
        return fd

    def _mapped(self) -> mmap.mmap:
        """The whole file, mapped once. Writing to it changes a copy of a page, never the file."""
        if self._mapping is not None and os.path.exists(self.path):
            os.close(self._open())  # which sees a file that is shorter now
        if self._mapping is None:
            fd = self._open()
            try:
                # No memory is set aside for copies: files may be larger than the machine's memory.
                self._mapping = mmap.mmap(
                    fd,
                    self._status.st_size,
                    flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
            except OSError as error:
                raise InputError(f"cannot be mapped: {error.strerror}", source=self.path) from None
            finally:
                os.close(fd)
        return self._mapping

    def _changed(self) -> InputError:
        return InputError(
            "has changed while it was read: it is shorter, or another file", source=self.path
        )


def open_safetensors(path: str | Path) -> TensorFile:
    """Open a safetensors file for reading on the CPU; its header is read and checked.

    Raises
    ------
    ValueError
        The file cannot be read or is not a whole safetensors file; the message names it.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: must be a safetensors file, but is a folder")
    try:
        if path.exists() and not path.is_file():
            # Opening a pipe would wait for a writer, and no signal could end that.
            raise InputError(f"{path}: must be a regular file, but is not")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            size = int.from_bytes(file.read(8), "little")
            _require_header_size(path, size, status.st_size)
            text = file.read(size)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    header = _parse(path, text)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(path, f"{_METADATA} must be strings by name")
    if len(header) > _MAX_TENSORS:
        raise InputError(f"has {len(header):,} tensors, more than {_MAX_TENSORS:,}", source=path)
    entries = {name: _entry(path, name, each, 8 + size) for name, each in header.items()}
    _require_no_gaps(path, entries, 8 + size, status.st_size)
    return TensorFile(path, entries, metadata, status)


def _broken(path: Path, reason: str) -> InputError:
    return InputError(f"is not a whole safetensors file: {reason}", source=path)


def _require_header_size(path: Path, size: int, file_bytes: int) -> None:
    if file_bytes < 8:
        raise _broken(path, f"it has {file_bytes} bytes")
    if 8 + size > file_bytes:
        raise _broken(path, f"a header of {size:,} bytes does not fit into {file_bytes:,}")
    if size > _MAX_HEADER_BYTES:
        raise InputError(
            f"has a header of {size:,} bytes, more than {_MAX_HEADER_BYTES:,}", source=path
        )


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """A header, in which no name stands twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _broken(path, f"the name {twice} stands twice in its header")
        return found

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
        json.dumps(list(header) if isinstance(header, dict) else None, ensure_ascii=False).encode()
    except (UnicodeError, RecursionError, json.JSONDecodeError) as error:
        reason = str(error) or type(error).__name__
        raise _broken(path, f"its header is not usable JSON: {reason}") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    return header


def _entry(path: Path, name: str, given: Any, start: int) -> TensorEntry:
    """A tensor's entry, whose size its dtype and shape give."""
    fields = given if isinstance(given, dict) else {}
    dtype, shape = fields.get("dtype"), _sizes(fields, "shape")
    offsets = _sizes(fields, "data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _broken(path, f"tensor {name} has no known dtype")
    if shape is None:
        raise _broken(path, f"tensor {name} has no shape")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(path, f"tensor {name} has no data_offsets")
    size = offsets[1] - offsets[0]
    if math.prod(shape) * DTYPES[dtype][1] != 8 * size:
        raise _broken(path, f"tensor {name} {dtype} {shape} does not have {size:,} bytes")
    return TensorEntry(dtype, tuple(shape), start + offsets[0], size)


def _sizes(fields: Mapping[str, Any], key: str) -> list[int] | None:
    """A field that must be a list of numbers from 0 to 2^63 - 1; None where it is not."""
    numbers = fields.get(key)
    fits = isinstance(numbers, list) and all(
        type(number) is int and 0 <= number < 2**63 for number in numbers
    )
    return numbers if fits else None


def _require_no_gaps(
    path: Path, entries: Mapping[str, TensorEntry], start: int, file_bytes: int
) -> None:
    end = start
    for name, entry in sorted(entries.items(), key=lambda each: (each[1].offset, each[1].bytes)):
        if entry.offset != end:
            raise _broken(path, f"tensor {name} does not begin where another ends")
        end += entry.bytes
    if end != file_bytes:
        raise _broken(path, f"its tensors end at byte {end:,}, the file at {file_bytes:,}")


def header_metadata(path: str | Path) -> dict[str, str]:
    """Metadata of a safetensors file, even one whose other parts are damaged.

    Empty for a file without metadata, and for one that is not a safetensors file at all.
    """
    if not Path(path).is_file():  # to open a pipe would be to wait for it
        return {}
    try:
        with Path(path).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= _MAX_HEADER_BYTES else None
    except (OSError, ValueError, RecursionError):
        return {}
    metadata = header.get(_METADATA) if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        return {}
    return {name: value for name, value in metadata.items() if isinstance(value, str)}


def tensor_shapes(file: TensorFile) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of an open file, by name."""
    return {name: file.entry(name).shape for name in file.keys()}  # noqa: SIM118


def require_rank(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    name: str,
    rank: int,
    error: type[InputError] = InputError,
) -> tuple[int, ...]:
    """The shape of a tensor that must have `rank` dimensions, before its sizes can be compared.

    Raises
    ------
    ValueError
        The tensor is missing or has another number of dimensions. An `error`.
    """
    _require_present(path, shapes, (name,), error)
    if len(shapes[name]) != rank:
        raise error(f"{path}: tensor {name} must have {rank} dimensions, got {list(shapes[name])}")
    return shapes[name]


def read_expected(
    path: Path,
    file: TensorFile,
    expected: Mapping[str, HeaderEntry],
    error: type[InputError] = InputError,
) -> dict[str, torch.Tensor]:
    """The expected tensors of an open file, with dtypes and shapes compared.

    Parameters
    ----------
    path : Path
        The file, for messages.
    file : TensorFile
        As `open_safetensors` gives it.
    expected : mapping of str to HeaderEntry
        Every tensor that has to be there. Others may be.
    error : type of InputError
        What to raise.

    Raises
    ------
    ValueError
        A tensor is missing, or has another dtype or shape. An `error` that names it.
    """
    shapes = tensor_shapes(file)
    _require_present(path, shapes, expected, error)
    for name, entry in expected.items():
        dtype = file.entry(name).dtype
        if shapes[name] != entry.shape or dtype != entry.dtype:
            raise error(
                f"{path}: tensor {name} must be {entry.dtype} {list(entry.shape)}, "
                f"got {dtype} {list(shapes[name])}"
            )
    return {name: file.get_tensor(name) for name in expected}


def _require_present(
    path: Path, shapes: Mapping[str, object], names: Iterable[str], error: type[InputError]
) -> None:
    for name in names:
        if name not in shapes:
            found = ", ".join(sorted(shapes)) or "none"
            raise error(f"{path}: tensor {name} is missing; found {found}")
