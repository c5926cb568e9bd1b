"""Recorded launches: parameters, tensor maps, attributes, and what the stand-in refuses."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from emulator.copies.tensor_map import DataType, TensorMap
from emulator.copies.tensor_map_form import MAP_BYTES, unpack
from emulator.host.kernel_image import ELF_MAGIC, elf_kernels, ptx_kernels
from emulator.host.launch_recorder import LaunchRecorder, RecordingError
from emulator.host.recorded_launch import Device
from emulator.host.standin import reason_unavailable
from support.problems import make_problem

from .recorded_calls import (
    call_unanswered,
    check_occupancy,
    launch_ptx,
    launch_scores,
    launch_with_too_much_shared_memory,
)

pytestmark = pytest.mark.skipif(reason_unavailable() is not None, reason=str(reason_unavailable()))
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

# In the order of kernels/cute/warp/kernel.py: addresses, strides, sizes.
ORDER = struct.Struct("<8q6q5iI")
VARIANTS = {
    ("bf16", 1): "bf16",
    ("mixed", 3): "mixed_short",
    ("nvfp4", 1): "blocks1_short",
    ("nvfp4", 2): "blocks2_short",
    ("nvfp4", 8): "nvfp4_short",
}
PTX = """
.version 8.3
.target sm_90a
.address_size 64
.visible .entry probe(
    .param .u64 target, .param .u32 count, .param .align 64 .b8 map[128])
