"""Tensor maps that compiled host code of CuTe DSL makes, in a recorder's process."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from .launch_recorder import Session


@cute.kernel
def _use_map(atom: cute.CopyAtom) -> None:
    cpasync.prefetch_descriptor(atom)


def make_map(
    session: Session,
    element: str,
    address: int,
    dimensions: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: tuple[int, int, int],
) -> None:
    """Launch a kernel whose only parameter is a tensor map.

    Parameters
    ----------
    session : Session
    element : str
        CuTe DSL's type of the elements.
    address : int
        Of the tensor; nothing is read there.
    dimensions, strides, box : tuple of int
        In elements, innermost first.
    swizzle : tuple of int
        Bits, base and shift of CuTe's swizzle of the box.
    """
    bits, base, shift = swizzle

    @cute.jit
    def launch(pointer: cute.Pointer, stream: cuda.CUstream) -> None:
        tensor = cute.make_tensor(pointer, cute.make_layout(dimensions, stride=strides))
        plain = cute.make_ordered_layout(box, order=tuple(range(len(box))))
        layout = cute.make_composed_layout(cute.make_swizzle(bits, base, shift), 0, plain)
        load = cpasync.CopyBulkTensorTileG2SOp()
        atom, _ = cpasync.make_tiled_tma_atom(load, tensor, layout, box)
        _use_map(atom).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    kind = getattr(cutlass, element)
    pointer = cute.runtime.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=128)
    launch(pointer, cuda.CUstream(0))
