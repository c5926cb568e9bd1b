"""Loading a compiled kernel on a device and launching it, through the CUDA driver.

The driver call is the cheapest way into a stream: one buffer of arguments, no tensor conversion,
nothing allocated. It captures into graphs like any launch.

Kernels are launched with *programmatic stream serialization*: one may start while the kernel before
it in the stream ends, and itself waits until that one is complete (docs/explanation/cute.md).
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from cuda.bindings import driver

from sdsa_kernels.plans import Plan
from sdsa_quant.errors import UnsupportedError

from .arguments import Addresses, Record, Sizes, names_of, struct_of
from .compiled import LaunchConfig

# One buffer holds all that a launch takes, in this order:
# - CUlaunchConfig: grid and block sizes and bytes of shared memory; stream, address and number of
#   the attributes;
# - the kernel's parameters (see arguments): addresses; tensor maps, where it takes any, at offsets
#   that differ between architectures; sizes;
# - the only CUlaunchAttribute: its number, padding, and a value of 64 bytes;
# - what cuLaunchKernelEx takes as `extra`: the parameters' address and, by its address, their size.
_GRID = struct.Struct("7I4x")
_STREAM = struct.Struct("3q")
_ATTRIBUTE = struct.Struct("i4xi60x")
_EXTRA = struct.Struct("q5q")

_STREAM_AT = _GRID.size
_PARAMETERS_AT = _STREAM_AT + _STREAM.size

_PARAMETER_BUFFER, _PARAMETER_BUFFER_SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_...
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT

# The tensor maps of query and key_cache, given the addresses of a call in the order of a plan, and
# the parameters that they are: those after the addresses.
TensorMaps = Callable[..., bytes]
_FIRST_MAP = len(names_of(Addresses))
_AFTER_MAPS = _FIRST_MAP + 2


def _checked(result: tuple[Any, ...], what: str) -> Any:
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise UnsupportedError(f"the CUDA driver failed to {what}: {code.name}")
    return values[0] if values else None


def _launch_function() -> Callable[..., int]:
    """``cuLaunchKernelEx`` itself: the binding around it takes as long as the call."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4
    return function


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
        Index of the device, whose context is made the thread's current one.
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
        # Torch's context. A thread that has not used the device has none, and the driver wants one.
        self._context = _checked(
            driver.cuDevicePrimaryCtxRetain(driver.CUdevice(device)), "give the device's context"
        )
        self._make_context_current()
        self._kernel = kernel
        self._function = int(_checked(driver.cuKernelGetFunction(kernel), "load a CuTe DSL kernel"))
        self._config = config
        self._device = device
        self._sms = sms

    def _make_context_current(self) -> None:
        _checked(driver.cuCtxSetCurrent(self._context), "use the device's context")

    @property
    def config(self) -> LaunchConfig:
        """How it is launched."""
        return self._config

    def _parameter_offset(self, index: int) -> int:
        """Bytes from the first parameter to another one."""
        result = driver.cuKernelGetParamInfo(self._kernel, index)
        return int(_checked(result[:2], f"find parameter {index} of a CuTe DSL kernel"))

    def make_plan(self, sizes: Mapping[str, int], tensor_maps: TensorMaps | None = None) -> Plan:
        """How to launch it at any addresses, on the current stream of its device.

        Parameters
        ----------
        sizes : mapping of str to int
            The fields of `arguments.Sizes`, except the two that follow from the grid.
        tensor_maps : callable, optional
            The tensor maps of a call, given its addresses; for kernels that take some.
        """
        first, ctas = self._config.grid(self._sms, sizes["groups"], sizes["max_context"])
        inverse = (2**32 - 1) // (first * self._config.teams)
        given = {**sizes, "first_ctas": first, "inverse_teams": inverse}
        return self.make_launch(ctas, Addresses, Sizes(**given), tensor_maps)

    def make_launch(
        self,
        ctas: int,
        addresses_type: type[Record],
        sizes: Record,
        tensor_maps: TensorMaps | None = None,
        shared_bytes: int | None = None,
    ) -> Callable[..., None]:
        """A function of the fields of `addresses_type` that launches so many CTAs.

        Everything of a launch except the addresses (and tensor maps) is put into its buffer here.
        CTAs have the shared memory of the kernel's configuration, or less.
        """
        config, device = self._config, self._device
        shared = config.shared_bytes if shared_bytes is None else shared_bytes
        stream_and_addresses = struct.Struct(_STREAM.format + struct_of(addresses_type).format)
        kernel_sizes = struct_of(type(sizes))
        maps_at = sizes_at = _STREAM_AT + stream_and_addresses.size
        if tensor_maps is not None:
            maps_at = _PARAMETERS_AT + self._parameter_offset(_FIRST_MAP)
            sizes_at = _PARAMETERS_AT + self._parameter_offset(_AFTER_MAPS)
        attribute_at = sizes_at + kernel_sizes.size
        extra_at = attribute_at + _ATTRIBUTE.size
        buffer = ctypes.create_string_buffer(extra_at + _EXTRA.size)
        base = ctypes.addressof(buffer)
        attribute, extra = base + attribute_at, base + extra_at + struct.calcsize("q")
        _GRID.pack_into(buffer, 0, ctas, 1, 1, config.threads, 1, 1, shared)
        kernel_sizes.pack_into(
            buffer, sizes_at, *(getattr(sizes, n) for n in names_of(type(sizes)))
        )
        _ATTRIBUTE.pack_into(
            buffer,
            attribute_at,
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            1,
        )
        _EXTRA.pack_into(
            buffer,
            extra_at,
            attribute_at - _PARAMETERS_AT,
            *(_PARAMETER_BUFFER, base + _PARAMETERS_AT),
            *(_PARAMETER_BUFFER_SIZE, base + extra_at),
            _END,
        )
        launch, function = _launch_function(), self._function
        fill, view = stream_and_addresses.pack_into, memoryview(buffer).cast("B")
        lock = threading.Lock()
        # The handles alone: what torch.cuda makes of them takes 2 us a call.
        current_device = torch._C._cuda_getDevice
        current_stream = torch._C._cuda_getCurrentRawStream

        def plan(*addresses: int) -> None:
            if current_device() != device:
                with torch.cuda.device(device):
                    plan(*addresses)
                return
            maps = b"" if tensor_maps is None else tensor_maps(*addresses)
            with lock:
                view[maps_at : maps_at + len(maps)] = maps
                fill(buffer, _STREAM_AT, current_stream(device), attribute, 1, *addresses)
                code = launch(base, function, None, extra)
                if code == _INVALID_CONTEXT:
                    self._make_context_current()
                    code = launch(base, function, None, extra)
            if code:
                name = driver.CUresult(code).name
                raise UnsupportedError(f"the CUDA driver failed to launch a kernel: {name}")

        return plan