.reqntid 64, 2 { ret; }
.visible .entry plain(.param .u64 target, .param .u32 count)  // no map
{ ret; }
"""
MAP = TensorMap(
    data_type=DataType.BFLOAT16,
    address=0x7F00_0000_1230,
    dimensions=(2**32, 1000, 3, 5),
    strides=(128, 2**40 - 16, 4096),
    box=(64, 256, 1, 2),
    element_strides=(1, 8, 1, 2),
    swizzle=3,
    l2_promotion=2,
    oob_fill=1,
)


@pytest.fixture(scope="module")
def recorder() -> Iterator[LaunchRecorder]:
    with LaunchRecorder() as recorder:
        yield recorder


@pytest.mark.parametrize(("kind", "rows"), VARIANTS)
def test_parameters_of_a_scores_call(
    recorder: LaunchRecorder, generator: torch.Generator, kind: str, rows: int
) -> None:
    problem = make_problem([70, 0, 5], generator=generator, kind=kind, rows_per_group=rows)
    (launch,) = recorder.record(launch_scores, problem)
    assert launch.kernel.endswith(f"{VARIANTS[kind, rows]}_0")
    pages = 3 * 2  # that the scores have room for; a CTA each
    assert launch.grid == (pages, 1, 1)
    assert launch.block == (256, 1, 1)
    assert launch.cluster == (1, 1, 1)
    assert launch.kernel_attributes == {8: launch.shared_bytes}

    (
        query, query_scales, keys, key_scales, table, lengths, requests, scores,
        query_stride, query_scale_stride, key_stride, key_scale_stride, table_stride, score_stride,
        groups, rows_per_group, width, first_ctas, prefetched, inverse,
    ) = ORDER.unpack(launch.parameters)  # fmt: skip
    assert (groups, rows_per_group, width) == (3, rows, problem.scores.shape[1])
    assert (first_ctas, prefetched) == (pages, 4 * problem.block_table.numel())
    teams = pages * {"bf16": 2}.get(kind, 4)  # four warps share a BF16 page, two an NVFP4 one
    assert inverse == (2**32 - 1) // teams
    given = {
        "query": (query, query_stride),
        "query_scales": (query_scales, query_scale_stride),
        "key_cache": (keys, key_stride),
        "key_scales": (key_scales, key_scale_stride),
        "block_table": (table, table_stride),
        "context_lengths": (lengths, None),
        "requests": (requests, None),
        "scores": (scores, score_stride),
    }
    for name, (address, stride) in given.items():
        tensor = getattr(problem, name)
        if tensor is None:
            assert (address, stride) == (0, 0)
            continue
        assert stride in (None, tensor.stride(0) * tensor.element_size())
        region = next(each for each in launch.memory if address in each)
        start = address - region.address
        first = tensor.view(torch.uint8)[0].flatten().numpy().tobytes()
        assert region.content[start : start + len(first)] == first


def test_the_binary_and_its_ptx_agree(recorder: LaunchRecorder, generator: torch.Generator) -> None:
    (launch,) = recorder.record(launch_scores, make_problem([70], generator=generator))
    assert launch.ptx is not None
    assert launch.image.startswith(ELF_MAGIC)
    in_binary = elf_kernels(launch.image)
    in_ptx = ptx_kernels(launch.ptx)
    assert list(in_binary) == list(in_ptx) == [launch.kernel]
    assert in_binary[launch.kernel].parameters == in_ptx[launch.kernel].parameters
    assert in_binary[launch.kernel].parameter_bytes == ORDER.size
    assert 32 <= in_binary[launch.kernel].registers <= 128


def test_a_launch_of_ptx_with_a_tensor_map(recorder: LaunchRecorder) -> None:
    (launch,) = recorder.record(launch_ptx, PTX, "probe", MAP)
    assert launch.ptx == PTX
    assert (launch.grid, launch.block, launch.cluster) == ((4, 1, 1), (64, 2, 1), (2, 1, 1))
    assert launch.shared_bytes == 4096
    assert len(launch.parameters) == 64 + MAP_BYTES
    (region,) = launch.memory
    assert launch.parameter(0) == region.address.to_bytes(8, "little")
    assert region.content == bytes(range(256)) * 4
    assert launch.parameter(1) == (7).to_bytes(4, "little")
    assert unpack(launch.parameter(2)) == MAP


def test_a_tensor_map_that_compiled_host_code_makes(recorder: LaunchRecorder) -> None:
    from emulator.host.recorded_cute_kernels import COLUMNS, ROWS, TILE, copy_tiles

    (launch,) = recorder.record(copy_tiles)
    assert (launch.grid, launch.block) == ((1, 2, 1), (TILE, 1, 1))
    # CuTe DSL allows all that is left beside static shared memory: here all there is.
    assert launch.kernel_attributes[8] == Device().shared_bytes
    tensor_map = unpack(launch.parameter(0))
    assert tensor_map.address == launch.region("source").address
    assert tensor_map.data_type == DataType.BFLOAT16
    assert tensor_map.dimensions == (COLUMNS, ROWS)
    assert tensor_map.strides == (2 * COLUMNS,)
    assert tensor_map.box == (TILE, TILE)
    assert tensor_map.swizzle == 3
    assert launch.parameter(1) == launch.region("target").address.to_bytes(8, "little")


REFUSED = {
    "address": ({"address": 8}, "address must be aligned to 16 bytes, got 0x8"),
    "stride": ({"strides": (128, 8, 4096)}, "multiples of 16 below 2.40 bytes, got 8"),
    "far": ({"strides": (128, 2**40, 4096)}, "multiples of 16 below 2.40 bytes"),
    "size": ({"dimensions": (0, 1, 1, 1)}, "sizes must be 1 to 2.32, got 0"),
    "wide-box": ({"box": (64, 257, 1, 2)}, "1 to 256 elements wide, got 257"),
    "odd-box": ({"box": (60, 1, 1, 1)}, "multiple of 16 bytes, got 120"),
    "steps": ({"element_strides": (1, 9, 1, 1)}, "element strides must be 1 to 8, got 9"),
    "span-128": ({"box": (72, 1, 1, 1)}, "at most 128 bytes in this swizzle, got 144"),
    "span-64": ({"swizzle": 2}, "at most 64 bytes in this swizzle, got 128"),
    "span-32": ({"swizzle": 1, "box": (32, 1, 1, 1)}, "at most 32 bytes in this swizzle, got 64"),
    "interleave": ({"interleave": 2}, "needs the 32-byte swizzle|aligned to 32"),
    "nan": ({"data_type": DataType.UINT16}, "only floats can be filled with NaN, got UINT16"),
    "padded": ({"data_type": DataType.U4_ALIGN_16B, "oob_fill": 0}, "aligned to 32|must be 128"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_tensor_maps(
    recorder: LaunchRecorder, change: dict[str, object], message: str
) -> None:
    with pytest.raises(RecordingError, match=message):
        recorder.record(launch_ptx, PTX, "probe", replace(MAP, **change))


@pytest.mark.parametrize("variant", ["bf16", "nvfp4"])
def test_occupancy_counts_registers_and_shared_memory(
    recorder: LaunchRecorder, variant: str
) -> None:
    assert recorder.record(check_occupancy, variant) == []


def test_a_driver_call_without_an_answer_is_named(recorder: LaunchRecorder) -> None:
    with pytest.raises(RecordingError, match="does not answer cuCtxGetLimit"):
        recorder.record(call_unanswered)


def test_a_kernel_that_is_not_there(recorder: LaunchRecorder) -> None:
    with pytest.raises(RecordingError, match="CUDA_ERROR_NOT_FOUND"):
        recorder.record(launch_ptx, PTX, "missing", None)


def test_shared_memory_beyond_the_attribute_is_refused(recorder: LaunchRecorder) -> None:
    with pytest.raises(RecordingError, match=r"50000 bytes .* the kernel's attribute allows 49152"):
        recorder.record(launch_with_too_much_shared_memory, PTX, "plain")
