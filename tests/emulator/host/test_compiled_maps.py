"""Tensor maps that compiled host code of CuTe DSL writes by itself, without the driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulator.copies.tensor_map import DataType, TensorMap
from emulator.copies.tensor_map_form import unpack

from .launch_recorder import LaunchRecorder
from .recorded_launch import Device
from .standin import reason_unavailable

pytestmark = [
    pytest.mark.skipif(reason_unavailable() is not None, reason=str(reason_unavailable())),
    # CuTe DSL says so where the recorder has it keep PTX.
    pytest.mark.filterwarnings("ignore:Cache is disabled"),
]
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

ADDRESS = 0x7F12_3456_7000
TYPES = {
    "Uint8": (DataType.UINT8, 8),
    "Float8E4M3FN": (DataType.UINT8, 8),
    "Int16": (DataType.UINT16, 16),
    "Float16": (DataType.FLOAT16, 16),
    "BFloat16": (DataType.BFLOAT16, 16),
    "Uint32": (DataType.UINT32, 32),
    "Float32": (DataType.FLOAT32, 32),
    "TFloat32": (DataType.TFLOAT32, 32),
    "Uint64": (DataType.UINT64, 64),
    "Float64": (DataType.FLOAT64, 64),
    "Float4E2M1FN": (DataType.U4_ALIGN_8B, 4),
}
SWIZZLES = {0: (0, 4, 3), 1: (1, 4, 3), 2: (2, 4, 3), 3: (3, 4, 3), 4: (2, 5, 2)}


@pytest.fixture(scope="module")
def recorder() -> Iterator[LaunchRecorder]:
    with LaunchRecorder(Device(capability=(10, 0))) as recorder:
        yield recorder


def written(
    recorder: LaunchRecorder,
    element: str,
    dimensions: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 0,
) -> bytes:
    """128 bytes of a tensor map; strides in elements, the first of them 1."""
    from .recorded_maps import make_map

    arguments = (element, ADDRESS, dimensions, strides, box, SWIZZLES[swizzle])
    (launch,) = recorder.record(make_map, *arguments)
    return launch.parameter(0)


@pytest.mark.parametrize("element", TYPES)
def test_types(recorder: LaunchRecorder, element: str) -> None:
    data_type, bits = TYPES[element]
    row = 512 * 8 // bits
    form = written(recorder, element, (row // 2, 100), (1, row), (64 * 8 // bits, 16))
    assert unpack(form) == TensorMap(
        data_type, ADDRESS, (row // 2, 100), (512,), (64 * 8 // bits, 16), (1, 1), 0, 0, 2
    )


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_swizzles(recorder: LaunchRecorder, swizzle: int) -> None:
    width = {0: 48, 1: 32, 2: 64}.get(swizzle, 128)
    form = written(recorder, "Uint8", (512, 100), (1, 1024), (width, 16), swizzle)
    tensor = unpack(form)
    assert (tensor.swizzle, tensor.box) == (swizzle, (width, 16))


FAR = ((1 << 39) + 16, (1 << 38) + 32, (1 << 37) + 48, (1 << 36) + 64)


@pytest.mark.parametrize("rank", range(1, 6))
@pytest.mark.parametrize("near", [True, False], ids=["near", "far"])
def test_ranks_sizes_and_strides(recorder: LaunchRecorder, rank: int, near: bool) -> None:
    dimensions = (64, 7, 9, 11, 1 << 31)[:rank]
    strides = ((64, 1024, 16384, 1 << 20) if near else FAR)[: rank - 1]
    box = (32, 2, 3, 4, 256)[:rank]
    form = written(recorder, "Uint8", dimensions, (1, *strides), box)
    tensor = unpack(form)
    assert (tensor.dimensions, tensor.strides, tensor.box) == (dimensions, strides, box)
    assert tensor.address == ADDRESS
