"""The shapes that `sdsa bench` measures: how they are written on the command line and in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sdsa_cli.options import parse_numbers
from sdsa_cli.text import shortened
from sdsa_quant.errors import InputError
from sdsa_quant.files.text import INT32_MAX, read_text, whole_number
from sdsa_quant.layout import MAX_ROWS

_WANTED = "GROUPS,ROWS,LENGTH or GROUPS,ROWS,LENGTH,MAX_CONTEXT, whole numbers"


@dataclass(frozen=True, slots=True)
class ShapeRecord:
    """Sizes of a call."""

    name: str
    """The shape as the tables have it."""
    groups: int
    """Groups of query rows."""
    rows_per_group: int
    """Query rows of a group."""
    length: int | None
    """Keys of each group; null where the groups differ."""
    keys: int
    """Keys of all groups."""
    longest: int
    """Keys of the longest group."""
    max_context: int
    """Columns of the scores."""


@dataclass(frozen=True, slots=True)
class BenchShape:
    """Sizes of the calls of one line."""

    name: str
    """The shape as the tables have it."""
    lengths: tuple[int, ...]
    """Keys of each group."""
    rows_per_group: int
    """Query rows of a group."""
    max_context: int
    """Columns of the scores."""

    def record(self) -> ShapeRecord:
        """The shape in a few numbers, for a JSON document."""
        same = len(set(self.lengths)) == 1
        return ShapeRecord(
            name=self.name,
            groups=len(self.lengths),
            rows_per_group=self.rows_per_group,
            length=self.lengths[0] if same else None,
            keys=sum(self.lengths),
            longest=max(self.lengths),
            max_context=self.max_context,
        )


def parse_shape(text: str) -> BenchShape:
    """A shape such as ``32,1,65536`` or ``32,1,4096,1048576``.

    Raises
    ------
    InputError
        The text is not a shape, or its sizes are out of range.
    """
    numbers = parse_numbers(text)
    if len(numbers) not in (3, 4) or min(numbers) < 1:
        raise InputError(
            f"--shape must be {_WANTED} from 1 to {INT32_MAX}, got {shortened(text)!r}"
        )
    groups, rows, length = numbers[:3]
    max_context = numbers[3] if len(numbers) == 4 else length
    if rows > MAX_ROWS:
        raise InputError(f"--shape must have 1 to {MAX_ROWS} rows, got {text!r}")
    if max_context < length:
        raise InputError(f"--shape must have a MAX_CONTEXT of at least its LENGTH, got {text!r}")
    name = ",".join(map(_short, numbers))
    return BenchShape(f"({name})", (length,) * groups, rows, max_context)


def _short(number: int) -> str:
    """``64K`` for 65,536 and ``1M`` for 1,048,576; any other number in full."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if number % size == 0:
            return f"{number // size}{unit}"
    return str(number)


def read_lengths_file(path: Path) -> BenchShape:
    """A shape of 1 row a group from a file with one length on each line; blank lines are skipped.

    Raises
    ------
    InputError
        A line is not a length, or no line is.
    """
    lengths = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        word = line.strip()
        if not word:
            continue
        length = whole_number(word)
        if length is None:
            raise InputError(
                f"{path}: line {number} must be a group's keys, 0 to {INT32_MAX}, "
                f"got {shortened(word)!r}"
            )
        lengths.append(length)
    if not lengths or not max(lengths):
        raise InputError(f"{path}: must hold the keys of at least one group that has any")
    return BenchShape(path.name, tuple(lengths), 1, max(lengths))
