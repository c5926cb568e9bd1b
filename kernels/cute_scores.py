"""Backend `cute`: one CuTe DSL kernel family for SM90 and SM10x, compiled on first use."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

import torch

from sdsa_quant.layout import PAGE

from .availability import capability, device_index, multiprocessors, package_version
from .capture import refuse_capture_before_warmup
from .checks import ScoreProblem
from .cute_variants import ARCHITECTURES, variant_of
from .plans import Plan, addresses_of

if TYPE_CHECKING:
    from .cute_launch import LoadedKernel

DISTRIBUTION = "nvidia-cutlass-dsl"
MINIMUM_VERSION = (4, 8)
_MAX_PAGES = 2**31 - 1  # the kernel counts pages in 32 bits

_PREFETCHED_TABLE_BYTES = 256 * 1024

_kernels: dict[tuple[int, str], LoadedKernel] = {}
_compile_lock = threading.Lock()


@functools.cache
def _reason_against_dsl(installed: str | None) -> str | None:
    wanted = ".".join(str(part) for part in MINIMUM_VERSION)
    if installed is None:
        return f"it needs {DISTRIBUTION} {wanted} or later, which is not installed"
    if tuple(int(part) for part in installed.split(".")[:2]) < MINIMUM_VERSION:
        return f"it needs {DISTRIBUTION} {wanted} or later, installed is {installed}"
    return None


def reason_unsupported(problem: ScoreProblem) -> str | None:
    """None where this backend can serve `problem`, else why not."""
    if problem.device.type != "cuda":
        return f"tensors must be on a CUDA device, not on {problem.device}"
    found = capability(device_index(problem.device))
    if found not in ARCHITECTURES:
        names = ", ".join(f"SM{major}{minor}" for major, minor in ARCHITECTURES)
        return f"it has kernels for {names}, this is an SM{found[0]}{found[1]}"
    if problem.groups * (problem.max_context // PAGE + 1) > _MAX_PAGES:
        return f"{problem.groups} groups of up to {problem.max_context} keys are too many for it"
    return _reason_against_dsl(package_version(DISTRIBUTION))


def _load_kernel(device: int, variant: str) -> LoadedKernel:
    """Compile, or take from the disk cache, and load one variant on a device."""
    refuse_capture_before_warmup(device, "indexer_scores")
    with _compile_lock:
        if (device, variant) not in _kernels:
            from .cute_compile_cache import compiled_kernel
            from .cute_launch import LoadedKernel

            compiled = compiled_kernel(ARCHITECTURES[capability(device)], variant)
            _kernels[device, variant] = LoadedKernel(
                compiled.image,
                compiled.symbol,
                compiled.config,
                device,
                multiprocessors(device),
            )
    return _kernels[device, variant]


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


def _prefetched_table_bytes(table: torch.Tensor) -> int:
    """Bytes of the block table to prefetch: all of a small one, nothing of a large one.

    Which entries a launch needs it only knows once it has read the lengths, and reading what a wide
    table has beyond them would make the cost follow the capacity.
    """
    size = 4 * (table.stride(0) * (table.shape[0] - 1) + table.shape[1])
    return size if 0 < size <= _PREFETCHED_TABLE_BYTES else 0


def launch(problem: ScoreProblem) -> None:
    """Enqueue the scores of `problem` on the current stream of its device.

    Raises
    ------
    UnsupportedError
        This is the first call of its kind and the stream is being captured, or the kernel cannot be
        compiled or loaded.
    """
    if problem.groups == 0 or problem.max_context == 0:
        return
    _plan(problem)(*addresses_of(problem))


def make_plan(problem: ScoreProblem) -> Plan | None:
    """How to launch `problem` again at other addresses; None where there is nothing to launch."""
    if problem.groups == 0 or problem.max_context == 0:
        return None
    return _plan(problem)


def _plan(problem: ScoreProblem) -> Plan:
    """The launch of `problem`, its kernel compiled and loaded, but for the addresses."""
    device = device_index(problem.device)
    variant = variant_of(problem, ARCHITECTURES[capability(device)], multiprocessors(device))
    kernel = _kernels.get((device, variant))
    if kernel is None:
        with torch.cuda.device(device):
            kernel = _load_kernel(device, variant)
    query_scales, key_scales = problem.query_scales, problem.key_scales
    return kernel.plan(
        (
            _row_bytes(problem.query),
            0 if query_scales is None else query_scales.stride(0),
            _row_bytes(problem.key_cache),
            0 if key_scales is None else key_scales.stride(0),
            _row_bytes(problem.block_table),
            _row_bytes(problem.scores),
        ),
        problem.groups,
        problem.rows_per_group,
        problem.max_context,
        _prefetched_table_bytes(problem.block_table),
    )
