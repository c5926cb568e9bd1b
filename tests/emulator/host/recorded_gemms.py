"""A GEMM of NVIDIA's for SM100, launched in a recorder's process.

PyTorch carries CUTLASS's persistent, warp-specialized, block-scaled GEMM in CuTe DSL. Nothing of it
is ours, so what it takes descriptors, layouts and synchronization to mean is independent of the
emulator.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch

from .launch_recorder import Session


@dataclass(frozen=True)
class BlockScaledProblem:
    """C = (A * scales of A) * (B * scales of B)^T.

    Attributes
    ----------
    values, scales : str
        CuTe DSL types of elements and of scale factors.
    block : int
        Elements that share a scale factor.
    a, b : torch.Tensor
        uint8: codes `[M, K]` and `[N, K]`, packed where they have 4 bits.
    a_scales, b_scales : torch.Tensor
        uint8: scale codes in the 128x4 order.
    shape : tuple of int
        M, N, K.
    tile_columns : int
        N of an MMA.
    mn_major : bool
        Whether `a` and `b` are stored transposed: `[K, M]` and `[K, N]`.
    """

    values: str
    scales: str
    block: int
    a: torch.Tensor
    b: torch.Tensor
    a_scales: torch.Tensor
    b_scales: torch.Tensor
    shape: tuple[int, int, int]
    tile_columns: int = 128
    mn_major: bool = False


def blockscaled_gemm(session: Session, problem: BlockScaledProblem) -> None:
    """Launch PyTorch's block-scaled GEMM; its result is the region ``c``, FP32 `[M, N]`."""
    _name_proxies()
    from torch._inductor.kernel.vendored_templates.cutedsl import (
        dense_blockscaled_gemm_persistent as vendored,
    )

    m, n, k = problem.shape
    a_strides, b_strides = ((1, m), (n, 1)) if problem.mn_major else ((k, 1), (1, k))
    gemm = vendored.Sm100BlockScaledPersistentDenseGemmKernel(
        problem.block, (128, problem.tile_columns), (1, 1)
    )

    @cute.jit
    def launch(
        a: cute.Pointer,
        b: cute.Pointer,
        a_scales: cute.Pointer,
        b_scales: cute.Pointer,
        c: cute.Pointer,
        stream: cuda.CUstream,
    ) -> None:
        gemm(
            cute.make_tensor(a, cute.make_layout((1, m, k), stride=(m * k, *a_strides))),
            cute.make_tensor(b, cute.make_layout((1, k, n), stride=(n * k, *b_strides))),
            cute.make_tensor(a_scales, cute.make_layout(m * k // problem.block)),
            cute.make_tensor(b_scales, cute.make_layout(n * k // problem.block)),
            cute.make_tensor(c, cute.make_layout((1, m, n), stride=(m * n, n, 1))),
            2,
            stream,
        )

    tensors = {
        "a": problem.a,
        "b": problem.b,
        "a_scales": problem.a_scales,
        "b_scales": problem.b_scales,
        "c": torch.zeros(m, n),
    }
    types = [problem.values, problem.values, problem.scales, problem.scales, "Float32"]
    pointers = []
    for (name, tensor), type_name in zip(tensors.items(), types, strict=True):
        session.add_tensor(name, tensor)
        pointers.append(pointer_to(tensor, type_name))
    launch(*pointers, cuda.CUstream(0))


def pointer_to(tensor: torch.Tensor, type_name: str) -> cute.Pointer:
    """A pointer to a tensor as CuTe DSL has it."""
    element = getattr(cutlass, type_name)
    address = tensor.data_ptr()
    return cute.runtime.make_ptr(element, address, cute.AddressSpace.gmem, assumed_align=16)


def _name_proxies() -> None:
    """Names that the kernel was written for and that later releases of CuTe DSL spell as text."""
    if not hasattr(cute.arch, "ProxyKind"):
        cute.arch.ProxyKind = SimpleNamespace(async_shared="async.shared")
        cute.arch.SharedSpace = SimpleNamespace(shared_cta="cta")
