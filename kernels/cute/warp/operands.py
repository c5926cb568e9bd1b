"""How a warp scores its keys of one page: which bytes it reads, its MMAs, and where the scores go.

Keys are the M operand and query rows the N = 8 columns of an m16n8 MMA. Lane ``4 g + t`` of a warp
supplies rows ``g`` and ``g + 8`` of the M operand. The order of the 128 values along K is free as
long as keys and query rows share it, so a lane takes consecutive bytes of a key, quarter ``t``,
with 16-byte loads: for NVFP4 exactly 32 values, which are blocks ``2 t`` and ``2 t + 1``.
"""

from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32

from sdsa_kernels.cute.ptx import (
    Registers,
    store_global_floats,
)
from sdsa_quant.layout import CODE_PAGE_BYTES, DIM, SCALE_PAGE_BYTES

QUARTER_F16X2 = 0x34003400  # FP16 pair (0.25, 0.25)
BF16_KEY_BYTES = 2 * DIM


class QueryRows(NamedTuple):
    """The query rows of a group, or of all groups."""

    address: Int64
    stride: Int64  # bytes
    scales: Int64
    scale_stride: Int64
    rows: Int32  # of a group

    def of_group(self, group: Int32) -> "QueryRows":
        """The rows of one of all groups."""
        row = Int64(group) * Int64(self.rows)
        return self._replace(
            address=self.address + row * self.stride, scales=self.scales + row * self.scale_stride
        )


class ScoreRows(NamedTuple):
    """The score rows of a group, or of all groups."""

    address: Int64
    stride: Int64  # bytes
    rows: Int32  # of a group
    keys: Int32  # the group's length
    aligned: Boolean  # rows start at multiples of 16 bytes

    def of_group(self, group: Int32, keys: Int32) -> "ScoreRows":
        """The rows of one of all groups, which has `keys` keys."""
        row = Int64(group) * Int64(self.rows)
        return self._replace(address=self.address + row * self.stride, keys=keys)

    def from_key(self, key: Int32) -> "ScoreRows":
        """The same rows without the keys before `key`, a multiple of 4."""
        return self._replace(address=self.address + Int64(key) * 4, keys=self.keys - key)


def quad() -> tuple[Int32, Int32]:
    """(g, t) of this lane."""
    lane = cute.arch.lane_idx()
    return lane >> 2, lane & 3


class Run(NamedTuple):
    """Scores of consecutive keys of one query row, held by one lane."""

    row: Int32  # in the group
    key: Int32  # of the first score, in the page
    scores: tuple[Float32, ...]


def _store_whole_runs(runs: list[Run], target: ScoreRows, first_key: Int32) -> None:
    for run in runs:
        address = target.address + Int64(run.row) * target.stride + Int64(first_key + run.key) * 4
        store_global_floats(address, run.scores, run.row < target.rows)


def _store_single_scores(runs: list[Run], target: ScoreRows, first_key: Int32) -> None:
    for run in runs:
        address = target.address + Int64(run.row) * target.stride + Int64(first_key + run.key) * 4
        for i, score in enumerate(run.scores):
            inside = (run.row < target.rows) & (first_key + run.key + i < target.keys)
            store_global_floats(address + i * 4, (score,), inside)


@cute.jit
def store_scores(
    runs: cutlass.Constexpr[list[Run]],
    target: ScoreRows,
    first_key: Int32,
    keys: cutlass.Constexpr[int],
) -> None:
    """Store scores of `keys` keys from a first one on; entries past the length stay untouched."""
    if cutlass.const_expr(all(len(run.scores) == 1 for run in runs)):
        _store_single_scores(runs, target, first_key)
    elif target.aligned and first_key + keys <= target.keys:
        _store_whole_runs(runs, target, first_key)
    else:
        _store_single_scores(runs, target, first_key)


class Operands(Protocol):
    """One way to score a page; its methods run while a kernel is traced, once per use."""

    short: bool  # for lists of a few pages for every team
    team: int  # warps that score a page together, an equal part of its keys each
    key_bytes: int  # of a warp's key values
    scale_bytes: int
    stages: int  # of a warp's ring
    parts: int  # in which these are read and scored, to hold fewer registers
    two_late_pages: int  # see `schedule.Worker`

    def fetch_query(self, query: QueryRows) -> Any:
        """Start to load what a lane needs of the query rows."""

    def prepare_query(self, fetched: Any) -> Any:
        """N operands from what was fetched."""

    def read_keys(self, stage: Int32, part: int) -> Any:
        """What a lane needs of a part of the keys in shared memory."""

    def loaded_words(self, keys: Any) -> list[Uint32]:
        """A word of every load of `read_keys`."""

    def score(self, query: Any, keys: Any, part: int) -> list[Run]:
        """Scores of a part of the keys."""


class KeyQuarter(NamedTuple):
    """A quarter of a key: what one lane decodes of it."""

    codes: Registers  # 4 words
    scales: Uint16  # 2 bytes


class Nvfp4Keys:
    """NVFP4 keys: a page a warp, in two halves, or for short lists a half for each of two warps.

    Halves are sooner scored once they are there, but cost more instructions and copies.
    """

    two_late_pages = 0

    def __init__(self, short: bool) -> None:
        self.short = short
        self.team = team = 2 if short else 1
        self.key_bytes = CODE_PAGE_BYTES // team
        self.scale_bytes = SCALE_PAGE_BYTES // team
        self.stages = 2 * team  # a third page in flight costs 3 % on an H200
        self.parts = 2 // team

    def loaded_words(self, keys: list[KeyQuarter]) -> list[Uint32]:
        """A word of every load of `read_keys`."""
        return [key.codes[0] for key in keys] + [Uint32(key.scales) for key in keys]
