"""Stream captures and first calls: a backend that compiles must have done so before."""

from __future__ import annotations

import torch

from sdsa_quant.errors import UnsupportedError


def refuse_capture_before_warmup(index: int, function: str) -> None:
    """Raise where the current stream is being captured: compiling would invalidate the capture.

    Raises
    ------
    RuntimeError
        The current stream of the device is being captured.
    """
    with torch.cuda.device(index):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise UnsupportedError(
            f"a first call compiles a kernel, which a stream capture forbids: "
            f"run {function} once before capture"
        )
