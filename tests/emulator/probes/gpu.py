"""A GPU, through the CUDA driver library alone: enough to run a probe."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from emulator.copies.tensor_map import TensorMap

from .probe import MAP_BYTES, UNWRITTEN_BYTE, Probe

_MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
_NOT_READY = 600
_TIMEOUT_SECONDS = 5.0


class DriverError(RuntimeError):
    """A driver call that failed, or a kernel that does not end."""


class Gpu:
    """The first GPU, in a context of its own."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._context = ctypes.c_void_p()
        self._call("cuCtxCreate_v2", ctypes.byref(self._context), 0, self._device)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()} ({code})")

    def describe(self) -> dict[str, str]:
        """Name and driver version, for the record."""
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, 128, self._device)
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return {"device": name.value.decode(), "cuda_driver_version": str(version.value)}

    def run(self, probe: Probe) -> np.ndarray:
        """Run a probe and return its output, uint8 ``[output_bytes]``."""
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), probe.ptx.encode() + b"\0")
        addresses: list[int] = []
        try:
            function = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(function), module, b"probe")
            self._call(
                "cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, max(probe.shared_bytes, 1)
            )
            output = np.full(probe.output_bytes, UNWRITTEN_BYTE, dtype=np.uint8)
            for content in (*probe.inputs, output):
                addresses.append(self._upload(content))
            self._launch(function, probe, addresses)
            self._call(
                "cuMemcpyDtoH_v2",
                ctypes.c_void_p(output.ctypes.data),
                ctypes.c_uint64(addresses[-1]),
                ctypes.c_size_t(output.nbytes),
            )
            return output
        finally:
            for address in addresses:
                self._driver.cuMemFree_v2(ctypes.c_uint64(address))
            self._driver.cuModuleUnload(module)

    def _upload(self, content: np.ndarray) -> int:
        content = np.ascontiguousarray(content)
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(content.nbytes)
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        self._call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(content.ctypes.data), size)
        return address.value

    def _launch(self, function: ctypes.c_void_p, probe: Probe, addresses: list[int]) -> None:
        values: list[ctypes.Array | ctypes.c_uint64] = [ctypes.c_uint64(at) for at in addresses]
        for tensor_map in probe.placed_maps(addresses):
            values.append((ctypes.c_char * MAP_BYTES).from_buffer_copy(self.encode(tensor_map)))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
        self._call(
            "cuLaunchKernel", function, probe.grid, 1, 1, probe.block, 1, 1, probe.shared_bytes,
            None, pointers, None,
        )  # fmt: skip
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while (code := self._driver.cuStreamQuery(None)) == _NOT_READY:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{probe.name} does not end")
        if code:
            raise DriverError(f"{probe.name} failed with {code}")

    def takes(self, tensor_map: TensorMap) -> bool:
        """Whether the driver encodes a tensor map."""
        try:
            self.encode(tensor_map)
        except DriverError:
            return False
        return True

    def encode(self, tensor_map: TensorMap) -> bytes:
        """The driver's 128 bytes for a tensor map."""
        buffer = ctypes.create_string_buffer(2 * MAP_BYTES)
        start = -ctypes.addressof(buffer) % 64
        rank = tensor_map.rank

        def array(kind: type, values: tuple[int, ...]) -> ctypes.Array:
            return (kind * max(len(values), 1))(*values)

        self._call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(ctypes.addressof(buffer) + start),
            int(tensor_map.data_type),
            rank,
            ctypes.c_void_p(tensor_map.address),
            array(ctypes.c_uint64, tensor_map.dimensions),
            array(ctypes.c_uint64, tensor_map.strides),
            array(ctypes.c_uint32, tensor_map.box),
            array(ctypes.c_uint32, tensor_map.element_strides),
            tensor_map.interleave,
            tensor_map.swizzle,
            tensor_map.l2_promotion,
            tensor_map.oob_fill,
        )
        return buffer.raw[start : start + MAP_BYTES]
