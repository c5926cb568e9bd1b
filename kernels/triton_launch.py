"""What every Triton launch needs to know of the process: interpreter, Gluon, device and capture."""

from __future__ import annotations

import functools
import os

import torch

from sdsa_quant.errors import UnsupportedError

from .availability import package_version

_GLUON_SINCE = (3, 6)

# Said at every launch, because Triton 3.9 warns where it is left to a default that will change.
# Where a product is to be fused with a sum, the kernels say `fma`.
COMPILE_OPTIONS = {"enable_fp_fusion": False}


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def has_gluon() -> bool:
    """Whether the installed Triton has the Gluon features that `triton_gluon` uses."""
    version = package_version("triton")
    if version is None:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= _GLUON_SINCE


def device_index(device: torch.device) -> int:
    """Index of a CUDA device; a device without one is the current device."""
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def multiprocessors(index: int) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def refuse_capture_before_warmup(index: int, function: str) -> None:
    """Raise where the current stream is being captured: compiling would invalidate the capture.

    Raises
    ------
    RuntimeError
        The current stream of the device is being captured.
    """
    with torch.cuda.device(index):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise UnsupportedError(
            f"a first call compiles a kernel, which a stream capture forbids: "
            f"run {function} once before capture"
        )
