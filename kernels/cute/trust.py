"""Whether the tensor-core kernels can be trusted on a device: asked once, by running them.

They were never run on the hardware that they are for (docs/explanation/tcgen05.md). So before the
first call of each, outside of any capture, it scores a built-in problem, and so does the
warp-level kernel: where a single bit differs, or the launch fails, the process stays with the
warp-level kernel.
"""

from __future__ import annotations

import threading
import time
import warnings
from dataclasses import replace

import torch

from sdsa_kernels.device import capability, multiprocessors, refuse_capture_before_warmup
from sdsa_kernels.plans import addresses_of
from sdsa_kernels.problem import ScoreProblem
from sdsa_kernels.switches import TCGEN05, is_on
from sdsa_kernels.testing.problems import exact_problem, with_tiled_scales
from sdsa_quant.errors import DeviceLostError

from .plans import plan_for
from .variants import ARCHITECTURES, TILED_SCALES_VARIANT, warp_variant

# Every way in which a group can end, then enough keys that every CTA of a B300 (160 SMs) runs its
# ring of stages around several times and that late CTAs follow; more than 32 groups.
_LENGTHS = (1, 0, 63, 64, 65, 127, 128, 129, *range(52_000, 52_040))
_ROWS = 3
_PATIENCE_SECONDS = 30  # for what takes far less than a millisecond, behind whatever is queued

_verdicts: dict[tuple[int, str], str | None] = {}  # why not, None for yes
_lost: dict[int, str] = {}  # devices where a check hangs, which another one would wait behind
_lock = threading.Lock()


def is_trusted(device: int, variant: str) -> bool:
    """Whether `variant` gives the scores of the warp-level kernel on a device.

    The first call of a process finds out and warns if not; ``SDSA_TCGEN05=0`` says no without
    asking.

    Raises
    ------
    UnsupportedError
        This is not known yet, and the current stream is being captured.
    DeviceLostError
        A check on the device hangs, now or since an earlier call.
    """
    if not is_on(TCGEN05, default=True):
        return False
    if (device, variant) not in _verdicts:
        refuse_capture_before_warmup(device, "indexer_scores")
        with _lock:
            if (device, variant) not in _verdicts:
                try:
                    reason = _verdict(device, variant)
                except _NotAskedError as error:  # no verdict: the next call asks again
                    reason = str(error)
                else:
                    _verdicts[device, variant] = reason  # first: a warning can be an error
                if reason is not None:
                    warnings.warn(
                        f"kernel {variant} is not used on cuda:{device}: {reason}",
                        stacklevel=2,
                    )
                    return False
    return _verdicts[device, variant] is None


def known_reason_against(device: int, variant: str) -> str | None:
    """What `is_trusted` found wrong with a variant, if it was asked and found anything."""
    return _verdicts.get((device, variant))


class _NotAskedError(Exception):
    """The problem of a check could not be made or scored: nothing was learned of the variant."""


def _verdict(device: int, variant: str) -> str | None:
    """Why not to trust a variant; whatever of it fails is a reason to use the warp-level kernel.

    Raises
    ------
    DeviceLostError
        A check on the device hangs, now or since an earlier call.
    _NotAskedError
        The check could not be made.
    """
    if device in _lost:
        raise DeviceLostError(_lost[device])
    try:
        return _reason_against(device, variant)
    except DeviceLostError as error:
        _lost[device] = str(error)
        raise
    except _NotAskedError:
        raise
    except Exception as error:
        return f"its self-check failed to run: {error}"


def _reason_against(device: int, variant: str) -> str | None:
    problem, expected = _check(device, variant)
    _run(problem, variant)
    different = problem.scores != expected.scores
    if bool(different.any()):
        row, key = (int(i) for i in different.nonzero()[0])
        found, wanted = problem.scores[row, key], expected.scores[row, key]
        return (
            f"its self-check gives {found:.9g} where {wanted:.9g} is right (row {row}, key {key}, "
            f"and {int(different.sum()) - 1} others)"
        )
    return None


def _check(device: int, variant: str) -> tuple[ScoreProblem, ScoreProblem]:
    """The problem to score by a variant, and as the warp-level kernel has scored it."""
    format_pair = "bf16" if variant == "tcgen05_bf16" else "nvfp4"
    try:
        problem = exact_problem(
            format_pair, torch.device("cuda", device), _LENGTHS, rows_per_group=_ROWS
        )
        expected = replace(problem, scores=problem.scores.clone())
        _run(expected, _warp_variant(problem, device))
        tiled = variant == TILED_SCALES_VARIANT
        return with_tiled_scales(problem) if tiled else problem, expected
    except DeviceLostError:
        raise
    except Exception as error:
        raise _NotAskedError(f"its self-check could not be made: {error}") from error


def _warp_variant(problem: ScoreProblem, device: int) -> str:
    return warp_variant(problem, ARCHITECTURES[capability(device)], multiprocessors(device))


def _run(problem: ScoreProblem, variant: str) -> None:
    """Launch and wait: what fails on the device then fails here."""
    plan_for(problem, variant)(*addresses_of(problem))
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(problem.device))
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not done.query():
        if time.monotonic() > deadline:
            raise DeviceLostError(
                f"kernel {variant} has not ended after {_PATIENCE_SECONDS} s on {problem.device} "
                f"and nothing can end it but the process: set {TCGEN05}=0 to never use it"
            )
        time.sleep(0.001)
