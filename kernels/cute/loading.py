"""The CuTe DSL kernels of this process: each compiled, or read from disk, and loaded once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from sdsa_kernels.capture import refuse_capture_before_warmup
from sdsa_kernels.device import capability, multiprocessors

from .variants import ARCHITECTURES, loaded_together

if TYPE_CHECKING:
    from .launch import LoadedKernel

_kernels: dict[tuple[int, str], LoadedKernel] = {}
_lock = threading.Lock()


def loaded_kernel(device: int, variant: str) -> LoadedKernel:
    """The kernel of a variant on a device.

    Raises
    ------
    UnsupportedError
        It is not loaded yet and the current stream is being captured, or it cannot be compiled or
        loaded.
    """
    kernel = _kernels.get((device, variant))
    if kernel is None:
        with torch.cuda.device(device):
            kernel = _load(device, variant)
    return kernel


def _load(device: int, variant: str) -> LoadedKernel:
    refuse_capture_before_warmup(device, "indexer_scores")
    from .disk_cache import compiled_kernel
    from .launch import LoadedKernel

    architecture, sms = ARCHITECTURES[capability(device)], multiprocessors(device)
    with _lock:
        for name in loaded_together(variant, architecture):
            if (device, name) not in _kernels:
                compiled = compiled_kernel(architecture, name)
                _kernels[device, name] = LoadedKernel(
                    compiled.image, compiled.symbol, compiled.config, device, sms
                )
    return _kernels[device, variant]
