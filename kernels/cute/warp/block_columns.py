"""Operands whose MMA columns are the scale blocks of a query row: int8 values of NVFP4 keys."""

from typing import NamedTuple

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
    mma_s8,
    multiply_f16x2,
)
from sdsa_kernels.cute.unpack import codes_to_int8, codes_to_magnitudes, magnitude_table
from sdsa_quant.layout import PACKED_DIM, SCALES_PER_KEY

from .operands import QUARTER_F16X2, KeyQuarter, Nvfp4Keys, QueryRows, Run, quad


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
        _, t = quad()
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
        g, t = quad()
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
        g, t = quad()
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
        g, t = quad()
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
        _, t = quad()
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
