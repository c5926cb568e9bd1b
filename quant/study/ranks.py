"""The processes of a study: ranks of ``torchrun``, and the workers of each on its machine.

Ranks exchange no results, only whether each step succeeded: through NCCL if every rank has a GPU of
its own, through gloo otherwise. The report is the same with either.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from sdsa_quant.errors import CheckFailedError, SdsaError

from .rendezvous import Meeting, Notify, meet, place_of_environment
from .work import Study, Unit, measure_units, open_study, share_units

# Of a collective operation, which every rank comes to at the same time.
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
_POLL_SECONDS = 1.0


class Ranks:
    """This process among those of ``torchrun``, or alone."""

    def __init__(
        self,
        rank: int,
        count: int,
        group: torch.distributed.ProcessGroup | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        self.rank = rank
        self.count = count
        self._group = group  # None is the default one, where there are several
        self._meeting = meeting  # where there are several

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that reports."""
        return self.rank == 0

    @property
    def joined_by(self) -> str | None:
        """``"nccl"`` or ``"gloo"``; None for a process alone."""
        return None if self.count == 1 else str(torch.distributed.get_backend(self._group))

    def in_step(self, action: Callable[[], None]) -> None:
        """Take a step, then wait for the other ranks; an error of one is an error of all.

        Raises
        ------
        SdsaError
            What `action` raised here, or that another rank failed, with its message.
        """
        error: SdsaError | None = None
        try:
            action()
        except SdsaError as raised:
            error = raised
        messages = self._gather(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise CheckFailedError(f"rank {rank} failed: {message}")

    def _gather(self, message: str | None) -> list[str | None]:
        if self._meeting is None:
            return [message]
        self._meeting.wait()  # where signals reach this process, which they do not below
        messages: list[str | None] = [None] * self.count
        torch.distributed.all_gather_object(messages, message, self._group)
        return messages


@contextlib.contextmanager
def joined_ranks(device: str = "cpu", notify: Notify | None = None) -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started, joined for the time of the block.

    Parameters
    ----------
    device : str
        What this rank measures on.
    notify : callable, optional
        Called with one line, once, if other ranks keep this one waiting.

    Raises
    ------
    InputError
        The environment is not what ``torchrun`` makes it, or the other ranks do not come.
    """
    place = place_of_environment()
    if place is None:
        yield Ranks(0, 1)
        return
    meeting = meet(place, notify)
    # Gloo works anywhere: with it the ranks find out whether NCCL would.
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.PrefixStore(meeting.name, meeting.store),
        rank=place.rank,
        world_size=place.count,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    try:
        yield Ranks(place.rank, place.count, _join_by_nccl(device, place.count), meeting)
    finally:
        torch.distributed.destroy_process_group()


def _join_by_nccl(device: str, count: int) -> torch.distributed.ProcessGroup | None:
    """An NCCL group of all ranks; None unless each of them has a GPU of its own, and NCCL."""
    mine = _gpu_identity(torch.device(device))
    identities: list[str | None] = [None] * count
    torch.distributed.all_gather_object(identities, mine)
    if mine is None or None in identities or len(set(identities)) < count:
        return None
    torch.cuda.set_device(device)
    group: torch.distributed.ProcessGroup = torch.distributed.new_group(
        backend="nccl", timeout=_COLLECTIVE_TIMEOUT
    )
    return group


def _gpu_identity(device: torch.device) -> str | None:
    """What no other GPU of any machine has; None for a CPU and where NCCL is missing."""
    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def measure_with_workers(
    study: Study, units: Sequence[Unit], workers: int, advance: Callable[[int], None]
) -> None:
    """`measure_units` shared out over processes of this machine.

    Raises
    ------
    ValueError
        What `measure_units` raises.
    SdsaError
        A process ended before its work was done.
    """
    workers = min(workers, len(units))
    if workers < 2:
        measure_units(study, units, advance)
        return
    context = multiprocessing.get_context("spawn")  # a fork would share torch's threads' locks
    reports = context.Queue()
    processes = [
        context.Process(
            target=_work,
            args=(study.inputs, study.settings, study.folder.path, study.device, share, reports),
            daemon=True,
        )
        for share in (share_units(units, worker, workers) for worker in range(workers))
        if share
    ]
    try:
        with _interrupts_held():
            for process in processes:
                process.start()
        _follow(processes, reports, advance)
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold SIGINT back in this thread and, for good, in the processes that are started meanwhile.

    Ctrl-C reaches every process of a terminal, but this process ends its workers itself.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow(processes: Sequence[Any], reports: Any, advance: Callable[[int], None]) -> None:
    """Pass progress on until every process is done."""
    running = len(processes)
    while running:
        try:
            report = reports.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            for process in processes:
                if process.exitcode:
                    raise CheckFailedError(
                        f"a worker process ended early, with exit code {process.exitcode}; run the "
                        f"study again to continue it"
                    ) from None
            continue
        if report is None:
            running -= 1
        elif isinstance(report, SdsaError):
            raise report
        else:
            advance(report)


def _work(inputs: Any, settings: Any, folder: Any, device: str, units: Any, reports: Any) -> None:
    """One worker process: reports the cost of each unit, an error, and None at the end."""
    parent = multiprocessing.parent_process()

    def advance(cost: int) -> None:
        reports.put(cost)
        if parent is not None and not parent.is_alive():
            raise SystemExit  # the parent was killed: the next run measures the rest

    try:
        measure_units(open_study(inputs, settings, folder, device), units, advance)
        reports.put(None)
    except SdsaError as error:
        reports.put(error)
