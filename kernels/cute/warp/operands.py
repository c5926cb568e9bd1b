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
    as_float,
    e4m3x2_to_f16x2,
    f16x2_to_floats,
    fused_multiply_add,
    load_global_pair,
    load_global_words,
    load_shared_pair,
    load_shared_words,
    mma_16bit,
    mma_s8,
    multiply_f16x2,
    store_global_floats,
)
from sdsa_kernels.cute.unpack import (
    codes_to_bf16,
    codes_to_f16,
    codes_to_f16_by_conversion,
    codes_to_int8,
    codes_to_magnitudes,
    magnitude_table,
    order_bf16_as_codes,
    scales_to_bf16,
    scales_to_f16,
)
from sdsa_quant.layout import CODE_PAGE_BYTES, DIM, PACKED_DIM, SCALE_PAGE_BYTES, SCALES_PER_KEY

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


def _quad() -> tuple[Int32, Int32]:
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
    """One way to score a page; its methods run while a kernel is traced, once per place of use."""

    short: bool  # for lists of a few pages for every team
    team: int  # warps that score a page together, an equal part of its keys each
    key_bytes: int  # of a warp's key values
    scale_bytes: int
    stages: int  # of a warp's ring
    parts: int  # in which these are read and scored, to hold fewer registers
    two_late_pages: int  # see `cute_schedule.Worker`

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


