"""Tensors in files: one file, a folder of files, or a sharded model's index.

Files are safetensors, or ``.npy`` and ``.pt`` (`array_files`).

Only headers are read until a tensor is used, and then it is a view of the mapped file. Where there
is an index (``*.safetensors.index.json``), it alone says which file holds which tensor; other files
beside it are ignored. Without one, where a name is in two files of a folder, every name is preceded
by its file's: ``layer_7:keys`` is the tensor ``keys`` of ``layer_7.safetensors``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sdsa_quant.errors import InputError

from .array_files import ARRAY_SUFFIXES, open_tensor_file
from .names import natural_order
from .safetensors_reader import TensorFile, open_safetensors
from .text import read_json

if TYPE_CHECKING:
    import torch

INDEX_SUFFIX = ".safetensors.index.json"
_DTYPE_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}
_SUFFIX = ".safetensors"
_LISTED_NAMES = 3  # in an error message


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a safetensors header says about one tensor."""

    name: str
    dtype: str  # as safetensors writes it: "BF16", "F8_E4M3"
    shape: tuple[int, ...]
    path: Path  # the file that holds it
    prefix: str = ""  # of the name, not in the file: "layer_7:" where files share names

    @property
    def name_in_file(self) -> str:
        """The name without what tells files apart that share names."""
        return self.name.removeprefix(self.prefix)

    @property
    def bytes(self) -> int:
        digits = re.search(r"\d+", self.dtype)
        bits = _DTYPE_BITS.get(self.dtype) or int(digits.group() if digits else 0)
        return math.prod(self.shape) * bits // 8

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)})"


