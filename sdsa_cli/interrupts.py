"""Ctrl-C that is never lost: remembered by a handler, and asked for where it may be swallowed.

Python raises `KeyboardInterrupt` wherever it happens to be, and code of others that it lands in
(an import that has alternatives, a destructor) may drop it; the run would go on to its end.
"""

from __future__ import annotations

import signal
from types import FrameType

_seen = False


def remember_interrupts() -> None:
    """Install the handler, unless interrupts are ignored, as they are for jobs of ``nohup``."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def interrupted() -> bool:
    """Whether this process was interrupted, whatever became of the exception."""
    return _seen


def stop_if_interrupted() -> None:
    """Raise the interrupt again if it was lost.

    Raises
    ------
    KeyboardInterrupt
        The process was interrupted.
    """
    if _seen:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _seen
    _seen = True
    raise KeyboardInterrupt
