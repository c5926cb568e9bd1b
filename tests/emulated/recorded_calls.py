"""Calls that run in a recorder's process: the host paths that tests record."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from emulator.host.launch_recorder import Session

if TYPE_CHECKING:
    import torch

    from emulator.copies.tensor_map import TensorMap
    from support.problems import Problem


def launch_scores(session: Session, problem: Problem) -> None:
    """Check and launch a call of `indexer_scores` on backend `cute`."""
    from sdsa_kernels.checks import check_scores_call
    from sdsa_kernels.cute import backend as cute_scores
    from sdsa_kernels.problem import ScoreCall

    for name, tensor in vars(problem).items():
        if tensor is not None:
            session.add_tensor(name, tensor)
    cute_scores.launch(check_scores_call(ScoreCall(**vars(problem))))


def launch_selection(session: Session, tensors: dict[str, torch.Tensor], slots: bool) -> None:
    """Check and launch a call of `select_top_k` on backend `cute`; its workspace is poison."""
    from sdsa_kernels.cute import select as cute_select
    from sdsa_kernels.selection.checks import check_select_call

    given = {name: tensors.get(name) for name in ("top_scores", "block_table", "requests")}
    problem = check_select_call(
        tensors["scores"], tensors["context_lengths"], tensors["top_keys"], slots=slots, **given
    )
    workspace = cute_select.new_workspace(problem).fill_(-0x55555556)
    for name, tensor in {**tensors, "workspace": workspace}.items():
        session.add_tensor(name, tensor)
    cute_select.launch_with(problem, workspace)


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call of `cuda.bindings`."""
    code, *values = result
    if int(code):
        raise RuntimeError(f"a driver call failed: {code.name}")
    return values[0] if values else None


def encode(tensor_map: TensorMap) -> Any:
    """A tensor map made by the driver."""
    from cuda.bindings import driver

    def enumerator(prefix: str, value: int) -> Any:
        return getattr(driver, f"CUtensorMap{prefix}")(value)

    return checked(
        driver.cuTensorMapEncodeTiled(
            enumerator("DataType", tensor_map.data_type),
            tensor_map.rank,
            tensor_map.address,
            [driver.cuuint64_t(size) for size in tensor_map.dimensions],
            [driver.cuuint64_t(stride) for stride in tensor_map.strides],
            [driver.cuuint32_t(extent) for extent in tensor_map.box],
            [driver.cuuint32_t(step) for step in tensor_map.element_strides],
            enumerator("Interleave", tensor_map.interleave),
            enumerator("Swizzle", tensor_map.swizzle),
            enumerator("L2promotion", tensor_map.l2_promotion),
            enumerator("FloatOOBfill", tensor_map.oob_fill),
        )
    )


def launch_ptx(session: Session, ptx: str, kernel: str, tensor_map: TensorMap | None) -> None:
    """Launch a kernel of PTX that takes an address and a tensor map, in a cluster of two CTAs."""
    from cuda.bindings import driver

    module = checked(driver.cuModuleLoadData(ptx.encode()))
    function = checked(driver.cuModuleGetFunction(module, kernel.encode()))
    address = checked(driver.cuMemAlloc(1024))
    checked(driver.cuMemcpyHtoD(address, bytes(range(256)) * 4, 1024))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 4, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 64, 2, 1
    config.sharedMemBytes = 4096
    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x = 2
    cluster.value.clusterDim.y = 1
    cluster.value.clusterDim.z = 1
    config.attrs, config.numAttrs = [cluster], 1
    values: tuple[Any, ...] = (int(address), 7)
    types: tuple[Any, ...] = (ctypes.c_uint64, ctypes.c_uint32)
    if tensor_map is not None:
        values, types = (*values, encode(tensor_map)), (*types, None)
    checked(driver.cuLaunchKernelEx(config, function, (values, types), 0))


def check_occupancy(session: Session, variant: str) -> None:
    """Ask the driver how many CTAs of a scoring kernel fit an SM: as many as it was made for."""
    from cuda.bindings import driver

    from sdsa_kernels.cute.disk_cache import compiled_kernel

    compiled = compiled_kernel("sm_90a", variant)
    library = checked(driver.cuLibraryLoadData(compiled.image, None, None, 0, None, None, 0))
    kernel = checked(driver.cuLibraryGetKernel(library, compiled.symbol.encode()))
    function = checked(driver.cuKernelGetFunction(kernel))
    config = compiled.config

    def blocks(shared_bytes: int) -> int:
        return checked(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                function, config.threads, shared_bytes
            )
        )

    registers = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
    assert checked(driver.cuFuncGetAttribute(registers, function)) <= 128
    static = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    assert checked(driver.cuFuncGetAttribute(static, function)) == 0
    assert blocks(config.shared_bytes) == config.ctas_per_sm == 2
    assert blocks(120_000) == 1  # two would need 242,048 of the SM's 233,472 bytes


def call_unanswered(session: Session) -> None:
    """Make a driver call that the stand-in does not answer."""
    from cuda.bindings import driver

    checked(driver.cuCtxGetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE))


def launch_with_too_much_shared_memory(session: Session, ptx: str, kernel: str) -> None:
    """Launch with more dynamic shared memory than the kernel's attribute allows."""
    from cuda.bindings import driver

    module = checked(driver.cuModuleLoadData(ptx.encode()))
    function = checked(driver.cuModuleGetFunction(module, kernel.encode()))
    values = ((0, 0), (ctypes.c_uint64, ctypes.c_uint32))
    checked(driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 50_000, 0, values, 0))
