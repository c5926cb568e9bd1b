"""Backend `cute`: one CuTe DSL kernel family for SM90 and SM10x, compiled on first use."""

from __future__ import annotations

import functools

import torch

from sdsa_kernels.device import capability, device_index, multiprocessors, package_version
from sdsa_kernels.plans import Plan, addresses_of
from sdsa_kernels.problem import TILED_SCALES_REASON, ScoreProblem
from sdsa_quant.layout import NVFP4, PAGE

from .plans import plan_for
from .trust import is_trusted, known_reason_against
from .variants import (
    ARCHITECTURES,
    TENSOR_CORE,
    TILED_SCALES_VARIANT,
    tensor_core_variant,
    warp_variant,
)

DISTRIBUTION = "nvidia-cutlass-dsl"
MINIMUM_VERSION = (4, 8)
_MAX_PAGES = 2**31 - 1  # the kernel counts pages in 32 bits


@functools.cache
def reason_against_dsl(installed: str | None) -> str | None:
    wanted = ".".join(str(part) for part in MINIMUM_VERSION)
    if installed is None:
        return f"it needs {DISTRIBUTION} {wanted} or later, which is not installed"
    if tuple(int(part) for part in installed.split(".")[:2]) < MINIMUM_VERSION:
        return f"it needs {DISTRIBUTION} {wanted} or later, installed is {installed}"
    return None


def reason_unsupported(problem: ScoreProblem) -> str | None:
    """None where this backend can serve `problem`, else why not."""
    if problem.device.type != "cuda":
        return f"tensors must be on a CUDA device, not on {problem.device}"
    found = capability(device_index(problem.device))
    if found not in ARCHITECTURES:
        names = ", ".join(f"SM{major}{minor}" for major, minor in ARCHITECTURES)
        return f"it has kernels for {names}, and this is an SM{found[0]}{found[1]}"
    if problem.groups * (problem.max_context // PAGE + 1) > _MAX_PAGES:
        return f"{problem.groups} groups of up to {problem.max_context} keys are too many for it"
    reason = reason_against_dsl(package_version(DISTRIBUTION))
    return _reason_against_tiled_scales(problem) if reason is None else reason


def _reason_against_tiled_scales(problem: ScoreProblem) -> str | None:
    """None where scales are linear, or the kernel that takes tiled ones can be trusted here."""
    if not problem.tiled_scales:
        return None
    device = device_index(problem.device)
    variant = tensor_core_variant(problem, ARCHITECTURES[capability(device)])
    if variant is None:
        return TILED_SCALES_REASON
    return None if is_trusted(device, variant) else "its kernel for tiled scales failed its check"


def takes_tiled_scales(device: torch.device, query_format: str) -> bool:
    """Whether query rows of a format meet scales in the 128x4 order as they are, on a device."""
    if device.type != "cuda" or query_format != NVFP4:
        return False
    index = device_index(device)
    if ARCHITECTURES.get(capability(index)) not in TENSOR_CORE:
        return False
    if reason_against_dsl(package_version(DISTRIBUTION)) is not None:
        return False
    return is_trusted(index, TILED_SCALES_VARIANT)


def launch(problem: ScoreProblem) -> None:
    """Enqueue the scores of `problem` on the current stream of its device.

    Raises
    ------
    UnsupportedError
        This is the first call of its kind and the stream is being captured, or the kernel cannot be
        compiled or loaded.
    """
    if problem.groups == 0 or problem.max_context == 0:
        return
    _plan(problem)(*addresses_of(problem))


def make_plan(problem: ScoreProblem) -> Plan | None:
    """How to launch `problem` again at other addresses; None where there is nothing to launch."""
    if problem.groups == 0 or problem.max_context == 0:
        return None
    return _plan(problem)


def reason_for_fallback(problem: ScoreProblem) -> str | None:
    """What its check found wrong with the kernel that is best for `problem`, if it was asked."""
    if problem.device.type != "cuda":
        return None
    device = device_index(problem.device)
    architecture = ARCHITECTURES.get(capability(device), "")
    variant = tensor_core_variant(problem, architecture)
    reason = None if variant is None else known_reason_against(device, variant)
    return None if reason is None else f"{variant}: {reason}"


def _plan(problem: ScoreProblem) -> Plan:
    """The launch of `problem` at any addresses, its kernel compiled and loaded."""
    device = device_index(problem.device)
    architecture = ARCHITECTURES[capability(device)]
    variant = tensor_core_variant(problem, architecture)
    if variant is None or not is_trusted(device, variant):
        variant = warp_variant(problem, architecture, multiprocessors(device))
    return plan_for(problem, variant)
