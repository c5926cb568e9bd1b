"""How many threads torch's CPU operations have, and how long they spin while they wait.

OpenMP's threads spin for milliseconds by default. Where other work wants the same cores, or a
container has a quota, that takes time from the very threads that are waited for: operations become
10 to 85 times slower (docs/explanation/cpu.md). The library that torch brings reads its settings
once, when it is loaded, so that they have to be in the environment before.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import MutableMapping
from pathlib import Path
from statistics import median

THREADS, SPINS, POLICY = "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
# 10,000 rounds are some 30 us: the time from one operation to the next. Measured in 2026-12 on 2
# cores, quantizing 200,000 keys and scoring them, in ms. Idle: 84 and 28, where the default of
# libgomp takes 80 and 28, 1,000 rounds 112 and 38, none 149 and 59. Beside a load of 5: none 166
# and 57, 1,000 rounds 195 and 73, 20,000 rounds 368 and 194, the default 2,008 and 326.
_SPINS_OF_AN_IDLE_MACHINE = "10000"
_SPINS_OF_A_BUSY_MACHINE = "0"
_SAMPLES, _SECONDS_BETWEEN_SAMPLES = 5, 0.002


def prepare_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Choose threads and spinning in the environment, before torch is loaded.

    What is set already stays. Threads are limited to a container's quota; spinning depends on
    whether other processes want the cores now.
    """
    cores = quota_cores()
    if cores is not None and cores < usable_cores():
        environment.setdefault(THREADS, str(cores))
    if POLICY not in environment and SPINS not in environment:
        environment[SPINS] = _SPINS_OF_A_BUSY_MACHINE if is_busy() else _SPINS_OF_AN_IDLE_MACHINE


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def quota_cores(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Whole cores of the CPU quota of this process's control group; None without a quota.

    The smallest of the group and of those that it lies in, by version 2 or 1 of the interface.
    """
    quotas = []
    for folder in _groups(root):
        quota = _quota(folder)
        if quota is not None:
            quotas.append(quota)
    return max(1, math.floor(min(quotas))) if quotas else None


def is_busy(stat: Path = Path("/proc/stat")) -> bool:
    """Whether, with a thread of this process on each of its cores, some would have to wait."""
    samples = []
    for sample in range(_SAMPLES):
        if sample:
            time.sleep(_SECONDS_BETWEEN_SAMPLES)
        running = _running(stat)
        if running is None:
            return False
        samples.append(running)
    others = median(samples) - 1  # this process is running too
    return others + usable_cores() > (os.cpu_count() or 1)


def _groups(root: Path) -> list[Path]:
    """The folder of this process's control group and those above it."""
    folders = [root, root / "cpu"]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root
        parts = [part for part in path.split("/") if part not in ("", "..")]
        folders += [base.joinpath(*parts[: end + 1]) for end in range(len(parts))]
    return folders


def _quota(folder: Path) -> float | None:
    """Cores of one group's own quota: microseconds of computing in a period of microseconds."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = " ".join((folder / name).read_text() for name in names).split()
            quota, period = map(float, words)
        except (OSError, ValueError):  # not there, or "max", which means no limit
            continue
        if quota > 0 and period > 0:
            return quota / period
    return None


def _running(stat: Path) -> int | None:
    """How many threads are running or ready to, on the whole machine."""
    try:
        words = stat.read_text().split()
        return int(words[words.index("procs_running") + 1])
    except (OSError, ValueError, IndexError):
        return None