class DotProducts(Nvfp4Keys):
    """Columns are query rows, operands are 16-bit: one MMA column per row, up to 8 rows.

    NVFP4 keys become value times scale, which is exact in FP16 and in BF16; a power of two that the
    decoding leaves out is put back into the FP32 sums. Lane ``(g, t)`` ends up with the scores of
    rows ``2 t`` and ``2 t + 1``.
    """

    def __init__(self, mixed: bool, converts: bool, short: bool) -> None:
        super().__init__(short)
        self.kind = "bf16" if mixed else "f16"
        self.mixed = mixed
        self.decode = codes_to_f16_by_conversion if converts else codes_to_f16
        code_exponent = 0 if converts else 14
        self.exponent = 6 if mixed else 2 * code_exponent

    def fetch_query(self, query: QueryRows) -> tuple[Registers, ...]:
        """A lane's quarter of query row ``g``; columns past the rows repeat the last one."""
        g, t = _quad()
        row = Int64(cutlass.min(g, query.rows - 1))
        if self.mixed:
            address = query.address + row * query.stride + Int64(t) * 64
            return tuple(load_global_words(address + word * 16, 4) for word in range(4))
        codes = load_global_words(query.address + row * query.stride + Int64(t) * 16, 4)
        scales = load_global_pair(query.scales + row * query.scale_stride + Int64(t) * 2)
        return codes, (scales,)

    def prepare_query(self, fetched: tuple[Registers, ...]) -> tuple[Registers, ...]:
        """Per word of key codes, the four registers that meet it."""
        if self.mixed:
            return tuple(order_bf16_as_codes(values) for values in fetched)
        codes, (pair,) = fetched
        scales = scales_to_f16(pair)
        return tuple(self.decode(codes[i], scales[i // 2]) for i in range(4))

    def read_keys(self, stage: Int32, part: int) -> list[KeyQuarter]:
        """This lane's quarter of its keys ``4 g .. 4 g + 3`` of half a page."""
        g, t = _quad()
        codes = stage + g * (4 * PACKED_DIM) + t * 16
        scales = stage + self.key_bytes + g * (4 * SCALES_PER_KEY) + t * 2
        return [
            KeyQuarter(
                load_shared_words(codes + key * PACKED_DIM),
                load_shared_pair(scales + key * SCALES_PER_KEY),
            )
            for key in range(32 * part, 32 * part + 4)
        ]

    def score(self, query: tuple[Registers, ...], keys: list[KeyQuarter], part: int) -> list[Run]:
        """Scores of half a page."""
        expand = scales_to_bf16 if self.mixed else scales_to_f16
        decode = codes_to_bf16 if self.mixed else self.decode
        scales = [expand(key.scales) for key in keys]
        sums = [(Float32(0.0),) * 4] * 2
        for word, q in enumerate(query):
            for tile in range(2):  # two independent chains of MMAs at a time
                a, b = (
                    decode(keys[i].codes[word], scales[i][word // 2])
                    for i in (2 * tile, 2 * tile + 1)
                )
                sums[tile] = mma_16bit(self.kind, (a[0], b[0], a[1], b[1]), q[0:2], sums[tile])
                sums[tile] = mma_16bit(self.kind, (a[2], b[2], a[3], b[3]), q[2:4], sums[tile])
        g, t = _quad()
        factor = Float32(2.0**self.exponent)
        return [
            Run(
                row=2 * t + column,
                key=32 * part + 4 * g,
                scores=tuple(total[row + column] * factor for total in sums for row in (0, 2)),
            )
            for column in range(2)
        ]


class Bf16DotProducts:
    """BF16 keys and query rows, a quarter page a warp; columns are query rows."""

    short = False
    team = 4
    key_bytes = 16 * BF16_KEY_BYTES
    scale_bytes = 0
    stages = 2
    parts = 1
    two_late_pages = 48

    def fetch_query(self, query: QueryRows) -> tuple[Registers, ...]:
        """Four 16-byte chunks of a row; columns past the rows repeat one."""
        g, t = _quad()
        row = Int64(cutlass.min(g, query.rows - 1))
        address = query.address + row * query.stride + Int64(t) * 16
        return tuple(load_global_words(address + chunk * 64, 4) for chunk in range(4))

    def prepare_query(self, fetched: tuple[Registers, ...]) -> tuple[Registers, ...]:
        """The chunks are operands as they are."""
        return fetched

    def read_keys(self, stage: Int32, part: int) -> list[list[Registers]]:
        """The same chunks of this lane's keys ``2 g`` and ``2 g + 1``."""
        g, t = _quad()
        address = stage + g * (2 * BF16_KEY_BYTES) + t * 16
        return [
            [load_shared_words(address + key * BF16_KEY_BYTES + chunk * 64) for chunk in range(4)]
            for key in range(2)
        ]

    def loaded_words(self, keys: list[list[Registers]]) -> list[Uint32]:
        """A word of every load of `read_keys`."""
        return [chunk[0] for chunks in keys for chunk in chunks]

    def score(
        self, query: tuple[Registers, ...], keys: list[list[Registers]], part: int
    ) -> list[Run]:
        """Scores of the quarter page."""
        total = (Float32(0.0),) * 4
        for a, b, q in zip(*keys, query, strict=True):
            total = mma_16bit("bf16", (a[0], b[0], a[1], b[1]), q[0:2], total)
            total = mma_16bit("bf16", (a[2], b[2], a[3], b[3]), q[2:4], total)
        g, t = _quad()
        return [
            Run(row=2 * t + column, key=2 * g, scores=(total[column], total[2 + column]))
            for column in range(2)
        ]


class BlockRow(NamedTuple):
    """A query row as N operands, one pair of registers per word of codes."""

    words: list[Registers]  # twice the values
    scales: Uint32  # FP16 pair: a quarter of the scales of blocks 2 t and 2 t + 1


class BlockColumns(Nvfp4Keys):
    """Columns are the 8 scale blocks of one query row, operands are int8: for 1 or 2 NVFP4 rows.

    Column ``b`` of the N operand holds the row's block ``b`` and zeros elsewhere, so an MMA gives
    every key's 8 partial dots, one per block, as exact integers: four times the dot of the codes.
    Scales are applied to these, once per key and block, instead of once per value. Positive and
    negative codes of the keys go through separate MMAs, which makes decoding one instruction for 4
    codes.

    Both integer sums start at the bits of the float 1.5 * 2^23, which makes them floats of that
    much more; their difference is exact. A
    product of two scales and 2^-2 is a multiple of 2^-20 below 2^16 with at most 8 significant
    bits: exact in FP16. Lane ``(g, t)`` holds the partial dots of blocks ``2 t`` and ``2 t + 1`` of
    its keys.
    """

    START_BITS = 0x4B400000

    def __init__(self, rows: int, short: bool) -> None:
        super().__init__(short)
        self.rows = rows

    def fetch_query(self, query: QueryRows) -> tuple[tuple[Registers, Uint16], ...]:
        """Per row, this lane's quarter of the codes and its scale pair."""
        _, t = _quad()
        return tuple(
            (
                load_global_words(query.address + row * query.stride + Int64(t) * 16, 4),
                load_global_pair(query.scales + row * query.scale_stride + Int64(t) * 2),
            )
            for row in range(self.rows)
        )

    def prepare_query(
        self, fetched: tuple[tuple[Registers, Uint16], ...]
    ) -> tuple[Uint32, list[BlockRow]]:
        """The magnitude table, and the N operands of every row."""
        g, t = _quad()
        table = magnitude_table()
        rows = []
        for codes, pair in fetched:
            # Words 0 and 1 are block 2 t, words 2 and 3 block 2 t + 1; g is the column.
            own = [
                cutlass.select_(g == 2 * t + i // 2, word, Uint32(0))
                for i, word in enumerate(codes)
            ]
            scales = multiply_f16x2(e4m3x2_to_f16x2(pair), Uint32(QUARTER_F16X2))
            rows.append(BlockRow([codes_to_int8(word, table) for word in own], scales))
        return table, rows

    def read_keys(self, stage: Int32, part: int) -> list[KeyQuarter]:
        """This lane's quarter of its keys ``4 g + (i ^ (g & 1))``, ``i = 0..3``, of half a page.

        The exchange of neighbours in odd ``g`` keeps the 8 lanes that shared memory serves at a
        time in different banks.
        """
        g, t = _quad()
        odd = g & 1
        codes = stage + g * (4 * PACKED_DIM) + t * 16
        scales = stage + self.key_bytes + g * (4 * SCALES_PER_KEY) + t * 2
        keys = []
        for i in range(4):
            shift = odd if i % 2 == 0 else -odd
            key = 32 * part + i
            keys.append(
                KeyQuarter(
                    load_shared_words(codes + shift * PACKED_DIM + key * PACKED_DIM),
                    load_shared_pair(scales + shift * SCALES_PER_KEY + key * SCALES_PER_KEY),
                )
            )
        return keys

    def score(
        self, query: tuple[Uint32, list[BlockRow]], keys: list[KeyQuarter], part: int
    ) -> list[Run]:
        """Scores of half a page, one key per lane."""
        table, rows = query
        dots = self._dot_blocks(table, rows, [key.codes for key in keys])
        sums: list[list[Float32]] = [[] for _ in rows]
        for key, key_dots in zip(keys, dots, strict=True):
            key_scales = e4m3x2_to_f16x2(key.scales)
            for row, (even_dot, odd_dot) in enumerate(key_dots):
                even, odd = f16x2_to_floats(multiply_f16x2(key_scales, rows[row].scales))
                sums[row].append(fused_multiply_add(odd_dot, odd, even_dot * even))
        g, t = _quad()
        kept = 2 * (t & 1) + (t >> 1)
        key = 32 * part + 4 * g + (kept ^ (g & 1))
        return [
            Run(row=Int32(row), key=key, scores=(self._sum_over_quad(sums[row]),))
            for row in range(self.rows)
        ]

    def _dot_blocks(
        self, table: Uint32, rows: list[BlockRow], codes: list[Registers]
    ) -> list[list[tuple[Float32, Float32]]]:
        """Per key and row, the partial dots of the lane's two blocks of the key's codes."""
        start = (Uint32(self.START_BITS),) * 4
        plus = [[start] * self.rows for _ in range(2)]
        minus = [[start] * self.rows for _ in range(2)]
        for word in range(4):
            for tile in range(2):  # independent chains of MMAs
                upper_plus, upper_minus = codes_to_magnitudes(codes[2 * tile][word], table)
                lower_plus, lower_minus = codes_to_magnitudes(codes[2 * tile + 1][word], table)
                a_plus = (upper_plus[0], lower_plus[0], upper_plus[1], lower_plus[1])
                a_minus = (upper_minus[0], lower_minus[0], upper_minus[1], lower_minus[1])
                for row, operands in enumerate(rows):
                    b = operands.words[word]
                    plus[tile][row] = mma_s8(a_plus, b, plus[tile][row])
                    minus[tile][row] = mma_s8(a_minus, b, minus[tile][row])
        return [
            [
                tuple(
                    as_float(plus[tile][row][2 * half + column])
                    - as_float(minus[tile][row][2 * half + column])
                    for column in range(2)
                )
                for row in range(self.rows)
            ]
            for tile in range(2)
            for half in range(2)
        ]

    @staticmethod
    def _sum_over_quad(sums: list[Float32]) -> Float32:
        """Add up a row's 8 blocks; each lane keeps the sum of one of its quad's 4 keys."""
        _, t = _quad()
        sums = _exchange_halves(sums, (t & 1) == 1, 1)
        (total,) = _exchange_halves(sums, (t & 2) == 2, 2)
        return total


def _exchange_halves(sums: list[Float32], keep_upper: Boolean, distance: int) -> list[Float32]:
    """Half of the sums, each with its counterpart from the lane `distance` away added."""
    half = len(sums) // 2
    kept = []
    for lower, upper in zip(sums[:half], sums[half:], strict=True):
        give = cutlass.select_(keep_upper, lower, upper)
        keep = cutlass.select_(keep_upper, upper, lower)
        kept.append(keep + cute.arch.shuffle_sync_bfly(give, distance))
    return kept
