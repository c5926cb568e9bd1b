"""A small GEMM for SM100 in CuTe DSL that leaves every layout and descriptor to CuTe.

One CTA computes one tile of D = A * B^T with one stage of shared memory: tensor tiles in, MMAs, and
each thread stores its part of the accumulator. Majors, types and tile are free, which makes CuTe
choose its swizzles, descriptors, shapes of `tcgen05.ld` and data-path layouts for each.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import torch
from cutlass.cute.nvgpu import cpasync, tcgen05

from .launch_recorder import Session
from .recorded_gemms import pointer_to

THREADS = 128


@dataclass(frozen=True)
class DenseProblem:
    """D = A * B^T of one tile.

    Attributes
    ----------
    values, accumulator : str
        CuTe DSL types of A and B, and of the accumulator and D.
    a, b : torch.Tensor
        `[M, K]` and `[N, K]`: contiguous, or transposed for an MN-major operand.
    d : torch.Tensor
        `[M, N]`, contiguous.
    depth : int
        K of a stage.
    """

    values: str
    accumulator: str
    a: torch.Tensor
    b: torch.Tensor
    d: torch.Tensor
    depth: int


@cute.kernel
def _gemm_kernel(
    mma: cute.TiledMma,
    tile: cutlass.Constexpr,
    element: cutlass.Constexpr,
    load_a: cute.CopyAtom,
    a: cute.Tensor,
    load_b: cute.CopyAtom,
    b: cute.Tensor,
    d: cute.Tensor,
    a_layout: cute.ComposedLayout,
    b_layout: cute.ComposedLayout,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    allocator = cutlass.utils.SmemAllocator()
    shared_a = allocator.allocate_tensor(
        element, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner
    )
    shared_b = allocator.allocate_tensor(
        element, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner
    )
    barriers = allocator.allocate_array(cutlass.Int64, 2)
    slot = allocator.allocate_array(cutlass.Int32, 1)
    loaded, multiplied = barriers, barriers + 1

    accumulator_shape = mma.partition_shape_C(tile[:2])
    columns = cutlass.utils.get_num_tmem_alloc_cols(mma.make_fragment_C(accumulator_shape))
    if warp == 0:
        cute.arch.alloc_tmem(columns, slot)
    if thread == 0:
        cute.arch.mbarrier_init(loaded, 1)
        cute.arch.mbarrier_init(multiplied, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    address = cute.arch.retrieve_tmem_ptr(d.element_type, 16, slot)
    accumulator = cute.make_tensor(address, mma.make_fragment_C(accumulator_shape).layout)

    slice_of_mma = mma.get_slice(0)
    # (MMA, MMA_M or MMA_N, MMA_K, K tiles)
    part_a = slice_of_mma.partition_A(cute.local_tile(a, (tile[0], tile[2]), (0, None)))
    part_b = slice_of_mma.partition_B(cute.local_tile(b, (tile[1], tile[2]), (0, None)))
    part_d = slice_of_mma.partition_C(cute.local_tile(d, (tile[0], tile[1]), (0, 0)))
    fragment_a = mma.make_fragment_A(shared_a)
    fragment_b = mma.make_fragment_B(shared_b)
    to_a, from_a = cpasync.tma_partition(
        load_a,
        0,
        cute.make_layout(1),
        cute.group_modes(shared_a, 0, 3),
        cute.group_modes(part_a, 0, 3),
    )
    to_b, from_b = cpasync.tma_partition(
        load_b,
        0,
        cute.make_layout(1),
        cute.group_modes(shared_b, 0, 3),
        cute.group_modes(part_b, 0, 3),
    )

    tiles = cute.size(from_a, mode=[1])
    size = cute.size_in_bytes(element, cute.slice_(a_layout, (None, None, None, 0)))
    size += cute.size_in_bytes(element, cute.slice_(b_layout, (None, None, None, 0)))
    for k in range(tiles):
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(loaded, size)
            cute.copy(load_a, from_a[(None, k)], to_a[(None, 0)], tma_bar_ptr=loaded)
            cute.copy(load_b, from_b[(None, k)], to_b[(None, 0)], tma_bar_ptr=loaded)
            cute.arch.mbarrier_wait(loaded, k % 2)
            for block in cutlass.range_constexpr(cute.size(fragment_a, mode=[2])):
                mma.set(tcgen05.Field.ACCUMULATE, (k > 0) | (block > 0))
                cute.gemm(
                    mma,
                    accumulator,
                    fragment_a[(None, None, block, 0)],
                    fragment_b[(None, None, block, 0)],
                    accumulator,
                )
            with cute.arch.elect_one():
                tcgen05.commit(multiplied)
        cute.arch.mbarrier_wait(multiplied, k % 2)

    whole = (cute.make_layout(tile[0]), cute.make_layout(tile[1]))
    atom = blackwell.get_tmem_load_op(
        tile,
        cutlass.utils.LayoutEnum.ROW_MAJOR,
        d.element_type,
        d.element_type,
        whole,
        False,
    )
    tiled_copy = tcgen05.make_tmem_copy(atom, accumulator[((None, None), 0, 0)])
    mine = tiled_copy.get_slice(thread)
    source = mine.partition_S(accumulator[((None, None), 0, 0)])
    target = mine.partition_D(part_d[((None, None), 0, 0)])
    values = cute.make_rmem_tensor(target.shape, d.element_type)
    cute.copy(tiled_copy, source, values)
    cute.arch.fence_view_async_tmem_load()
    cute.autovec_copy(values, target)
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(address, columns)


def dense_gemm(session: Session, problem: DenseProblem) -> None:
    """Launch it; the result is the region ``d``."""
    tensors = {"a": problem.a, "b": problem.b, "d": problem.d}
    layouts = {name: (tuple(t.shape), tuple(t.stride())) for name, t in tensors.items()}
    tile = (problem.d.shape[0], problem.d.shape[1], problem.depth)
    majors = [
        tcgen05.OperandMajorMode.K if tensor.stride(1) == 1 else tcgen05.OperandMajorMode.MN
        for tensor in (problem.a, problem.b)
    ]

    @cute.jit
    def launch(
        a_pointer: cute.Pointer,
        b_pointer: cute.Pointer,
        d_pointer: cute.Pointer,
        stream: cuda.CUstream,
    ) -> None:
        a = cute.make_tensor(a_pointer, cute.make_layout(layouts["a"][0], stride=layouts["a"][1]))
        b = cute.make_tensor(b_pointer, cute.make_layout(layouts["b"][0], stride=layouts["b"][1]))
        d = cute.make_tensor(d_pointer, cute.make_layout(layouts["d"][0], stride=layouts["d"][1]))
        element, accumulator = a.element_type, d.element_type
        mma = blackwell.make_trivial_tiled_mma(
            element, element, *majors, accumulator, tcgen05.CtaGroup.ONE, tile[:2]
        )
        a_layout = blackwell.make_smem_layout_a(mma, tile, element, 1)
        b_layout = blackwell.make_smem_layout_b(mma, tile, element, 1)
        operation = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        one = cute.slice_(a_layout, (None, None, None, 0))
        load_a, a_coordinates = cute.nvgpu.make_tiled_tma_atom_A(operation, a, one, tile, mma)
        one = cute.slice_(b_layout, (None, None, None, 0))
        load_b, b_coordinates = cute.nvgpu.make_tiled_tma_atom_B(operation, b, one, tile, mma)
        _gemm_kernel(
            mma, tile, element, load_a, a_coordinates, load_b, b_coordinates, d, a_layout, b_layout
        ).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    types = (problem.values, problem.values, problem.accumulator)
    pointers = []
    for (name, tensor), type_name in zip(tensors.items(), types, strict=True):
        session.add_tensor(name, tensor)
        pointers.append(pointer_to(tensor, type_name))
    launch(*pointers, cuda.CUstream(0))
