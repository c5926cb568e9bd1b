"""Captures in other files than safetensors: ``.npy`` and ``.pt`` are read, the rest is named.

A ``.npy`` file is one array, named as the file is. A ``.pt`` file is what ``torch.save`` made of a
tensor, or of tensors by name; it is read with ``weights_only``, which builds tensors and runs no
code of the file.
"""

from __future__ import annotations

import ast
import math
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdsa_quant.errors import InputError

from .safetensors_reader import DTYPES, TensorEntry, TensorFile, open_safetensors

if TYPE_CHECKING:
    import torch

ARRAY_SUFFIXES = (".npy", ".pt")
_NPY_MAGIC = b"\x93NUMPY"
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80"
_MAX_NPY_HEADER_BYTES = 65536
_NPY_DTYPES = {
    "<f2": "F16", "<f4": "F32", "<f8": "F64", "|i1": "I8", "|u1": "U8", "<i2": "I16",
    "<u2": "U16", "<i4": "I32", "<u4": "U32", "<i8": "I64", "<u8": "U64", "|b1": "BOOL",
}  # fmt: skip
_OTHER_KINDS = {
    b"version https://": "a Git LFS pointer (git lfs pull fetches the file)",
    b"GGUF": "a GGUF file",
    b"\x89HDF\r\n": "an HDF5 file",
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
}
_CONVERT = {
    "npz": "from safetensors.numpy import save_file; "
    "save_file(dict(numpy.load({name!r})), {out!r})",
    "bin": "from safetensors.torch import save_file; "
    "save_file({{'keys': torch.from_file({name!r}, dtype=torch.bfloat16, size=N).view(-1, 128)}}, "
    "{out!r})",
}


def open_tensor_file(path: Path) -> TensorFile:
    """Open a safetensors, ``.npy`` or ``.pt`` file, whichever it is by its first bytes.

    Raises
    ------
    ValueError
        The file cannot be read, is damaged, or is of another kind; the message names it, and for a
        kind that is known how to convert it.
    """
    start = _first_bytes(path)
    if start.startswith(_NPY_MAGIC):
        return _open_npy(path)
    if start.startswith(_ZIP_MAGIC) and path.suffix == ".npz":
        raise _to_convert(path, "npz", "is a NumPy archive")
    # The first eight bytes of a safetensors file are a small number.
    pickled = start.startswith(_PICKLE_MAGIC) and start[4:8] != bytes(4)
    if start.startswith(_ZIP_MAGIC) or pickled:
        return PickledFile(path)
    for magic, what in _OTHER_KINDS.items():
        if start.startswith(magic):
            raise InputError(f"is {what}, not a safetensors file", source=path)
    if path.suffix == ".bin":
        raise _to_convert(path, "bin", "has no header that says what it holds")
    return open_safetensors(path)


def _first_bytes(path: Path) -> bytes:
    """The first bytes of a regular file; none where they cannot be read, which another one says."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(16)
    except OSError:
        return b""


def _to_convert(path: Path, kind: str, what: str) -> InputError:
    lines = _CONVERT[kind].format(name=path.name, out=f"{path.stem}.safetensors")
    module = "numpy" if kind == "npz" else "torch"
    return InputError(
        f"{what}, safetensors, .npy and .pt are read; convert it in Python: import {module}; "
        f"{lines}",
        source=path,
    )


def _open_npy(path: Path) -> TensorFile:
    """The array of a ``.npy`` file (numpy.lib.format, versions 1 to 3) as a tensor of its name."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        magic = file.read(8)
        count = 2 if magic[6:7] == b"\x01" else 4
        size = int.from_bytes(file.read(count), "little")
        text = file.read(min(size, _MAX_NPY_HEADER_BYTES))
    start = 8 + count + size
    try:
        header = ast.literal_eval(text.decode("latin-1").strip())
        descr, shape = header["descr"], header["shape"]
        in_c_order = not header["fortran_order"]
        sizes = [int(each) for each in shape]
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
        raise InputError("is not a whole .npy file: its header is damaged", source=path) from None
    dtype = _NPY_DTYPES.get(descr) if isinstance(descr, str) else None
    if dtype is None or not in_c_order:
        order = "" if in_c_order else " in Fortran's order"
        known = ", ".join(_NPY_DTYPES)
        raise InputError(
            f"holds dtype {descr!r}{order}; {known} in C's order are read (NumPy has no bfloat16: "
            f"save such values as safetensors or .pt)",
            source=path,
        )
    size = math.prod(sizes) * DTYPES[dtype][1] // 8
    if min(sizes, default=0) < 0 or start + size != status.st_size:
        raise InputError(
            f"is not a whole .npy file: {descr} {sizes} takes {size:,} bytes, but it has "
            f"{max(status.st_size - start, 0):,}",
            source=path,
        )
    entry = TensorEntry(dtype, tuple(sizes), start, size)
    return TensorFile(path, {path.stem: entry}, {}, status)


class PickledFile(TensorFile):
    """The tensors of a ``.pt`` file, mapped by torch where it can."""

    def __init__(self, path: Path) -> None:
        import torch

        try:
            status = path.stat()
            with torch.device("cpu"):
                content = _load(path)
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", source=path) from None
        self._tensors = dict(_named(path, content))
        kinds = {getattr(torch, found, None): name for name, (found, _) in DTYPES.items() if found}
        entries = {}
        for name, tensor in self._tensors.items():
            if tensor.dtype not in kinds or tensor.layout != torch.strided:
                raise InputError(
                    f"tensor {name} is {tensor.dtype}, {tensor.layout}; plain tensors are read",
                    source=path,
                )
            entries[name] = TensorEntry(kinds[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)
        super().__init__(path, entries, {}, status)

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU."""
        return self._tensors[name].detach()

    def read_rows(self, name: str, start: int, stop: int, width: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of a tensor seen as ``[rows, width]``, a copy."""
        return self._tensors[name].detach().reshape(-1, width)[start:stop].clone()

    def _mapped(self) -> mmap.mmap:
        raise NotImplementedError  # torch has mapped it


def _load(path: Path) -> Any:
    """What a file of ``torch.save`` holds, of tensors and plain containers only."""
    import pickle

    import torch

    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # an older format, which cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(
            "holds other things than tensors, or is not a torch.save file; save the tensors alone",
            source=path,
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"is not a whole .pt file: {reason}", source=path) from None


def _named(path: Path, content: Any) -> list[tuple[str, torch.Tensor]]:
    import torch

    if isinstance(content, torch.Tensor):
        return [(path.stem, content)]
    found = []
    if isinstance(content, dict):
        found = [(name, each) for name, each in content.items() if isinstance(each, torch.Tensor)]
    if not found or not all(isinstance(name, str) for name, _ in found):
        raise InputError("must hold a tensor, or tensors by name", source=path)
    return found