class TensorSource:
    """Tensors by name, in natural order (2 before 10), read from their mapped files when used.

    Parameters
    ----------
    path : Path
        What the user named.
    tensors : iterable of StoredTensor
        Every tensor, names unique.
    files : dict
        The open file of each path that a tensor is in.
    """

    def __init__(
        self, path: Path, tensors: Iterable[StoredTensor], files: dict[Path, TensorFile]
    ) -> None:
        self.path = path
        ordered = sorted(tensors, key=lambda tensor: natural_order(tensor.name))
        self._tensors = {tensor.name: tensor for tensor in ordered}
        self._files = files

    def __iter__(self) -> Iterator[StoredTensor]:
        return iter(self._tensors.values())

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> StoredTensor:
        """The tensor of that name.

        Raises
        ------
        ValueError
            No tensor has that name; the message lists those present.
        """
        if name not in self._tensors:
            raise InputError(f"{self.path}: no tensor is named {name}; {self.describe_names()}")
        return self._tensors[name]

    @property
    def files(self) -> list[Path]:
        return list(self._files)

    @property
    def metadata(self) -> dict[str, str]:
        """Header metadata of the file; of several files under ``file:field``, each its own."""
        if len(self._files) == 1:
            return next(iter(self._files.values())).metadata()
        return {
            f"{_stem(path)}:{field}": value
            for path, file in self._files.items()
            for field, value in file.metadata().items()
        }

    def read_rows(self, name: str, start: int, stop: int, width: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of a tensor seen as ``[rows, width]``, read from the file.

        Raises
        ------
        ValueError
            The file has changed since it was opened, or cannot be read.
        """
        stored = self[name]
        return self._files[stored.path].read_rows(stored.name_in_file, start, stop, width)

    def read(self, name: str) -> torch.Tensor:
        """A tensor as a view of its mapped file, or a copy if it is small."""
        stored = self[name]
        return self._files[stored.path].get_tensor(stored.name_in_file)

    def describe_names(self) -> str:
        """A short line that names a few of the tensors, for error messages."""
        if not self._tensors:
            return "there are no tensors"
        shown = [str(tensor) for tensor in self][:_LISTED_NAMES]
        more = len(self) - len(shown)
        rest = f" and {more} more" if more else ""
        return "found " + ", ".join(shown) + rest


def open_tensors(path: str | Path) -> TensorSource:
    """Open a safetensors, ``.npy`` or ``.pt`` file, a folder of such, or an index of shards.

    Raises
    ------
    ValueError
        Nothing is there, a file is damaged, an index is malformed or names what does not exist, or
        a folder has several indices.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".json":
        return _open_index(path, path)
    return _merge_files(path, [path])


def source_files(path: str | Path) -> list[Path]:
    """Every file that `open_tensors` reads of `path`: the files with tensors, and an index.

    Raises
    ------
    ValueError
        As `open_tensors`, as far as indices and folders are at fault.
    """
    path = Path(path)
    index = path if path.suffix == ".json" and not path.is_dir() else None
    if path.is_dir():
        index = _index_of(path)
        if index is None:
            return _files_of(path)
    if index is None:
        return [path]
    return [index, *(index.parent / name for name in set(_read_index(index).values()))]


def _open_folder(folder: Path) -> TensorSource:
    index = _index_of(folder)
    return _merge_files(folder, _files_of(folder)) if index is None else _open_index(folder, index)


def _index_of(folder: Path) -> Path | None:
    indices = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    if len(indices) > 1:
        names = ", ".join(index.name for index in indices)
        raise InputError(f"{folder}: has several indices ({names}); name the one to use")
    return indices[0] if indices else None


def _files_of(folder: Path) -> list[Path]:
    for suffixes in ((_SUFFIX,), ARRAY_SUFFIXES):
        files = [file for suffix in suffixes for file in folder.glob(f"*{suffix}")]
        if files:
            return sorted(files, key=lambda file: natural_order(file.name))
    raise InputError(f"{folder}: the folder has no *.safetensors file, nor *.npy or *.pt")


def _merge_files(path: Path, paths: list[Path]) -> TensorSource:
    files = {part: open_tensor_file(part) for part in paths}
    tensors = [tensor for part in paths for tensor in _stored_tensors(part, files[part])]
    if len({tensor.name for tensor in tensors}) < len(tensors):
        # All of them, so that a pattern for plain names cannot miss the ones that are shared.
        tensors = [_with_file_name(tensor) for tensor in tensors]
    return TensorSource(path, tensors, files)


def _stem(path: Path) -> str:
    """A file's name as it precedes names in it."""
    return path.name.removesuffix(_SUFFIX) if path.suffix == _SUFFIX else path.stem


def _with_file_name(tensor: StoredTensor) -> StoredTensor:
    prefix = f"{_stem(tensor.path)}:"
    return replace(tensor, name=prefix + tensor.name, prefix=prefix)


def _open_index(path: Path, index: Path) -> TensorSource:
    file_names = _read_index(index)
    files = {}
    present: dict[Path, dict[str, StoredTensor]] = {}
    for file_name in sorted(set(file_names.values()), key=natural_order):
        part = index.parent / file_name
        files[part] = open_safetensors(part)
        present[part] = {tensor.name: tensor for tensor in _stored_tensors(part, files[part])}
    tensors = []
    for name, file_name in file_names.items():
        found = present[index.parent / file_name]
        if name not in found:
            raise InputError(
                f"{index}: puts tensor {name} into {file_name}, which does not have it"
            )
        tensors.append(found[name])
    return TensorSource(path, tensors, files)


def _read_index(index: Path) -> dict[str, str]:
    """File name of each tensor, from an index's ``weight_map``."""
    content = read_json(index)
    file_names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(file_names, dict) or not all(
        isinstance(each, str) for each in file_names.values()
    ):
        raise InputError(
            f"{index}: as an index of safetensors files it must have a weight_map "
            "from tensor names to file names"
        )
    for name, file_name in file_names.items():
        if Path(file_name).name != file_name or "\0" in file_name:
            raise InputError(
                f"{index}: tensor {name} must lie in a file beside the index, got {file_name!r}"
            )
    return file_names


def _stored_tensors(path: Path, file: TensorFile) -> list[StoredTensor]:
    stored = []
    for name in file.keys():  # noqa: SIM118
        entry = file.entry(name)
        stored.append(StoredTensor(name, entry.dtype, entry.shape, path))
    return stored
