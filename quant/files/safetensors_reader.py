"""Safetensors files to read: opened memory-mapped, and compared with the tensors they must have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors
import torch

from sdsa_quant.errors import InputError

from .safetensors_writer import HeaderEntry

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def open_safetensors(path: str | Path) -> safetensors.safe_open:
    """Open a safetensors file for reading on the CPU, memory-mapped.

    Raises
    ------
    ValueError
        The file cannot be read or is not a whole safetensors file; the message names it.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: must be a safetensors file, it is a folder")
    if path.exists() and not path.is_file():
        # Opening a pipe would wait for a writer, and no signal could end that.
        raise InputError(f"{path}: must be a regular file, it is not")
    try:
        return safetensors.safe_open(str(path), framework="pt")
    except safetensors.SafetensorError as error:
        raise InputError(f"{path}: is not a whole safetensors file: {error}") from None
    except OSError as error:
        # The library puts the path into the reason (in quotes before 0.5); the message has it too.
        reason = error.strerror or str(error).removesuffix(f": {path}").removesuffix(f': "{path}"')
        raise InputError(f"{path}: cannot be read: {reason}") from None


def header_metadata(path: str | Path) -> dict[str, str]:
    """Metadata of a safetensors file, even one whose other parts are damaged.

    Empty for a file without metadata, and for one that is not a safetensors file at all.
    """
    if not Path(path).is_file():  # to open a pipe would be to wait for it
        return {}
    try:
        with Path(path).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
    except (OSError, ValueError, RecursionError):
        return {}
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def tensor_shapes(file: safetensors.safe_open) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of an open file, by name."""
    return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


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
    file: safetensors.safe_open,
    expected: Mapping[str, HeaderEntry],
    error: type[InputError] = InputError,
) -> dict[str, torch.Tensor]:
    """The expected tensors of an open file, as views of it, with dtypes and shapes compared.

    Parameters
    ----------
    path : Path
        The file, for messages.
    file : safetensors.safe_open
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
        dtype = file.get_slice(name).get_dtype()
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
            raise error(f"{path}: tensor {name} is missing, found {found}")
