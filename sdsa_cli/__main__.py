"""Entry point of the `sdsa` command and of ``python -m sdsa_cli``."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import sys
import warnings
from types import FrameType

from sdsa_quant.errors import EXIT_INTERRUPTED
from sdsa_quant.threads import prepare_threads

from .interrupts import remember_interrupts

# torch says so at import; nothing here uses NumPy, so it would only alarm. At module level, because
# worker processes import this module before they load torch.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


def main() -> None:
    """Run the command line of this process; ends it with the command's exit code."""
    remember_interrupts()
    # As an exit, so that half-written outputs are removed on the way.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    _open_closed_streams()
    _tell_fatal_signals()
    _write_whatever_the_encoding()
    prepare_threads()
    try:
        from .app import app  # late, so that an interrupt of its imports is caught

        app(prog_name="sdsa")
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(EXIT_INTERRUPTED)


def _tell_fatal_signals() -> None:
    """Let a signal that ends the process at once, such as of a mapped file cut short, be told."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor
        faulthandler.enable(sys.stderr, all_threads=False)


def _open_closed_streams() -> None:
    """Let what goes to a stream that the caller closed go nowhere, and not to the other one."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open as long as the process


def _write_whatever_the_encoding() -> None:
    """Let no character that a stream's encoding lacks end a command, such as in a C locale."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
