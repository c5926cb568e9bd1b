"""Recording what real host code launches, on a machine without a GPU.

A recorder owns one process, in which the stand-in for the CUDA driver is loaded before anything
that could look for the real one. There, host code runs as it is: `cuda.bindings`, the launch path
of `sdsa_kernels`, functions compiled by CuTe DSL. What torch would ask the CUDA runtime is answered
for the same device. Tensors stay on the CPU; their addresses are the "device" addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .kernel_image import elf_size
from .recorded_launch import Device, Launch
from .standin import CUTE_RUNTIME, StandIn, build

if TYPE_CHECKING:
    import torch

_DLPACK_CUDA = 2  # DLDeviceType
_session: Session | None = None  # of the recorder's own process


class RecordingError(RuntimeError):
    """What went wrong in a recorder's process, with its traceback."""


class Session:
    """What a recorded call gets: a way to declare its tensors.

    Parameters
    ----------
    standin : StandIn
    """

    def __init__(self, standin: StandIn) -> None:
        self._standin = standin
        self.device = standin.device

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Declare a tensor's storage to be device memory, recorded with every launch."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._standin.add_region(name, storage.data_ptr(), storage.nbytes())

    def keep_ptx(self, image: bytes, ptx: str) -> None:
        """Give the PTX of a binary (an ELF file) that is loaded."""
        self._standin.ptx[image[: elf_size(image)]] = ptx


class LaunchRecorder:
    """A process in which host code runs against the stand-in; a context manager.

    Parameters
    ----------
    device : Device, optional
        The device that the host code is to see.
    """

    def __init__(self, device: Device | None = None) -> None:
        if not isinstance(device, Device | None):
            raise TypeError(f"device must be a Device, such as Device((10, 0)), not {device!r}")
        self._folder = tempfile.TemporaryDirectory(prefix="launch-recorder-")
        folder = Path(self._folder.name)
        build(folder)
        self._pool = ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(device or Device(), folder),
        )

    def record(self, call: Callable[..., None], *arguments: Any) -> list[Launch]:
        """Run ``call(session, *arguments)`` in the process and return what it launched.

        Parameters
        ----------
        call : callable
            Importable by its name. It declares its tensors with `Session.add_tensor` before it
            launches.
        arguments
            Whatever can be pickled.

        Raises
        ------
        ValueError
            The function has no name to import it by.
        RecordingError
            The call raised, or the stand-in refused or does not answer one of its driver calls.
        """
        if "<" in call.__qualname__:
            raise ValueError(
                f"{call.__qualname__} cannot be recorded: another process must be able to import it"
                " by name, so define it at the top of a module"
            )
        return self._pool.submit(_record, call, arguments).result()

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()
        self._folder.cleanup()

    def __enter__(self) -> LaunchRecorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def record(
    call: Callable[..., None], *arguments: Any, device: Device | None = None
) -> list[Launch]:
    """What ``call(session, *arguments)`` launches, in a process of its own.

    See `LaunchRecorder.record`; with several calls, one `LaunchRecorder` is faster.
    """
    with LaunchRecorder(device) as recorder:
        return recorder.record(call, *arguments)


def _start(device: Device, folder: Path) -> None:
    """Make this process one that sees the stand-in's device."""
    global _session
    if "cutlass" in sys.modules:
        raise RuntimeError(
            "CuTe DSL came into the recorder's process before its settings: the main module must "
            "not import it"
        )
    major, minor = device.capability
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch must not look for devices of its own
    # Compiled kernels must not come from a cache that has no PTX of them.
    os.environ["SDSA_CACHE_DIR"] = str(folder / "kernels")
    os.environ["CUTE_DSL_KEEP_PTX"] = "1"
    os.environ["CUTE_DSL_KEEP_CUBIN"] = "1"
    os.environ["CUTE_DSL_DUMP_DIR"] = str(folder)
    os.environ["CUTE_DSL_LIBS"] = str(folder / CUTE_RUNTIME)
    os.environ["CUTE_DSL_ARCH"] = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    standin = StandIn(folder, device)
    _session = Session(standin)
    _pretend_to_torch(device)
    _answer_for_the_cuda_runtime()
    _keep_ptx_of_compiled_functions(_session)
    _take_tensors_for_global_memory()


def _record(call: Callable[..., None], arguments: tuple[Any, ...]) -> list[Launch]:
    assert _session is not None
    standin = _session._standin
    standin.forget()
    try:
        try:
            call(_session, *arguments)
        except Exception as error:
            standin.check(error)
            raise
        standin.check()
    except Exception as error:
        # As text: not every exception can travel to another process.
        raise RecordingError("".join(traceback.format_exception(error))) from None
    return standin.launches


def _pretend_to_torch(device: Device) -> None:
    """Answer for torch what the launch path asks it about the device."""
    import torch

    class Properties:
        major, minor = device.capability
        multi_processor_count = device.multiprocessors

    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda index: contextlib.nullcontext()
    torch.cuda.get_device_capability = lambda index=None: device.capability
    torch.cuda.get_device_properties = lambda index=None: Properties
    torch.cuda.is_current_stream_capturing = lambda: False
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch._C._cuda_getDevice = lambda: 0


def _answer_for_the_cuda_runtime() -> None:
    """Answer what CuTe DSL asks the CUDA runtime from Python: that only runs on NVIDIA's driver."""
    from cuda.bindings import runtime

    done = runtime.cudaError_t.cudaSuccess
    runtime.cudaGetDeviceCount = lambda: (done, 1)
    runtime.cudaGetDevice = lambda: (done, 0)
    runtime.cudaLibraryUnload = lambda library: (done,)


def _keep_ptx_of_compiled_functions(session: Session) -> None:
    """Keep the PTX of whatever CuTe DSL compiles from here on."""
    from cutlass.base_dsl.jit_executor import JitFunctionArtifacts

    read = JitFunctionArtifacts.__post_init__

    def read_and_keep(artifacts: JitFunctionArtifacts) -> None:
        read(artifacts)
        if isinstance(artifacts.CUBIN, bytes):  # else the function launches no kernel
            session.keep_ptx(artifacts.CUBIN, artifacts.PTX)

    JitFunctionArtifacts.__post_init__ = read_and_keep


def _take_tensors_for_global_memory() -> None:
    """Hand tensors on as those of a device: CuTe DSL compiles other code for those of the CPU.

    In DLPack's ``DLTensor`` the kind of device follows the address; capsules hold one at the start,
    versioned ones behind version, context, deleter and flags.
    """
    import torch

    capsule_name, pointer_of = (
        ctypes.pythonapi.PyCapsule_GetName,
        ctypes.pythonapi.PyCapsule_GetPointer,
    )
    capsule_name.restype, capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    export = torch.Tensor.__dlpack__

    def export_as_of_a_device(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        capsule = export(tensor, *arguments, **options)
        name = capsule_name(capsule)
        start = pointer_of(capsule, name) + (32 if name == b"dltensor_versioned" else 0)
        ctypes.c_int32.from_address(start + 8).value = _DLPACK_CUDA
        return capsule

    torch.Tensor.__dlpack__ = export_as_of_a_device
    torch.Tensor.__dlpack_device__ = lambda tensor: (_DLPACK_CUDA, 0)
