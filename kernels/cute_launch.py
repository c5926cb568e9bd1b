"""Loading a compiled kernel on a device and launching it, through the CUDA driver.

The driver call is the cheapest way into a stream: one packed buffer of arguments, no tensor
conversion, nothing allocated. It captures into graphs like any launch.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
from typing import Any

from cuda.bindings import driver

from sdsa_quant.errors import UnsupportedError

from .cute_compile_cache import LaunchConfig


def _checked(result: tuple[Any, ...], what: str) -> Any:
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise UnsupportedError(f"the CUDA driver failed to {what}: {code.name}")
    return values[0] if values else None


class _ArgumentBuffer:
    """Packed arguments and the array of pointers to each.

    Parameters
    ----------
    parameters : str
        As `struct` packs them: counts and types, ``128s`` for one of 128 bytes.
    """

    def __init__(self, parameters: str) -> None:
        layout = struct.Struct(parameters)
        offsets = _offsets(parameters)
        self.packed = ctypes.create_string_buffer(layout.size)
        base = ctypes.addressof(self.packed)
        self.pointers = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        self.address = ctypes.addressof(self.pointers)
        self.pack = functools.partial(layout.pack_into, self.packed, 0)


def _offsets(parameters: str) -> list[int]:
    """Where each parameter starts in the packed arguments."""
    single = [
        field
        for count, kind in re.findall(r"(\d+)([a-z])", parameters)
        for field in ([f"{count}{kind}"] if kind == "s" else [kind] * int(count))
    ]
    return [
        struct.calcsize("".join(single[: i + 1])) - struct.calcsize(single[i])
        for i in range(len(single))
    ]


class _ThreadBuffers(threading.local):
    """A buffer for each kind of kernel, of one thread."""

    def __init__(self) -> None:
        self.of: dict[str, _ArgumentBuffer] = {}


_buffers = _ThreadBuffers()


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
        arguments: tuple[int | bytes, ...],
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
        buffer = _buffers.of.get(config.parameters)
        if buffer is None:
            buffer = _buffers.of[config.parameters] = _ArgumentBuffer(config.parameters)
        buffer.pack(*arguments, ctas, prefetched_bytes)
        if groups * (max_context // config.unit_keys) >= ctas * config.late_wave_units:
            ctas *= 2
        (code,) = driver.cuLaunchKernel(
            self._function,
            ctas, 1, 1,
            config.threads, 1, 1,
            config.shared_bytes, stream, buffer.address, 0,
        )  # fmt: skip
        if code != driver.CUresult.CUDA_SUCCESS:
            raise UnsupportedError(f"the CUDA driver failed to launch a kernel: {code.name}")
