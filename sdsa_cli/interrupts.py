"""Ctrl-C that is never lost: remembered by a handler, and asked for where it may be swallowed.

Python raises `KeyboardInterrupt` wherever it happens to be, and code of others that it lands in
(an import that has alternatives, a destructor) may drop it; the run would go on to its end.
"""

from __future__ import annotations

import signal
from types import FrameType

_seen = False
_remark = ""


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


def remark_on_interrupt(remark: str) -> None:
    """What to say of an interrupt from now on, such as that nothing is lost; empty for nothing."""
    global _remark
    _remark = remark


def interruption() -> str:
    """What to say where this process was interrupted."""
    return f"interrupted; {_remark}" if _remark else "interrupted"


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _seen
    _seen = True
    raise KeyboardInterrupt
