"""Query rows from safetensors files, and what those say about their groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.errors import DtypeError, Hint, InputError
from sdsa_quant.files.safetensors_reader import header_metadata
from sdsa_quant.files.tensor_source import StoredTensor, TensorSource, open_tensors
from sdsa_quant.files.text import whole_number
from sdsa_quant.layout import DIM, MAX_ROWS
from sdsa_quant.short_repr import short_repr

from .names import FLOAT_DTYPES, INTEGER_DTYPES, QUERY_NAMES, beside, last_name

_ROWS_PER_GROUP = "rows_per_group"  # field of the file's metadata


@dataclass(frozen=True, slots=True)
class Queries:
    """Query rows of a file, flat, and how many the file says make a group."""

    source: TensorSource
    tensor: StoredTensor
    rows_per_group: int | None

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def rows(self) -> int:
        """How many there are."""
        return math.prod(self.tensor.shape[:-1])

    @property
    def values(self) -> torch.Tensor:
        """bfloat16 ``[rows, 128]``, read each time that it is asked for."""
        return self.source.read_rows(self.tensor.name, 0, self.rows, DIM).to(torch.bfloat16)


@checked_arguments
def read_queries(path: str | Path, name: str | None = None) -> Queries:
    """Read query rows ``[rows, 128]`` or ``[groups, rows_per_group, 128]``, rounded to BF16.

    The number of rows in a group comes from the shape, or else from ``rows_per_group`` in the
    file's metadata.

    Parameters
    ----------
    path : str or Path
        A safetensors file, a folder of them or an index.
    name : str, optional
        The tensor; by default ``queries``, ``query`` or ``q``, or the only tensor.

    Raises
    ------
    ValueError
        The file cannot be read, the tensor is not in it, or it is not of that shape.
    TypeError
        The tensor is not BF16, F16 or F32: query rows are quantized here, never before.
    """
    source = open_tensors(path)
    tensor = source[name] if name is not None else _default_queries(source)
    if tensor.dtype not in FLOAT_DTYPES:
        raise DtypeError(
            f"{tensor.path}: tensor {tensor.name} must hold unquantized query rows in "
            f"{', '.join(FLOAT_DTYPES)}, got {tensor.dtype} {list(tensor.shape)}"
        )
    if len(tensor.shape) not in (2, 3) or tensor.shape[-1] != DIM:
        raise InputError(
            f"{tensor.path}: tensor {tensor.name} must be [rows, {DIM}] or "
            f"[groups, rows_per_group, {DIM}], got {list(tensor.shape)}"
        )
    return Queries(source, tensor, stated_rows_per_group(source, tensor))


def _default_queries(source: TensorSource) -> StoredTensor:
    for name in QUERY_NAMES:
        if name in source:
            return source[name]
    tensors = list(source)
    # Requests or positions may lie beside the rows; they are integers.
    candidates = [each for each in tensors if each.dtype in FLOAT_DTYPES] or tensors
    if len(candidates) == 1:
        return candidates[0]
    raise InputError(
        f"which tensor holds the query rows is not clear; {source.describe_names()}",
        source=source.path,
        hint=Hint("query_name", "to name it"),
    )


def stated_rows_per_group(source: TensorSource, tensor: StoredTensor) -> int | None:
    """Rows of a group by the tensor's shape, or by the file's metadata; None where neither says.

    Raises
    ------
    ValueError
        The metadata's number is not 1 to 8.
    """
    if len(tensor.shape) == 3:
        return tensor.shape[1]
    text = header_metadata(tensor.path).get(_ROWS_PER_GROUP)  # of its own file alone
    if text is None:
        return None
    rows = whole_number(text)
    if rows is None or not 1 <= rows <= MAX_ROWS:
        raise InputError(
            f"{tensor.path}: header field {_ROWS_PER_GROUP} must be 1 to {MAX_ROWS}, got {text!r}"
        )
    return rows


def spread_groups(groups: int, requests: int) -> list[int]:
    """The first few groups see request 0, as many after them request 1, and so on.

    Raises
    ------
    ValueError
        There are no requests, or the number of groups is not a multiple of theirs.
    """
    if requests == 0 or groups % requests:
        raise InputError(
            f"{groups} groups cannot be spread evenly over the {requests} requests of the keys",
            hint=Hint("requests", "to say which request each group belongs to"),
        )
    return [group * requests // groups for group in range(groups)]


def assumed_requests(
    source: TensorSource, tensor: StoredTensor, groups: int, requests: int
) -> list[int]:
    """`spread_groups`, where nothing beside the query rows says otherwise.

    Raises
    ------
    ValueError
        As `spread_groups`; or a tensor named ``requests`` beside the rows says otherwise.
    """
    beside_rows = [
        each
        for each in beside(tensor, [one for one in source if last_name(one) == "requests"])
        if each.dtype in INTEGER_DTYPES and each.shape == (groups,)
    ]
    told = source.read(beside_rows[0].name).tolist() if beside_rows else None
    uneven = requests == 0 or groups % requests != 0
    if told is not None and (uneven or told != spread_groups(groups, requests)):
        raise InputError(
            f"tensor {beside_rows[0].name} says which request each group of {tensor.name} belongs "
            f"to, and would be passed over",
            source=source.path,
            hint=Hint("requests", "to use it", beside_rows[0].name),
        )
    return spread_groups(groups, requests)


def read_requests(queries: Queries, name: str) -> list[int]:
    """Read a tensor that lies beside the query rows: the request of each group.

    Raises
    ------
    ValueError
        The tensor does not exist or is not one-dimensional.
    TypeError
        It does not hold integers.
    """
    tensor = queries.source[name]
    if tensor.dtype not in INTEGER_DTYPES:
        raise DtypeError(
            f"{tensor.path}: tensor {name} must hold integers, the request of each group, "
            f"got {tensor.dtype}"
        )
    if len(tensor.shape) != 1:
        raise InputError(f"{tensor.path}: tensor {name} must be [groups], got {list(tensor.shape)}")
    return queries.source.read(name).tolist()
