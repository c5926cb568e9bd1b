"""Operands of MMAs: packing of narrow elements, lanes of rows, scale factors."""

import numpy as np
import pytest

from emulator.errors import TensorMemoryMisuse
from emulator.numbers import number_formats as formats

from .matrix_operands import (
    data_path_lanes,
    decode_tensor_memory_operand,
    scale_operand,
    shared_operand,
    unpack_nibbles,
    unpack_six_bit,
)
from .tensor_memory import TensorMemory

NO_SWIZZLE = 0x1000 >> 4 | (128 >> 4) << 16 | (256 >> 4) << 32 | 1 << 46  # start, LBO, SBO


def pack_bits(codes: list[int], bits: int) -> np.ndarray:
    """Codes side by side from the low bits up, by arithmetic on one big integer."""
    word = sum(code << bits * i for i, code in enumerate(codes))
    return np.frombuffer(word.to_bytes(len(codes) * bits // 8, "little"), np.uint8)


def test_unpacking_narrow_codes() -> None:
    nibbles = [int(x) for x in np.random.default_rng(0).integers(0, 16, 32)]
    sixes = [int(x) for x in np.random.default_rng(1).integers(0, 64, 32)]
    assert unpack_nibbles(pack_bits(nibbles, 4)).tolist() == nibbles
    assert unpack_six_bit(pack_bits(sixes, 6)).tolist() == sixes


# Format, packed side by side, K, bytes read of each 16-byte cell.
STORED = {
    "f16": (formats.F16, False, 16, 16),
    "tf32": (formats.TF32, False, 8, 16),
    "e4m3": (formats.E4M3, False, 32, 16),
    "e2m1-padded": (formats.E2M1, False, 32, 8),
    "e3m2-padded": (formats.E3M2, False, 32, 12),
    "e2m1-packed": (formats.E2M1, True, 64, 16),
}


@pytest.mark.parametrize("name", STORED)
def test_k_major_operands_hold_their_codes_and_skip_padding(name: str) -> None:
    format_, packed, depth, used = STORED[name]
    codes = np.random.default_rng(2).integers(0, 1 << min(format_.bits, 16), (16, depth))
    shared = np.full(0x2000, 0xEE, np.uint8)
    for row in range(16):
        for cell in range(2):
            part = codes[row, cell * depth // 2 : (cell + 1) * depth // 2].tolist()
            start = 0x1000 + row % 8 * 16 + row // 8 * 256 + cell * 128
            data = pack_bits(part, format_.bits)
            assert len(data) == used
            shared[start : start + used] = data
    operand = shared_operand(NO_SWIZZLE, format_, 16, depth, transposed=False, packed=packed)
    dtype = {16: np.uint16, 32: np.uint32}.get(format_.bits, np.uint8)
    expected = format_.decode(codes.astype(dtype))
    np.testing.assert_array_equal(operand.decode(shared[operand.addresses]), expected)
    assert operand.addresses.shape == (16, 2 * used)


def test_mn_major_operand() -> None:
    codes = np.arange(128 * 16, dtype=np.uint16).reshape(128, 16)
    word = 0 | (2048 >> 4) << 16 | (128 >> 4) << 32 | 1 << 46
    shared = np.zeros(8192, np.uint8)
    for row, k in np.ndindex(128, 16):  # cells of 8 rows, 8 k to a stack, SBO 128, LBO 2048
        place = row % 8 * 2 + k % 8 * 16 + row // 8 * 128 + k // 8 * 2048
        shared[place : place + 2] = np.frombuffer(codes[row, k].tobytes(), np.uint8)
    operand = shared_operand(word, formats.F16, 128, 16, transposed=True, packed=False)
    np.testing.assert_array_equal(
        operand.decode(shared[operand.addresses]), formats.F16.decode(codes)
    )


def test_lanes_of_rows() -> None:
    assert data_path_lanes(128, 0).tolist() == list(range(128))
    upper = data_path_lanes(64, 16)
    assert upper[[0, 15, 16, 47, 63]].tolist() == [16, 31, 48, 95, 127]
    for rows, lane in ((128, 16), (64, 8), (64, 32)):
        with pytest.raises(TensorMemoryMisuse, match=f"{rows} rows cannot start at lane {lane}"):
            data_path_lanes(rows, lane)


def test_containers_of_narrow_elements_in_tensor_memory() -> None:
    data = np.array([[0b00_1011_00, 0b11_0111_11]], np.uint8)
    expected = formats.E2M1.decode(np.array([[0b1011, 0b0111]]))
    np.testing.assert_array_equal(
        decode_tensor_memory_operand(data, formats.E2M1, "f8f6f4"), expected
    )
    packed = decode_tensor_memory_operand(np.array([[0xB7]], np.uint8), formats.E2M1, "mxf4")
    np.testing.assert_array_equal(packed, formats.E2M1.decode(np.array([[7, 11]])))
    six = decode_tensor_memory_operand(np.array([[0b11_101101]], np.uint8), formats.E2M3, "f8f6f4")
    np.testing.assert_array_equal(six, formats.E2M3.decode(np.array([[0b101101]])))


def scales_in_memory(rows: int, column: int) -> tuple[TensorMemory, np.ndarray]:
    """Scale codes `[rows, 4]` where the ISA wants them, in all quarters."""
    memory = TensorMemory(np.random.default_rng(0))
    codes = np.random.default_rng(4).integers(0, 0x7F, (rows, 4), dtype=np.uint8)
    for row, i, quarter in np.ndindex(rows, 4, 4):
        lane = row % 32 + 32 * quarter
        memory.data[lane, (column + row // 32) * 4 + i] = codes[row, i]
        memory.written[lane, (column + row // 32) * 4 + i] = True
    return memory, codes


@pytest.mark.parametrize(("first", "count"), [(0, 4), (2, 2), (0, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("rows", [128, 8, 40], ids=str)
def test_scale_factors(rows: int, first: int, count: int) -> None:
    memory, codes = scales_in_memory(rows, column=12)
    read, undefined = scale_operand(12, rows, first, count).read(memory, formats.UE4M3)
    assert undefined is None
    np.testing.assert_array_equal(read, formats.UE4M3.decode(codes[:, first : first + count]))


def test_scale_factors_must_be_the_same_in_all_quarters_where_they_are_written() -> None:
    memory, _ = scales_in_memory(8, column=0)
    memory.data[64 + 9, 1] ^= 1
    _, undefined = scale_operand(0, 16, 0, 4).read(memory, formats.UE4M3)
    assert undefined is not None
    np.testing.assert_array_equal(undefined, np.arange(16) >= 8)
    memory.data[64 + 3, 1] ^= 1
    with pytest.raises(TensorMemoryMisuse, match="differ between the four quarters"):
        scale_operand(0, 8, 0, 4).read(memory, formats.UE4M3)


def test_addresses_of_scale_factors() -> None:
    assert scale_operand(12, 8, 2, 2) == scale_operand(2 << 30 | 12, 8, 2, 2)
    for address in (32 << 16, 1 << 30 | 12):
        with pytest.raises(TensorMemoryMisuse, match=f"from byte 2 on at address {address:#010x}"):
            scale_operand(address, 8, 2, 2)


def test_a_sign_is_no_part_of_a_ue4m3_scale() -> None:
    memory, _ = scales_in_memory(8, column=0)
    memory.data[[0, 32, 64, 96], 0] |= 0x80
    values, _ = scale_operand(0, 8, 0, 4).read(memory, formats.UE4M3)
    assert np.isnan(values[0, 0])
    assert not np.isnan(values.reshape(-1)[1:]).any()
