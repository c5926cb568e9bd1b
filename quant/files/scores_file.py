"""Scores files: one safetensors file of scores and top-k indices, written a few rows at a time.

Tensors: ``scores`` float32 ``[rows, max_context]``, -inf at and past a row's length;
``context_lengths`` and ``requests`` int32 ``[groups]``, as `indexer_scores` takes them;
``top_k_indices`` int32 ``[rows, k]``, -1 past the last choice of a row with fewer than k keys, in
the order that the metadata name in ``top_k_order``: ``score``, highest first, which is what files
without the field have; or ``key``, ascending key index. ``rows / groups`` consecutive rows make a
group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.errors import InputError
from sdsa_quant.layout import MAX_REQUESTS, MAX_ROWS
from sdsa_quant.short_repr import short_repr

from .kinds import SCORES
from .safetensors_reader import open_safetensors, read_expected, require_rank, tensor_shapes
from .safetensors_writer import HeaderEntry, StreamedFile, write_tensor

FORMAT = SCORES
VERSION = "1"
BY_SCORE, BY_KEY = "score", "key"  # orders of ``top_k_indices``

_TENSORS = {"scores": "F32", "context_lengths": "I32", "requests": "I32", "top_k_indices": "I32"}
_ELEMENT_BYTES = 4  # of every tensor in the file


@dataclass(frozen=True, slots=True)
class ScoresShape:
    """The sizes that a scores file is made of."""

    rows: int
    groups: int
    max_context: int  # keys
    top_k: int

    def tensors(self) -> dict[str, HeaderEntry]:
        """Every tensor of the file, in file order."""
        shapes = {
            "scores": (self.rows, self.max_context),
            "context_lengths": (self.groups,),
            "requests": (self.groups,),
            "top_k_indices": (self.rows, self.top_k),
        }
        return {
            name: HeaderEntry(_TENSORS[name], shape, torch.Size(shape).numel() * _ELEMENT_BYTES)
            for name, shape in shapes.items()
        }


class ScoresWriter(StreamedFile):
    """Write a scores file row after row, in bounded memory and atomically.

    A context manager: the file gets its final name when the block ends without an exception, and is
    removed otherwise.

    Parameters
    ----------
    path : str or Path
        The scores file.
    context_lengths, requests : torch.Tensor
        int32 ``[groups]``, any device.
    rows, max_context, top_k : int
        Sizes of ``scores`` and ``top_k_indices``.
    source : mapping of str to str
        What to say in the header's metadata besides format and version, such as the cache's name.
    top_k_order : str
        Order of ``top_k_indices`` in a row: ``score``, highest first, or ``key``, ascending.
    force : bool
        Whether to replace an existing file.

    Raises
    ------
    ValueError
        The file exists and `force` is false, its folder cannot be written, or `top_k_order` is
        neither.
    """

    @checked_arguments
    def __init__(
        self,
        path: str | Path,
        context_lengths: torch.Tensor,
        requests: torch.Tensor,
        *,
        rows: int,
        max_context: int,
        top_k: int,
        source: Mapping[str, str],
        top_k_order: str = BY_SCORE,
        force: bool = False,
    ) -> None:
        if top_k_order not in (BY_SCORE, BY_KEY):
            raise InputError(f"top_k_order must be {BY_SCORE!r} or {BY_KEY!r}, got {top_k_order!r}")
        self.shape = ScoresShape(rows, context_lengths.shape[0], max_context, top_k)
        tensors = self.shape.tensors()
        order = {} if top_k_order == BY_SCORE else {"top_k_order": top_k_order}
        metadata = {"format": FORMAT, "version": VERSION, **order, **source}
        known = {"context_lengths": context_lengths.cpu(), "requests": requests.cpu()}
        super().__init__(path, tensors, metadata, known, parts=rows, noun="rows", force=force)

    @checked_arguments
    def write_rows(self, first_row: int, scores: torch.Tensor, top_k_indices: torch.Tensor) -> None:
        """Write consecutive rows; every row of the file exactly once.

        Parameters
        ----------
        first_row : int
            Number of the first row given.
        scores : torch.Tensor
            float32 ``[n, max_context]``, any device, -inf at and past a row's length.
        top_k_indices : torch.Tensor
            Integers ``[n, top_k]``, any device.

        Raises
        ------
        ValueError
            The rows do not lie within the file, a shape does not fit it, or the disk is full.
        """
        count = scores.shape[0]
        wanted = [count, self.shape.max_context], [count, self.shape.top_k]
        given = list(scores.shape), list(top_k_indices.shape)
        if scores.dtype != torch.float32 or given != wanted:
            raise InputError(
                f"scores and top_k_indices must be float32 {wanted[0]} and {wanted[1]}, "
                f"got {scores.dtype} {given[0]} and {given[1]}"
            )
        if not 0 <= first_row <= self.shape.rows - count:
            raise InputError(
                f"rows must lie within 0 to {self.shape.rows}, got {first_row} to "
                f"{first_row + count}"
            )
        self._written += count
        self._write_rows_of("scores", first_row, scores)
        self._write_rows_of("top_k_indices", first_row, top_k_indices.to(torch.int32))

    def _write_rows_of(self, name: str, first_row: int, values: torch.Tensor) -> None:
        row_bytes = values.shape[1] * _ELEMENT_BYTES
        write_tensor(self._file, self._offsets[name] + first_row * row_bytes, values.cpu())


@dataclass(frozen=True, slots=True)
class ScoresFile:
    """An open scores file; its tensors are views of the mapped file, read when they are used."""

    path: Path
    shape: ScoresShape
    metadata: dict[str, str]
    file_bytes: int
    scores: torch.Tensor  # float32 [rows, max_context]
    context_lengths: torch.Tensor  # int32 [groups]
    requests: torch.Tensor  # int32 [groups]
    top_k_indices: torch.Tensor  # int32 [rows, k]

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def rows_per_group(self) -> int:
        """Query rows in a group; 0 where the file has no groups."""
        return self.shape.rows // self.shape.groups if self.shape.groups else 0

    @property
    def top_k_order(self) -> str:
        """Order of ``top_k_indices`` in a row: ``score``, highest first, or ``key``, ascending."""
        return self.metadata.get("top_k_order", BY_SCORE)


@checked_arguments
def open_scores(path: str | Path) -> ScoresFile:
    """Open a scores file and check its header, dtypes and shapes; scores are not read.

    Raises
    ------
    ValueError
        The file cannot be read, is not a safetensors file or not a scores file, or a tensor is
        missing or does not fit the others. The message names the file and the field or tensor.
    """
    path = Path(path)
    with open_safetensors(path) as file:
        metadata = file.metadata() or {}
        for field, wanted in (("format", FORMAT), ("version", VERSION)):
            if metadata.get(field) != wanted:
                raise InputError(
                    f"{path}: header field {field} must be {wanted}, got {metadata.get(field)!r}"
                )
        if (order := metadata.get("top_k_order", BY_SCORE)) not in (BY_SCORE, BY_KEY):
            raise InputError(
                f"header field top_k_order must be {BY_SCORE!r} or {BY_KEY!r}, got {order!r}",
                source=path,
            )
        shape = _sizes(path, tensor_shapes(file))
        tensors = read_expected(path, file, shape.tensors())
    for length in tensors["context_lengths"].tolist():
        if not 0 <= length <= shape.max_context:
            raise InputError(
                f"{path}: context_lengths must be 0 to {shape.max_context}, the columns of scores, "
                f"got {length}"
            )
    return ScoresFile(path, shape, metadata, path.stat().st_size, **tensors)


def _sizes(path: Path, shapes: dict[str, tuple[int, ...]]) -> ScoresShape:
    """The sizes that the tensors have to agree on, taken from those that define them."""
    rows, max_context = require_rank(path, shapes, "scores", 2)
    (groups,) = require_rank(path, shapes, "context_lengths", 1)
    _, top_k = require_rank(path, shapes, "top_k_indices", 2)
    if rows > MAX_REQUESTS or groups > MAX_REQUESTS:
        raise InputError(
            f"must have at most {MAX_REQUESTS:,} rows and groups, got {rows:,} and {groups:,}",
            source=path,
        )
    most = groups * MAX_ROWS
    if rows > most or (groups and (rows % groups or rows < groups)):
        raise InputError(
            f"{path}: tensor scores must have 1 to {MAX_ROWS} rows for each of the {groups} groups "
            f"of context_lengths, the same number for every group, got {rows} rows"
        )
    return ScoresShape(rows, groups, max_context, top_k)
