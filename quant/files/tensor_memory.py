"""The bytes of a tensor where they lie.

torch hands out bytes through NumPy only, which it can do without and which is not a dependency.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from sdsa_quant.errors import InputError

if TYPE_CHECKING:
    import torch


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor: a view to read and write, which keeps it alive.

    Raises
    ------
    ValueError
        The tensor is on another device, or its elements do not follow each other.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise InputError(
            f"a tensor must be contiguous and on the CPU, got strides {tensor.stride()} on "
            f"{tensor.device}"
        )
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    data = (ctypes.c_char * size).from_address(tensor.data_ptr())
    data.owner = tensor  # type: ignore[attr-defined]
    return memoryview(data).cast("B")
