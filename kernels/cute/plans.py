"""How a call reaches a CuTe DSL kernel: its strides and sizes, and the tensor maps it may need.

A process compiles each kernel, or reads it from disk, and loads it once.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

import torch

from sdsa_kernels.device import (
    capability,
    device_index,
    multiprocessors,
    refuse_capture_before_warmup,
)
from sdsa_kernels.plans import Plan
from sdsa_kernels.problem import ScoreProblem
from sdsa_quant.errors import InputError
from sdsa_quant.layout import DIM, KEY_ALIGNMENT_BYTES, NVFP4, PACKED_DIM, PAGE

from .compiled import LaunchConfig
from .variants import ARCHITECTURES, SELECTING_VARIANTS, loaded_together

if TYPE_CHECKING:
    from .launch import LoadedKernel, TensorMaps

_PREFETCHED_TABLE_BYTES = 256 * 1024
_MOST_MAPS = 1024  # pairs of addresses whose tensor maps a plan keeps: encoding takes microseconds

_kernels: dict[tuple[int, str], LoadedKernel] = {}
_lock = threading.Lock()


def plan_for(problem: ScoreProblem, variant: str) -> Plan:
    """The launch of `problem` with a variant, loaded if need be, at any addresses.

    Raises
    ------
    UnsupportedError
        The kernel cannot be loaded here or now (see `loaded_kernel`).
    """
    kernel = loaded_kernel(device_index(problem.device), variant)
    query_scales, key_scales = problem.query_scales, problem.key_scales
    sizes = {
        "query_stride": _row_bytes(problem.query),
        "query_scale_stride": 0 if query_scales is None else query_scales.stride(0),
        "key_stride": _row_bytes(problem.key_cache),
        "key_scale_stride": 0 if key_scales is None else key_scales.stride(0),
        "table_stride": _row_bytes(problem.block_table),
        "score_stride": _row_bytes(problem.scores),
        "groups": problem.groups,
        "rows": problem.rows_per_group,
        "max_context": problem.max_context,
        "prefetched_bytes": _prefetched_table_bytes(problem.block_table),
    }
    maps = _tensor_maps(problem, kernel.config) if kernel.config.box_bytes else None
    return kernel.make_plan(sizes, maps)


def loaded_kernel(device: int, variant: str) -> LoadedKernel:
    """The kernel of a variant on a device.

    Raises
    ------
    UnsupportedError
        It is not loaded yet and the current stream is being captured, or it cannot be compiled or
        loaded.
    """
    kernel = _kernels.get((device, variant))
    if kernel is None:
        with torch.cuda.device(device):
            kernel = _load(device, variant)
    return kernel


def _load(device: int, variant: str) -> LoadedKernel:
    call = "select_top_k" if variant in SELECTING_VARIANTS else "indexer_scores"
    refuse_capture_before_warmup(device, call)
    from .disk_cache import compiled_kernel
    from .launch import LoadedKernel

    architecture, sms = ARCHITECTURES[capability(device)], multiprocessors(device)
    with _lock:
        for name in loaded_together(variant, architecture):
            if (device, name) not in _kernels:
                compiled = compiled_kernel(architecture, name)
                _kernels[device, name] = LoadedKernel(
                    compiled.image, compiled.symbol, compiled.config, device, sms
                )
    return _kernels[device, variant]


def install(device: int, variant: str, kernel: LoadedKernel) -> None:
    """Launch `kernel` from now on for the calls that `variant` serves on a device."""
    with _lock:
        _kernels[device, variant] = kernel


def loaded() -> list[tuple[int, str]]:
    """The kernels that this process has loaded: a device's index and a variant for each."""
    return list(_kernels)


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


def _prefetched_table_bytes(table: torch.Tensor) -> int:
    """Bytes of the block table to prefetch: all of a small one, nothing of a large one.

    Which entries a launch needs it only knows once it has read the lengths, and reading what a wide
    table has beyond them would make the cost follow the capacity.
    """
    size = 4 * (table.stride(0) * (table.shape[0] - 1) + table.shape[1])
    return size if 0 < size <= _PREFETCHED_TABLE_BYTES else 0


def _tensor_maps(problem: ScoreProblem, config: LaunchConfig) -> TensorMaps:
    """The tensor maps of query rows and pages, at any addresses."""
    from .tensor_maps import encode_tensor_map

    row_bytes = PACKED_DIM if problem.key_format == NVFP4 else 2 * DIM
    query_sizes = (row_bytes, problem.rows)
    query_strides = (_stride_between(problem.query),)
    query_box = (config.box_bytes, config.columns)
    key_sizes = (row_bytes, PAGE, problem.key_cache.shape[0])
    key_strides = (row_bytes, _stride_between(problem.key_cache))
    key_box = (config.box_bytes, PAGE, 1)
    scale_mask = KEY_ALIGNMENT_BYTES - 1 if problem.tiled_scales else 0

    @functools.lru_cache(maxsize=_MOST_MAPS)
    def encoded(query: int, keys: int) -> bytes:
        query_map = encode_tensor_map(query, query_sizes, query_strides, query_box)
        return query_map + encode_tensor_map(keys, key_sizes, key_strides, key_box)

    def encode(query: int, query_scales: int, keys: int, key_scales: int, *others: int) -> bytes:
        if key_scales & scale_mask:
            raise InputError(
                f"key_scales must start at a multiple of {KEY_ALIGNMENT_BYTES} bytes, got an "
                f"address that is {key_scales & scale_mask} bytes past one"
            )
        return encoded(query, keys)

    return encode


def _stride_between(tensor: torch.Tensor) -> int:
    """Bytes between pages or rows; for a single one its size, as any multiple of 16 would do."""
    if tensor.shape[0] == 1:
        return tensor.numel() * tensor.element_size()
    return _row_bytes(tensor)
