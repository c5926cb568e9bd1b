"""Probes of tensor-tile copies: swizzles, ranks, element sizes, and boxes that reach outside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from emulator.copies.tensor_map import DataType, TensorMap

from .probe import Probe, module, raw_bytes

_THREADS = 32
_TILE = 2048  # offset in shared memory, behind the barrier
_FILL_NAN = 1
_ITEM_BYTES = {
    DataType.UINT8: 1,
    DataType.UINT16: 2,
    DataType.FLOAT16: 2,
    DataType.BFLOAT16: 2,
    DataType.UINT64: 8,
    DataType.FLOAT64: 8,
}  # 4 for every other type


@dataclass(frozen=True)
class Tile:
    """A tensor, a box of it, and where the box lies in shared memory.

    `tensor` has address 0; `padding` bytes lie between rows, beyond what the strides need.
    """

    name: str
    tensor: TensorMap
    corner: tuple[int, ...]
    shift: int = 0  # bytes from the tile's 1024-byte boundary

    @property
    def tensor_bytes(self) -> int:
        last = zip(self.tensor.dimensions[1:], self.tensor.strides, strict=True)
        row = self.tensor.dimensions[0] * _ITEM_BYTES.get(DataType(self.tensor.data_type), 4)
        return sum((size - 1) * stride for size, stride in last) + row

    @property
    def box_bytes(self) -> int:
        item = _ITEM_BYTES.get(DataType(self.tensor.data_type), 4)
        return item * prod(self.tensor.loaded)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the box, whose rows are as far apart as its swizzle spans."""
        pitched = (0, 32, 64, 128)[self.tensor.swizzle] * prod(self.tensor.loaded[1:])
        return -(-max(self.box_bytes, pitched) // 16) * 16


def _tensor(
    data_type: DataType,
    dimensions: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 0,
    pad: int = 0,
    steps: tuple[int, ...] | None = None,
    fill: int = 0,
) -> TensorMap:
    """A map whose rows have `pad` bytes between them, in the next multiple of 16."""
    strides = []
    pitch = dimensions[0] * _ITEM_BYTES.get(data_type, 4)
    for size in dimensions[1:]:
        pitch = -(-(pitch + pad) // 16) * 16
        strides.append(pitch)
        pitch *= size
    steps = steps or (1,) * len(dimensions)
    return TensorMap(
        data_type, 0, dimensions, tuple(strides), box, steps, swizzle=swizzle, oob_fill=fill
    )


def _load_tiles() -> list[Tile]:
    half, byte, word = DataType.BFLOAT16, DataType.UINT8, DataType.FLOAT32
    tiles = []
    for swizzle, columns in ((0, 64), (1, 16), (2, 32), (3, 64)):
        tensor = _tensor(half, (columns, 40), (columns, 16), swizzle, pad=16)
        tiles.append(Tile(f"swizzle {swizzle}", tensor, (0, 3)))
        for shift in (128, 256, 512, 896):
            small = replace(tensor, box=(columns, 8))
            tiles.append(Tile(f"swizzle {swizzle} at {shift} bytes", small, (0, 30), shift))
        tiles.append(Tile(f"swizzle {swizzle} past the end", tensor, (0, 32)))
        tiles.append(Tile(f"swizzle {swizzle} before the start", tensor, (0, -5)))
    for swizzle, columns in ((2, 16), (3, 16), (3, 32)):
        tensor = _tensor(half, (columns, 24), (columns, 16), swizzle)
        tiles.append(Tile(f"swizzle {swizzle} of rows of {2 * columns} bytes", tensor, (0, 2)))
    tiles += [
        Tile("bytes in one dimension", _tensor(byte, (300,), (256,)), (37,)),
        Tile("bytes outside on both sides", _tensor(byte, (40, 6), (80, 8)), (-16, -1)),
        Tile("halves outside to the right", _tensor(half, (50, 10), (32, 8), 2), (32, 1)),
        Tile("words outside to the left", _tensor(word, (33, 9), (32, 8), 3), (-9, -2)),
        Tile("a box outside of everything", _tensor(word, (33, 9), (8, 4)), (100, 100)),
        Tile("three dimensions", _tensor(half, (40, 5, 4), (32, 3, 3), 2, pad=32), (8, 3, -1)),
        Tile("four dimensions", _tensor(byte, (32, 4, 3, 3), (32, 3, 2, 2), 1), (0, 2, 2, 1)),
        Tile(
            "five dimensions", _tensor(byte, (16, 3, 3, 3, 3), (16, 2, 2, 2, 2)), (0, 1, -1, 2, 0)
        ),
        Tile("64-bit elements", _tensor(DataType.UINT64, (20, 9), (16, 8), 3), (7, 2)),
        Tile("32-bit integers", _tensor(DataType.INT32, (20, 9), (8, 8), 1), (13, 4)),
        Tile("every other row", _tensor(half, (32, 40), (32, 16), 2, steps=(1, 2)), (0, 5)),
        Tile(
            "every third row, past the end", _tensor(half, (8, 20), (8, 16), steps=(1, 3)), (0, 9)
        ),
        Tile("tf32", _tensor(DataType.TFLOAT32, (24, 9), (16, 8), 2), (5, 2)),
        Tile("float32 flushed", _tensor(DataType.FLOAT32_FTZ, (24, 9), (16, 8), 2), (5, 2)),
    ]
    for data_type in (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32, DataType.FLOAT64):
        tensor = _tensor(data_type, (20, 9), (8, 8), fill=_FILL_NAN)
        tiles.append(Tile(f"NaN outside, {data_type.name}", tensor, (15, 4)))
        tiles.append(Tile(f"NaN outside, {data_type.name}, aligned", tensor, (16, 4)))
    return [*tiles, *_aligned_load_tiles()]


def _aligned_load_tiles() -> list[Tile]:
    """What some of the others do, at starts that are multiples of 16 bytes within a row."""
    half, byte, word = DataType.BFLOAT16, DataType.UINT8, DataType.FLOAT32
    flushed = DataType.TFLOAT32_FTZ
    nan = _tensor(half, (24, 9), (16, 8), 1, fill=_FILL_NAN)
    return [
        Tile("aligned bytes in one dimension", _tensor(byte, (300,), (256,)), (48,)),
        Tile("aligned words outside to the left", _tensor(word, (33, 9), (32, 8), 3), (-8, -2)),
        Tile("aligned 64-bit elements", _tensor(DataType.UINT64, (20, 9), (16, 8), 3), (6, 2)),
        Tile("aligned 64-bit floats", _tensor(DataType.FLOAT64, (20, 9), (8, 8), 2), (14, 2)),
        Tile("aligned 32-bit integers", _tensor(DataType.INT32, (20, 9), (8, 8), 1), (16, 4)),
        Tile("aligned 16-bit integers", _tensor(DataType.UINT16, (40, 9), (16, 8), 1), (32, 4)),
        Tile("aligned tf32", _tensor(DataType.TFLOAT32, (24, 9), (16, 8), 2), (12, 2)),
        Tile("aligned tf32 flushed", _tensor(flushed, (24, 9), (16, 8), 2), (12, 2)),
        Tile(
            "aligned float32 flushed",
            _tensor(DataType.FLOAT32_FTZ, (24, 9), (16, 8), 2),
            (12, 2),
        ),
        Tile("NaN before and behind", nan, (-8, -3)),
        Tile("steps along the row", _tensor(word, (33, 9), (8, 8), steps=(2, 1)), (8, 2)),
    ]


def _coordinates(tile: Tile) -> str:
    return ", ".join(str(each) for each in tile.corner)


def _load_probe(tile: Tile) -> Probe:
    size = tile.box_bytes
    dumped = -(-tile.shared_bytes // 512) * 512
    body = f"""
        .reg .b32 base, bar, place, w0, w1, w2, w3; .reg .b64 target; .reg .pred p, done, more;
        mov.u32 bar, shared;
        add.u32 base, bar, {_TILE + tile.shift};
        mov.b32 w0, 0xA5A5A5A5;
        mad.lo.u32 place, tid, 16, base;
        FILL:
        st.shared.v4.b32 [place], {{w0, w0, w0, w0}};
        add.u32 place, place, {16 * _THREADS};
        sub.u32 w1, place, base;
        setp.lt.u32 more, w1, {dumped};
        @more bra FILL;
        fence.proxy.async;
        setp.eq.u32 p, tid, 0;
        @p mbarrier.init.shared.b64 [bar], 1;
        fence.mbarrier_init.release.cluster;
        barrier.sync 0;
        @!p bra WAIT;
        mbarrier.arrive.expect_tx.shared.b64 _, [bar], {size};
        cp.async.bulk.tensor.{tile.tensor.rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
            [base], [map0, {{{_coordinates(tile)}}}], [bar];
        WAIT:
        mbarrier.try_wait.parity.shared.b64 done, [bar], 0;
        @!done bra WAIT;
        mad.lo.u32 place, tid, 16, base;
        mul.wide.u32 target, tid, 16;
        add.u64 target, target, out;
        DUMP:
        ld.shared.v4.b32 {{w0, w1, w2, w3}}, [place];
        st.global.v4.b32 [target], {{w0, w1, w2, w3}};
        add.u32 place, place, {16 * _THREADS};
        add.u64 target, target, {16 * _THREADS};
        sub.u32 w1, place, base;
        setp.lt.u32 more, w1, {dumped};
        @more bra DUMP;
    """
    return Probe(
        f"tile load, {tile.name}",
        module(1, body, maps=1),
        (raw_bytes(tile.name, tile.tensor_bytes),),
        dumped,
        shared_bytes=_TILE + 1024 + dumped,
        maps=((0, tile.tensor),),
    )


def _store_tiles() -> list[Tile]:
    half, byte, word = DataType.BFLOAT16, DataType.UINT8, DataType.FLOAT32
    tiles = []
    for swizzle, columns in ((0, 64), (1, 16), (2, 32), (3, 64)):
        tensor = _tensor(half, (columns, 12), (columns, 8), swizzle, pad=16)
        tiles.append(Tile(f"swizzle {swizzle}", tensor, (0, 2)))
        tiles.append(Tile(f"swizzle {swizzle} at 384 bytes, past the end", tensor, (0, 7), 384))
    tiles += [
        Tile("bytes outside on both sides", _tensor(byte, (40, 6), (80, 8)), (-16, -1)),
        Tile("words outside to the left", _tensor(word, (33, 9), (32, 4), 3), (-9, -2)),
        Tile("three dimensions", _tensor(half, (40, 5, 4), (32, 3, 3), 2, pad=32), (8, 3, -1)),
        Tile(
            "five dimensions", _tensor(byte, (16, 3, 3, 3, 3), (16, 2, 2, 2, 2)), (0, 1, -1, 2, 0)
        ),
        Tile("every other row", _tensor(half, (32, 20), (32, 8), 2, steps=(1, 2)), (0, 3)),
        Tile("aligned bytes outside to the right", _tensor(byte, (40, 6), (80, 8)), (32, 1)),
        Tile("aligned words outside to the left", _tensor(word, (33, 9), (32, 4), 3), (-8, 2)),
        Tile("aligned words outside above", _tensor(word, (33, 9), (32, 4), 3), (8, -2)),
        Tile("aligned words outside behind", _tensor(word, (33, 9), (32, 4), 3), (8, 7)),
        Tile("three dimensions, within", _tensor(half, (40, 5, 4), (32, 3, 3), 2, 32), (8, 3, 2)),
        Tile(
            "five dimensions, within",
            _tensor(byte, (16, 3, 3, 3, 3), (16, 2, 2, 2, 2)),
            (0, 1, 2, 2, 0),
        ),
        Tile("a row of 64-bit elements", _tensor(DataType.UINT64, (20,), (16,)), (6,)),
    ]
    for swizzle, columns in ((2, 16), (3, 32)):
        tensor = _tensor(half, (columns, 12), (columns, 8), swizzle)
        tiles.append(Tile(f"swizzle {swizzle} of rows of {2 * columns} bytes", tensor, (0, 2)))
    return tiles


def _store_body(tile: Tile, instruction: str, target_bytes: int) -> str:
    """Fill the output from in1 and shared memory from in0, then send the box out."""
    size = tile.shared_bytes
    return f"""
        .reg .b32 base, place, left, w0, w1, w2, w3; .reg .b64 source, target; .reg .pred p, more;
        mov.u32 base, shared;
        add.u32 base, base, {_TILE + tile.shift};
        mad.lo.u32 place, tid, 16, base;
        mul.wide.u32 source, tid, 16;
        add.u64 source, source, in0;
        FILL:
        sub.u32 left, place, base;
        setp.ge.u32 more, left, {size};
        @more bra FILLED;
        ld.global.v4.b32 {{w0, w1, w2, w3}}, [source];
        st.shared.v4.b32 [place], {{w0, w1, w2, w3}};
        add.u32 place, place, {16 * _THREADS};
        add.u64 source, source, {16 * _THREADS};
        bra FILL;
        FILLED:
        mul.wide.u32 source, tid, 16;
        add.u64 target, source, out;
        add.u64 source, source, in1;
        mul.lo.u32 left, tid, 16;
        SET:
        setp.ge.u32 more, left, {target_bytes};
        @more bra READY;
        ld.global.v4.b32 {{w0, w1, w2, w3}}, [source];
        st.global.v4.b32 [target], {{w0, w1, w2, w3}};
        add.u64 source, source, {16 * _THREADS};
        add.u64 target, target, {16 * _THREADS};
        add.u32 left, left, {16 * _THREADS};
        bra SET;
        READY:
        fence.proxy.async;
        barrier.sync 0;
        setp.ne.u32 p, tid, 0;
        @p bra END;
        {instruction} [map0, {{{_coordinates(tile)}}}], [base];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        END:
    """


def _store_probe(tile: Tile, reduction: str | None = None, integers: bool = False) -> Probe:
    rank = tile.tensor.rank
    instruction = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
    if reduction:
        instruction = (
            f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{reduction}.tile.bulk_group"
        )
    target_bytes = -(-tile.tensor_bytes // 16) * 16
    source = raw_bytes(f"{tile.name} source", tile.shared_bytes)
    before = raw_bytes(f"{tile.name} target", target_bytes)
    if integers:  # whose sums are exact as float32 too
        source = (source.view("<u4") & np.uint32(0xFFFF)).astype("<f4").view(np.uint8)
        before = (before.view("<u4") & np.uint32(0xFFFF)).astype("<f4").view(np.uint8)
    return Probe(
        f"tile {reduction or 'store'}, {tile.name}",
        module(2, _store_body(tile, instruction, target_bytes), maps=1),
        (source, before),
        target_bytes,
        shared_bytes=_TILE + 1024 + tile.shared_bytes,
        maps=((-1, tile.tensor),),
    )


def _reductions() -> list[Probe]:
    words = _tensor(DataType.UINT32, (20, 9), (32, 4), 3)
    floats = _tensor(DataType.FLOAT32, (20, 9), (16, 8), 2)
    tiles = {
        "add": Tile("uint32", words, (4, 6)),
        "max": Tile("uint32", words, (-4, -2)),
        "xor": Tile("uint32", words, (0, 0)),
    }
    probes = [_store_probe(tile, operation) for operation, tile in tiles.items()]
    halves = _tensor(DataType.FLOAT16, (40, 9), (32, 8), 2)
    probes += [
        _store_probe(Tile("float32", floats, (7, 3)), "add", integers=True),
        _store_probe(Tile("float32, aligned", floats, (8, 3)), "add", integers=True),
        _store_probe(Tile("uint32, aligned", words, (4, 7)), "max"),
        _store_probe(Tile("uint32, aligned", words, (4, 7)), "inc"),
        _store_probe(Tile("int32", replace(words, data_type=DataType.INT32), (8, 1)), "min"),
        _store_probe(Tile("float16", halves, (16, 2)), "min"),
        _store_probe(Tile("bfloat16", replace(halves, data_type=DataType.BFLOAT16), (8, 4)), "add"),
    ]
    return probes


def tile_probes() -> list[Probe]:
    """Every probe of this module."""
    probes = [_load_probe(tile) for tile in _load_tiles()]
    probes += [_store_probe(tile) for tile in _store_tiles()]
    return [*probes, *_reductions()]
