"""Kernels in Triton as other projects write them, compiled without a GPU."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from emulator import Region, Report, run_kernel
from emulator.copies.tensor_map import DataType, TensorMap
from emulator.copies.tensor_map_form import pack

from .kernel_image import ptx_kernels

_TYPES = {
    np.dtype(np.float16): "*fp16",
    np.dtype(np.float32): "*fp32",
    np.dtype(np.int32): "*i32",
    np.dtype(np.uint8): "*u8",
    np.dtype(ml_dtypes.float8_e4m3fn): "*fp8e4nv",
}
_FIRST_ADDRESS, _SPACING = 0x7F00_0000_0000, 1 << 24


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel, and how its launches take their arguments.

    Attributes
    ----------
    arguments : tuple of str
        Those that are not constants, in their order.
    scratch : int
        Bytes of global memory that each CTA wants beside them.
    """

    ptx: str
    name: str
    threads: int
    shared_bytes: int
    arguments: tuple[str, ...]
    scratch: int

    def run(self, grid: tuple[int, ...], given: Mapping[str, Any], seed: int) -> Report:
        """Run it; arrays among what is given hold what it has written afterwards.

        A matrix with the rows and columns of a box stands for a tensor map of it.
        """
        facts = ptx_kernels(self.ptx)[self.name]
        parameters, regions, arrays = bytearray(facts.parameter_bytes), [], []
        values: list[Any] = []
        for name in self.arguments:
            value = given[name]
            array, box = value if isinstance(value, tuple) else (value, None)
            if isinstance(array, np.ndarray):
                value = _FIRST_ADDRESS + len(regions) * _SPACING
                regions.append(Region(name, value, array))
                arrays.append(array)
            # Behind a map its sizes and strides follow.
            values += [value] if box is None else [_map_of(value, array, box), *array.shape]
            values += [] if box is None else [array.shape[1], 1]
        if self.scratch:
            values.append(_FIRST_ADDRESS + len(regions) * _SPACING)
            regions.append(Region("scratch", values[-1], self.scratch * prod(grid)))
        for place, value in zip(facts.parameters, values, strict=False):
            if isinstance(value, bytes):
                parameters[place.offset : place.offset + place.size] = value
                continue
            code = "<f" if isinstance(value, float) else "<Q" if place.size == 8 else "<i"
            struct.pack_into(code, parameters, place.offset, value)
        report = run_kernel(
            self.ptx,
            self.name,
            grid,
            self.threads,
            bytes(parameters),
            regions,
            self.shared_bytes,
            seed,
        )
        for array, region in zip(arrays, regions, strict=False):
            array[...] = region.data.view(array.dtype).reshape(array.shape)
        return report


def _map_of(address: int, matrix: np.ndarray, box: tuple[int, int]) -> bytes:
    """A tensor map of a matrix of FP16, with boxes of 128 bytes a row."""
    height, width = matrix.shape
    form = TensorMap(
        DataType.FLOAT16, address, (width, height), (2 * width,), box[::-1], (1, 1), 0, 3, 2, 0
    )
    return pack(form)


def compile_kernel(
    kernel: Any, capability: int, given: Mapping[str, Any], constants: Mapping[str, Any]
) -> Compiled:
    """Compile a kernel for its arguments, whose pointers are multiples of 16."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict.fromkeys(constants, "constexpr")
    for name in names:
        signature[name] = _type_of(given[name])
    signature = {name: signature[name] for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if isinstance(given.get(name), np.ndarray) or given.get(name, 1) in (64, 128, 256)
    }
    source = ASTSource(kernel, signature, constexprs=dict(constants), attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    threads = re.search(r"\.reqntid\s+(\d+)", ptx)
    return Compiled(
        ptx,
        metadata.name,
        32 * metadata.num_warps if threads is None else int(threads[1]),
        metadata.shared,
        tuple(names),
        metadata.global_scratch_size,
    )


def _type_of(value: Any) -> str:
    """As Triton's signatures have it."""
    if isinstance(value, tuple):
        return f"tensordesc<fp16[{value[1][0]},{value[1][1]}]>"
    if isinstance(value, np.ndarray):
        return _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


# Triton reads the annotations of kernels, and takes no others.
# mypy: disable-error-code="no-untyped-def"


