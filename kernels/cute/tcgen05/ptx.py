"""The PTX instructions of the tcgen05 kernels, one function each (PTX ISA 8.8).

Addresses are as in `cute.ptx`; an address in tensor memory is an ``Int32`` with the lane in its
upper and the column in its lower 16 bits. Matrix descriptors are ``Int64``.
"""

from collections.abc import Sequence

from cutlass import Float32, Int32, Int64
from cutlass.cute.arch import inline_ptx

# ---- Asynchronous copies into shared memory ------------------------------------------------------


def prefetch_tensor_map(tensor_map: Int64) -> None:
    """Bring a tensor map into the cache of descriptors."""
    inline_ptx("prefetch.tensormap [{$r0}];", read_only_args=[tensor_map])


def copy_tensor_box(
    target: Int32,
    tensor_map: Int64,
    coordinates: Sequence[Int32],
    barrier: Int32,
    policy: Int64,
) -> None:
    """Asynchronous copy of one box of a tensor map, zeros where it lies outside of the tensor.

    All bytes of the box count towards the barrier, those outside of the tensor too. `policy` is an
    `eviction_policy`.
    """
    rank = len(coordinates)
    place = ", ".join(f"{{$r{2 + i}}}" for i in range(rank))
    inline_ptx(
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes.L2::cache_hint "
        f"[{{$r0}}], [{{$r1}}, {{ {place} }}], [{{$r{2 + rank}}}], {{$r{3 + rank}}};",
        read_only_args=[target, tensor_map, *coordinates, barrier, policy],
    )


def copy_or_clear(
    target: Int32, target_offset: int, source: Int64, source_offset: int, size: int, given: Int32
) -> None:
    """Asynchronous copy of `given` (0 or `size`) of 4 or 8 bytes; the rest becomes zeros."""
    inline_ptx(
        f"cp.async.ca.shared.global [{{$r0}}+{target_offset}], [{{$r1}}+{source_offset}], {size}, "
        "{$r2};",
        read_only_args=[target, source, given],
    )


def fence_async_proxy() -> None:
    """Order this thread's view of shared memory before what the async proxy reads from now on."""
    inline_ptx("fence.proxy.async.shared::cta;")


def barrier_arrive(barrier: Int32) -> None:
    """Arrive once."""
    inline_ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[barrier])


# ---- Tensor memory -------------------------------------------------------------------------------


def allocate_tensor_memory(slot: Int32, columns: int) -> None:
    """Allocate columns and put their address into shared memory; all lanes of a warp together."""
    inline_ptx(
        f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{{$r0}}], {columns};",
        read_only_args=[slot],
    )
    inline_ptx("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;")


def free_tensor_memory(address: Int32, columns: int) -> None:
    """Give columns back; all lanes of the warp that allocated them together."""
    inline_ptx(
        f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {{$r0}}, {columns};",
        read_only_args=[address],
    )


def fence_before_thread_sync() -> None:
    inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_thread_sync() -> None:
    inline_ptx("tcgen05.fence::after_thread_sync;")


def load_tensor_columns(address: Int32, columns: int) -> tuple[Float32, ...]:
    """A float of each of some columns, from this thread's lane of the warp's quarter."""
    registers = ", ".join(f"{{$w{i}}}" for i in range(columns))
    return inline_ptx(
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{ {registers} }}, [{{$r0}}];\n"
        "tcgen05.wait::ld.sync.aligned;",
        write_only_types=[Float32] * columns,
        read_only_args=[address],
    )


# ---- What one elected thread starts --------------------------------------------------------------


def copy_scales_to_tensor_memory(target: Int32, descriptor: Int64) -> None:
    """32 lines of 16 bytes to 4 columns, the same to each quarter of the lanes."""
    inline_ptx(
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [{$r0}], {$r1};",
        read_only_args=[target, descriptor],
    )


def _mma(kind: str, scales: str, arguments: list[object], accumulate: bool) -> None:
    inline_ptx(
        "{\n"
        ".reg .pred accumulate;\n"
        f"setp.ne.b32 accumulate, {int(accumulate)}, 0;\n"
        f"tcgen05.mma.cta_group::1.{kind} [{{$r0}}], {{$r1}}, {{$r2}}, {{$r3}}, {scales}"
        "accumulate;\n"
        "}",
        read_only_args=arguments,
    )


def mma_bf16(target: Int32, a: Int64, b: Int64, instruction: int, accumulate: bool) -> None:
    """``D[128, N] = A[128, 16] . B[N, 16]^T``, plus what D was if `accumulate`."""
    _mma("kind::f16", "", [target, a, b, Int32(instruction)], accumulate)


def mma_nvfp4(
    target: Int32,
    a: Int64,
    b: Int64,
    instruction: int,
    a_scales: Int32,
    b_scales: Int32,
    accumulate: bool,
) -> None:
    """The same over 64 E2M1 values, each 16 of them times their E4M3 scale."""
    _mma(
        "kind::mxf4nvf4.block_scale.scale_vec::4X",
        "[{$r4}], [{$r5}], ",
        [target, a, b, Int32(instruction), a_scales, b_scales],
        accumulate,
    )


def commit_to_barrier(barrier: Int32) -> None:
    """Arrive once as soon as all that this thread started so far is complete."""
    inline_ptx(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];",
        read_only_args=[barrier],
    )
