"""Kernels of CuTe DSL with its own host code, launched in a recorder's process."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import from_dlpack

from .launch_recorder import Session

ROWS, COLUMNS = 100, 64
TILE = 64


@cute.kernel
def _copy_tile_kernel(
    atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, layout: cute.ComposedLayout
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    _, cta, _ = cute.arch.block_idx()
    allocator = cutlass.utils.SmemAllocator()
    tile = allocator.allocate_tensor(cutlass.BFloat16, layout.outer, 1024, layout.inner)
    barrier = allocator.allocate_array(cutlass.Int64, 1)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    in_shared, in_global = cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(tile, 0, 2),
        cute.group_modes(cute.local_tile(source, (TILE, TILE), (cta, 0)), 0, 2),
    )
    if thread < 32:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE * TILE * 2)
        cute.copy(atom, in_global, in_shared, tma_bar_ptr=barrier)
    cute.arch.mbarrier_wait(barrier, 0)
    for column in range(TILE):
        target[cta * TILE + thread, column] = tile[thread, column]


@cute.jit
def _copy_tiles(source: cute.Tensor, target: cute.Tensor) -> None:
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, cutlass.BFloat16)
    layout = cute.tile_to_shape(atom, (TILE, TILE), (0, 1))
    copy, coordinates = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), source, layout, (TILE, TILE)
    )
    _copy_tile_kernel(copy, coordinates, target, layout).launch(
        grid=(1, -(-ROWS // TILE), 1), block=(TILE, 1, 1)
    )


def copy_tiles(session: Session) -> None:
    """Copy a matrix by tensor tiles: the last tile reaches past its end."""
    source = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).bfloat16()
    target = torch.zeros(-(-ROWS // TILE) * TILE, TILE, dtype=torch.bfloat16)
    session.add_tensor("source", source)
    session.add_tensor("target", target)
    arguments = [from_dlpack(tensor, assumed_align=16) for tensor in (source, target)]
    cute.compile(_copy_tiles, *arguments)(*arguments)


class _Value:
    """A constant that a symbol does not show."""

    def __init__(self, number: int) -> None:
        self.number = number


@cute.kernel
def _fill_kernel(target: cute.Tensor, value: cutlass.Constexpr) -> None:
    thread, _, _ = cute.arch.thread_idx()
    target[thread] = cutlass.Int32(value.number)


@cute.jit
def _fill(target: cute.Tensor, value: cutlass.Constexpr) -> None:
    _fill_kernel(target, value).launch(grid=(1, 1, 1), block=(32, 1, 1))


def fill_twice(session: Session, *values: int) -> None:
    """Compile one kernel for several values, which its symbol does not contain; then launch all."""
    target = torch.zeros(32, dtype=torch.int32)
    session.add_tensor("target", target)
    argument = from_dlpack(target, assumed_align=16)
    for compiled in [cute.compile(_fill, argument, _Value(value)) for value in values]:
        compiled(argument)


@cute.jit
def _count(number: cutlass.Int32) -> cutlass.Int32:
    return number + 1


def fill_undeclared(session: Session) -> None:
    """Write to a tensor that nobody has declared."""
    target = torch.zeros(32, dtype=torch.int32)
    session.add_tensor("another", torch.zeros(1))
    argument = from_dlpack(target, assumed_align=16)
    cute.compile(_fill, argument, _Value(1))(argument)


def fill_after_counting(session: Session) -> None:
    """Compile a function that launches nothing beside one that does."""
    cute.compile(_count, cutlass.Int32(1))(cutlass.Int32(1))
    fill_twice(session, 7)
