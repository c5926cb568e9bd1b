"""The clock that a GPU's multiprocessors run at while it is timed, before and after.

NVML is asked through torch where its Python module is installed, otherwise ``nvidia-smi``. The
device is kept at the timed work meanwhile, because an idle one clocks down.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from sdsa_kernels.device import can_find

_FALLEN = 0.95  # of the clock before; boost clocks move by a few steps of 15 MHz on their own
_LONGEST_SECONDS = 10
_NVML = "pynvml"


@dataclass(frozen=True, slots=True)
class Clocks:
    """SM clocks around a timing, in MHz."""

    before_mhz: int | None
    after_mhz: int | None
    reason: str | None  # why they are not known

    @property
    def fell(self) -> bool:
        """Whether the device ran slower at the end by more than 5 %."""
        return (
            self.before_mhz is not None
            and self.after_mhz is not None
            and self.after_mhz < _FALLEN * self.before_mhz
        )


class ClockWatch:
    """Asks for the clock each time it is called with work for the device: before, then after."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._answers: list[int | str] = []

    def __call__(self, work: Callable[[], object]) -> None:
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(sm_clock, self._device)
            while not answer.done():
                work()
                torch.cuda.synchronize(self._device)
        self._answers.append(answer.result())

    @property
    def clocks(self) -> Clocks:
        """What was found."""
        reasons = [answer for answer in self._answers if isinstance(answer, str)]
        if reasons or len(self._answers) < 2:
            return Clocks(None, None, reasons[0] if reasons else "not asked for")
        before, after = (int(answer) for answer in self._answers[:2])
        return Clocks(before, after, None)


def sm_clock(device: torch.device) -> int | str:
    """The device's SM clock in MHz, or why it is not known."""
    if can_find(_NVML):
        try:
            return int(torch.cuda.clock_rate(device))
        except Exception as error:  # NVML's own errors have no base class outside of its module
            return f"NVML: {type(error).__name__}: {error}"
    identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={identity}", "--query-gpu=clocks.sm"]
    try:
        answer = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=_LONGEST_SECONDS, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return f"neither NVML for Python ({_NVML}) nor nvidia-smi is installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    shown = answer.stdout.strip()
    return int(shown) if shown.isdigit() else f"nvidia-smi: {shown or answer.stderr.strip()}"
