"""Loading a compiled kernel on a device and launching it, through the CUDA driver.

The driver call is the cheapest way into a stream: one packed buffer of arguments, no tensor
conversion, nothing allocated. It captures into graphs like any launch.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

from cuda.bindings import driver

from sdsa_quant.errors import UnsupportedError

from .cute_compile_cache import LaunchConfig

# The kernel's parameters: 14 addresses and strides, then 6 integers (see cute_kernel).
_ARGUMENTS = struct.Struct("14q6i")
_SIZES = [8] * 14 + [4] * 6


def _checked(result: tuple[Any, ...], what: str) -> Any:
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise UnsupportedError(f"the CUDA driver failed to {what}: {code.name}")
    return values[0] if values else None


class _ArgumentBuffer(threading.local):
    """Packed arguments and the array of pointers to each, one pair per thread."""

    def __init__(self) -> None:
        self.packed = ctypes.create_string_buffer(_ARGUMENTS.size)
        base = ctypes.addressof(self.packed)
        offsets = [sum(_SIZES[:i]) for i in range(len(_SIZES))]
        self.pointers = (ctypes.c_void_p * len(_SIZES))(*(base + offset for offset in offsets))
        self.address = ctypes.addressof(self.pointers)


_buffer = _ArgumentBuffer()


class LoadedKernel:
    """A kernel on one device, ready to launch.

    Parameters
    ----------
    image : bytes
        The device binary.
    symbol : str
        The kernel's name in the binary.
    config : LaunchConfig
        Its launch configuration.
    device : int
        Index of the device; its context is current.
    sms : int
        Multiprocessors of the device.

    Raises
    ------
    UnsupportedError
        The driver cannot load the binary or give the kernel its shared memory.
    """

    def __init__(
        self, image: bytes, symbol: str, config: LaunchConfig, device: int, sms: int
    ) -> None:
        self._library = _checked(
            driver.cuLibraryLoadData(image, None, None, 0, None, None, 0), "load a CuTe DSL kernel"
        )
        kernel = _checked(
            driver.cuLibraryGetKernel(self._library, symbol.encode()), f"find kernel {symbol}"
        )
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        size = config.shared_bytes
        _checked(
            driver.cuKernelSetAttribute(attribute, size, kernel, driver.CUdevice(device)),
            f"give a CuTe DSL kernel {size} bytes of shared memory",
        )
        self._function = _checked(driver.cuKernelGetFunction(kernel), "load a CuTe DSL kernel")
        self._config = config
        self._first_ctas = sms * config.ctas_per_sm

    def launch(
        self,
        arguments: tuple[int, ...],
        groups: int,
        max_context: int,
        prefetched_bytes: int,
        stream: int,
    ) -> None:
        """Enqueue one launch on a stream of the kernel's device.

        The grid depends on the capacity of the call, never on its lengths: where these could fill
        it, a second wave of CTAs follows the first.
        """
        config, ctas = self._config, self._first_ctas
        _ARGUMENTS.pack_into(_buffer.packed, 0, *arguments, ctas, prefetched_bytes)
        if groups * (max_context // config.unit_keys) >= ctas * config.late_wave_units:
            ctas *= 2
        (code,) = driver.cuLaunchKernel(
            self._function,
            ctas, 1, 1,
            config.threads, 1, 1,
            config.shared_bytes, stream, _buffer.address, 0,
        )  # fmt: skip
        if code != driver.CUresult.CUDA_SUCCESS:
            raise UnsupportedError(f"the CUDA driver failed to launch a kernel: {code.name}")
