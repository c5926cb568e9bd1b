"""How the ranks of a study find each other: by the environment, with a word, an end, an interrupt.

Containers of job operators have ``WORLD_SIZE`` set, also where one process is to run alone. So
nothing here waits inside of a library: a rank asks a store who has come, and sleeps in between,
where Ctrl-C and SIGTERM reach it, says whom it waits for, and gives up after some minutes.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from sdsa_quant.errors import CheckFailedError, InputError
from sdsa_quant.files.text import whole_number

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE_SECONDS = 600.0  # for every rank to come
_SILENT_SECONDS = 2.0  # ranks that start together need no words
_POLL_SECONDS = 0.05
_SLOW_POLL_SECONDS = 1.0  # for ranks that measure
_STORE_TIMEOUT = timedelta(seconds=30)  # for an answer of a store that is there
_HIGHEST_PORT = 65535
_ALONE = "unset WORLD_SIZE to run alone"

_joined = itertools.count()  # the ranks of one store join it anew for every study
Notify = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Place:
    """This process among its ranks, and where they meet."""

    rank: int
    count: int
    host: str
    port: int
    store_is_there: bool  # the launcher keeps it; else the first rank does

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{self.host}:{self.port}"


def place_of_environment() -> Place | None:
    """What ``WORLD_SIZE``, ``RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` say; None for one process.

    Raises
    ------
    InputError
        There are several ranks, and one of the variables is missing or not what it must be.
    """
    count = _number("WORLD_SIZE", 1, None) if os.environ.get("WORLD_SIZE") else 1
    if count == 1:
        return None
    host = os.environ.get("MASTER_ADDR", "")
    if not host:
        raise InputError(
            f"environment variable MASTER_ADDR must be set for {count} ranks; {_ALONE}"
        )
    return Place(
        rank=_number("RANK", 0, count - 1),
        count=count,
        host=host,
        port=_number("MASTER_PORT", 1, _HIGHEST_PORT),
        store_is_there=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def local_rank() -> int | None:
    """``LOCAL_RANK``, this process's number on its machine; None where it is not set.

    Raises
    ------
    InputError
        It is not a whole number.
    """
    return _number("LOCAL_RANK", 0, None) if os.environ.get("LOCAL_RANK") else None


def _number(name: str, least: int, most: int | None) -> int:
    text = os.environ.get(name, "")
    number = whole_number(text)
    if number is None or number < least or (most is not None and number > most):
        wanted = f"{least} or more" if most is None else f"{least} to {most}"
        raise InputError(
            f"environment variable {name} must be a whole number, {wanted}, got {text!r}; {_ALONE}"
        )
    return number


class Meeting:
    """The ranks of one study, which can wait for each other.

    Parameters
    ----------
    place : Place
        This process.
    store : torch.distributed.Store
        What all of them see.
    name : str
        Of this meeting in the store.
    """

    def __init__(self, place: Place, store: Store, name: str) -> None:
        self.place = place
        self.store = store
        self.name = name
        self._rounds = itertools.count()

    def wait(self) -> None:
        """Wait until every rank is here, however long the slowest one takes.

        Raises
        ------
        CheckFailedError
            The rank that keeps the store has ended.
        """
        key = f"{self.name}/round/{next(self._rounds)}"
        present = self._come(key)
        poll = _POLL_SECONDS
        while present < self.place.count:
            time.sleep(poll)
            poll = min(2 * poll, _SLOW_POLL_SECONDS)
            present = self._present(key)

    def join(self, notify: Notify | None) -> None:
        """Wait until every rank has come, and say whom for.

        Raises
        ------
        InputError
            Some have not come after ten minutes.
        """
        key = f"{self.name}/joined"
        present = self._come(key)
        wait = _Wait(self.place, notify)
        while present < self.place.count:
            wait.go_on(self.place.count - present)
            present = self._present(key)

    def _come(self, key: str) -> int:
        return self._add(key, 1)

    def _present(self, key: str) -> int:
        return self._add(key, 0)

    def _add(self, key: str, number: int) -> int:
        try:
            return int(self.store.add(key, number))
        except RuntimeError as error:  # DistNetworkError, DistStoreError
            raise CheckFailedError(
                f"the ranks cannot meet at {self.place.address} any more: the process that they "
                f"meet at has ended: {_first_line(error)}"
            ) from None


class _Wait:
    """The steps of a wait for other ranks."""

    def __init__(self, place: Place, notify: Notify | None) -> None:
        self._place = place
        self._notify = notify
        self._started = time.monotonic()

    def go_on(self, missing: int) -> None:
        """Sleep a little; the first time that it takes long, say so.

        Raises
        ------
        InputError
            It has been too long.
        """
        words = f"waiting for {missing} of {self._place.count} ranks at {self._place.address}"
        waited = time.monotonic() - self._started
        if waited > PATIENCE_SECONDS:
            raise InputError(
                f"{missing} of {self._place.count} ranks did not come to {self._place.address} "
                f"in {PATIENCE_SECONDS:.0f} s; {_ALONE}"
            )
        if waited > _SILENT_SECONDS and self._notify is not None:
            self._notify(f"{words} ({_ALONE})")
            self._notify = None
        time.sleep(_POLL_SECONDS)


def meet(place: Place, notify: Notify | None = None) -> Meeting:
    """Wait for all ranks of a place.

    Parameters
    ----------
    place : Place
        From `place_of_environment`.
    notify : callable, optional
        Called with one line, once, if other ranks keep this one waiting.

    Raises
    ------
    InputError
        They have not all come after ten minutes, or the first rank cannot keep a store there.
    """
    import torch.distributed

    keeps_store = place.rank == 0 and not place.store_is_there
    if not keeps_store:
        _await_store(place, notify)
    try:
        store = torch.distributed.TCPStore(
            place.host,
            place.port,
            place.count,
            keeps_store,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise InputError(
            f"the ranks cannot meet at {place.address}: {_first_line(error)}; {_ALONE}"
        ) from None
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    meeting = Meeting(place, store, f"sdsa/{run}/{restart}/{next(_joined)}")
    meeting.join(notify)
    return meeting


def _await_store(place: Place, notify: Notify | None) -> None:
    """Wait until somebody listens where the store is to be."""
    wait = _Wait(place, notify)
    while True:
        try:
            with socket.create_connection((place.host, place.port), timeout=1.0):
                return
        except OSError:  # nobody listens yet, or the name is not known yet
            wait.go_on(place.count - 1)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
