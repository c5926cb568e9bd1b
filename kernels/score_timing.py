"""How long scoring a task takes: the one place that knows which way of timing a device has."""

from __future__ import annotations

from sdsa_quant.errors import UnsupportedError

from .score_cache import PieceScorer
from .timing import Timing, time_eager


def time_scorer(scorer: PieceScorer, repeats: int) -> Timing:
    """Time `repeats` runs over every group: plain repeats, as a CPU has no graph to replay.

    Raises
    ------
    ValueError
        `repeats` is less than 1.
    RuntimeError
        The device cannot be timed.
    """
    device = scorer.task.device
    if device.type != "cpu":
        raise UnsupportedError(f"scores on {device} cannot be timed: only a CPU's can")
    return time_eager(scorer.run, repeats)