@triton.jit
def scaled_gemm(
    a, a_scales, b, b_scales, d, depth: tl.constexpr, block: tl.constexpr, form: tl.constexpr,
    per_byte: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """D [128, 128] = (A * its scales) (B * its scales)^T, of `block` values to a scale."""
    rows = tl.arange(0, 128)
    total = tl.zeros((128, 128), tl.float32)
    for start in range(0, depth, step):
        codes = start // per_byte + tl.arange(0, step // per_byte)
        places = rows[:, None] * (depth // per_byte) + codes[None, :]
        blocks = rows[:, None] * (depth // block) + start // block + tl.arange(0, step // block)
        total = tl.dot_scaled(
            tl.load(a + places), tl.load(a_scales + blocks), form,
            tl.load(b + places).T, tl.load(b_scales + blocks), form, total,
        )  # fmt: skip
    tl.store(d + rows[:, None] * 128 + rows[None, :], total)


@triton.jit
def attention(
    query, key, value, output, length, scale,
    depth: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, specialized: tl.constexpr,
):  # fmt: skip
    """Causal attention of one head, a block of query rows a program."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inner = tl.arange(0, depth)
    queries = tl.load(query + row[:, None] * depth + inner[None, :])
    highest = tl.full([rows], -float("inf"), tl.float32)
    weight, total = tl.zeros([rows], tl.float32), tl.zeros([rows, depth], tl.float32)
    for start in tl.range(0, length, columns, warp_specialize=specialized):
        column = start + tl.arange(0, columns)
        places = column[:, None] * depth + inner[None, :]
        scores = tl.dot(queries, tl.load(key + places).T) * (scale * 1.44269504)
        scores = tl.where(row[:, None] >= column[None, :], scores, -1e6)
        now = tl.maximum(highest, tl.max(scores, 1))
        shares, fades = tl.math.exp2(scores - now[:, None]), tl.math.exp2(highest - now)
        weight, total = weight * fades + tl.sum(shares, 1), total * fades[:, None]
        total = tl.dot(shares.to(tl.float16), tl.load(value + places), total)
        highest = now
    result = (total / weight[:, None]).to(tl.float16)
    tl.store(output + row[:, None] * depth + inner[None, :], result)


@triton.jit
def gemm_of_maps(
    a_map, b_map, d_map, depth, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr
):
    """One tile of D = A B^T with tensor maps of the host, FP16 with FP32 sums."""
    row, column = tl.program_id(0) * rows, tl.program_id(1) * columns
    total = tl.zeros((rows, columns), tl.float32)
    for start in tl.range(0, depth, step):
        total = tl.dot(a_map.load([row, start]), b_map.load([column, start]).T, total)
    d_map.store([row, column], total.to(tl.float16))


@triton.jit
def gemm_of_descriptors(
    a, b, d, m, n, k, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr,
    specialized: tl.constexpr,
):  # fmt: skip
    """D = A B^T with tensor maps that the kernel makes itself."""
    a_map = tl.make_tensor_descriptor(a, [m, k], [k, 1], [rows, step])
    b_map = tl.make_tensor_descriptor(b, [n, k], [k, 1], [columns, step])
    d_map = tl.make_tensor_descriptor(d, [m, n], [n, 1], [rows, columns])
    row, column = tl.program_id(0) * rows, tl.program_id(1) * columns
    total = tl.zeros((rows, columns), tl.float32)
    for start in tl.range(0, k, step, warp_specialize=specialized):
        total = tl.dot(a_map.load([row, start]), b_map.load([column, start]).T, total)
    d_map.store([row, column], total.to(tl.float16))


@triton.jit
def add_one_to_rows(
    source, indices, target, rows, columns, width: tl.constexpr, count: tl.constexpr
):
    """Columns from `width` on of some rows, each 1 higher, to the same rows of another matrix."""
    source_map = tl.make_tensor_descriptor(source, [rows, columns], [columns, 1], [1, width])
    target_map = tl.make_tensor_descriptor(target, [rows, columns], [columns, 1], [1, width])
    index = tl.load(indices + tl.arange(0, count))
    target_map.scatter(source_map.gather(index, width) + 1, index, width)


@triton.jit
def sort_and_print(values, ordered, highest, count: tl.constexpr, top: tl.constexpr):
    """Descending values, and the first of them; says so."""
    given = tl.load(values + tl.arange(0, count))
    tl.store(ordered + tl.arange(0, count), tl.sort(given, descending=True))
    tl.store(highest + tl.arange(0, top), tl.topk(given, top))
    tl.device_print("sorted", tl.sum(given))


def relative_error(found: np.ndarray, expected: Iterable[Any]) -> float:
    """The largest error, of the largest value."""
    wanted = np.asarray(expected, np.float64)
    return float(np.abs(found.astype(np.float64) - wanted).max() / np.abs(wanted).max())
