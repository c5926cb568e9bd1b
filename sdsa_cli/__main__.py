"""Entry point of the `sdsa` command and of ``python -m sdsa_cli``."""

from __future__ import annotations

import signal
import sys
import warnings
from types import FrameType

from .app import app

# torch says so at import; nothing here uses NumPy, so it would only alarm. At module level, because
# worker processes import this module before they load torch.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


def main() -> None:
    """Run the command line of this process; ends it with the command's exit code."""
    # As an exit, so that half-written outputs are removed on the way.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    app(prog_name="sdsa")


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
