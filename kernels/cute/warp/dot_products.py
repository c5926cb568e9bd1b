"""Operands whose MMA columns are query rows: 16-bit values, of NVFP4 keys or of BF16 ones."""

import cutlass
from cutlass import Float32, Int32, Int64, Uint32

from sdsa_kernels.cute.ptx import (
    Registers,
    load_global_pair,
    load_global_words,
    load_shared_pair,
    load_shared_words,
    mma_16bit,
)
from sdsa_kernels.cute.unpack import (
    codes_to_bf16,
    codes_to_f16,
    codes_to_f16_by_conversion,
    order_bf16_as_codes,
    scales_to_bf16,
    scales_to_f16,
)
from sdsa_quant.layout import PACKED_DIM, SCALES_PER_KEY

from .operands import BF16_KEY_BYTES, KeyQuarter, Nvfp4Keys, QueryRows, Run, quad


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
        g, t = quad()
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
        g, t = quad()
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
        g, t = quad()
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
        g, t = quad()
        row = Int64(cutlass.min(g, query.rows - 1))
        address = query.address + row * query.stride + Int64(t) * 16
        return tuple(load_global_words(address + chunk * 64, 4) for chunk in range(4))

    def prepare_query(self, fetched: tuple[Registers, ...]) -> tuple[Registers, ...]:
        """The chunks are operands as they are."""
        return fetched

    def read_keys(self, stage: Int32, part: int) -> list[list[Registers]]:
        """The same chunks of this lane's keys ``2 g`` and ``2 g + 1``."""
        g, t = quad()
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
        g, t = quad()
        return [
            Run(row=2 * t + column, key=2 * g, scores=(total[column], total[2 + column]))
            for column in range(2)
        ]
