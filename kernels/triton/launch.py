"""What every Triton launch needs to know: the interpreter, Gluon, options, overlapping launches.

**Overlapping launches.** From SM90 on a kernel may be launched while the one before it in the
stream still runs ("programmatic dependent launch"), so that its start is hidden behind the other's
end, in captured graphs too. Such a kernel says ``gdc_launch_dependents`` when its successor may be
launched, and must say ``gdc_wait`` before it touches memory: that waits until everything before it
in the stream is complete and visible. Every program has to wait, those without work too: only then
does a kernel's own end mean that all before it has ended, which its successor's wait relies on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sdsa_kernels.device import can_find, capability, device_index, package_version
from sdsa_kernels.switches import interpreting

_GLUON_SINCE = (3, 6)
_LEAST_CAPABILITY = (8, 0)
_LEAST_OVERLAPPING_CAPABILITY = (9, 0)

# Said at every launch, because Triton 3.9 warns where it is left to a default that will change.
# Where a product is to be fused with a sum, the kernels say `fma`.
COMPILE_OPTIONS = {"enable_fp_fusion": False}


@functools.cache
def has_gluon() -> bool:
    """Whether the installed Triton has the Gluon features that `score_gluon` uses."""
    version = package_version("triton")
    if version is None:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= _GLUON_SINCE


def reason_unsupported_on(device: torch.device) -> str | None:
    """None where Triton kernels can run on a device, else why not."""
    if interpreting():
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 takes CPU tensors only"
    if device.type != "cuda":
        return f"tensors must be on a CUDA device, not on {device}"
    if not can_find("triton"):
        return "triton is not installed"
    have = capability(device_index(device))
    if have < _LEAST_CAPABILITY:
        return (
            f"the GPU must have compute capability 8.0 or later, {device} has {have[0]}.{have[1]}"
        )
    return None


def overlaps_launches(index: int) -> bool:
    """Whether a device can launch a kernel before the one ahead of it has ended."""
    return capability(index) >= _LEAST_OVERLAPPING_CAPABILITY


def direct_launch(compiled: Any) -> Callable[..., None]:
    """A function of programs, a stream and a kernel's arguments that launches what Triton compiled.

    Triton's own ways bind and hash every argument, or gather what profilers' hooks may ask for,
    which takes longer than small calls do.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(programs: int, stream: int, *arguments: Any) -> None:
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return launch
