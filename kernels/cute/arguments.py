"""The arguments of the scoring kernels, once: what they are, in the order in which they are passed.

Every kernel takes the addresses, then (the tcgen05 kernels) two tensor maps, then the sizes. The
kernels' signatures, the placeholders that they are compiled for and the buffer that the host fills
for a launch all come from the two records here. Their fields' types are known by name only, since
a launch imports no CuTe DSL.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutlass import Int32, Int64, Uint32

_STRUCT_CODES = {"Int64": "q", "Int32": "i", "Uint32": "I"}


class Record:
    """A record of scalars, each a parameter of its own in a kernel."""

    def __str__(self) -> str:
        return ""  # a part of a kernel's symbol, which has no room for names


@dataclass(frozen=True)
class Addresses(Record):
    """Where the tensors of a call are; 0 for scales that it does not have.

    A tcgen05 kernel finds query rows and keys through tensor maps instead.
    """

    query: Int64
    query_scales: Int64
    key_cache: Int64
    key_scales: Int64
    block_table: Int64
    context_lengths: Int64
    requests: Int64
    scores: Int64


@dataclass(frozen=True)
class Sizes(Record):
    """Strides, in bytes between rows or pages, and what else a launch needs to know of a call."""

    query_stride: Int64
    query_scale_stride: Int64
    key_stride: Int64
    key_scale_stride: Int64
    table_stride: Int64
    score_stride: Int64
    groups: Int32
    rows: Int32  # of a group
    max_context: Int32
    first_ctas: Int32  # of the first wave
    prefetched_bytes: Int32  # of the block table
    inverse_teams: Uint32  # (2^32 - 1) / teams of the first wave


def types_of(record: type[Record]) -> list[str]:
    """Names of the CuTe DSL types of a record's fields."""
    return [str(field.type) for field in fields(record)]  # type: ignore[arg-type]


def names_of(record: type[Record]) -> list[str]:
    """Names of a record's fields."""
    return [field.name for field in fields(record)]  # type: ignore[arg-type]


def struct_of(record: type[Record]) -> struct.Struct:
    """How a record lies in the buffer of a launch."""
    return struct.Struct("".join(_STRUCT_CODES[name] for name in types_of(record)))
