"""What a user names for a study: files, tensors, and how query rows belong to requests.

Nothing here needs torch, so that the command line and a report's readers can have it at no cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_FORMATS = (
    "nvfp4",
    "nvfp4-mixed",
    "nvfp4-4over6",
    "mxfp4",
    "fp8",
)  # not bf16, nor the slow rules


ROWS, RELU_SUM = SCORES = ("rows", "relu-sum")


@dataclass(frozen=True, slots=True)
class StudyInputs:
    """What was studied, as it was given; null for what was left out."""

    keys: Path
    """File, folder or index of the unquantized keys."""

    queries: Path
    """File, folder or index of the query rows."""

    keys_pattern: str | None = None
    """Name or pattern of the key tensors."""

    queries_pattern: str | None = None
    """Name or pattern of the query tensors."""

    lengths: str | None = None
    """Tensor of request lengths or offsets, or a pattern matched to the layers; one of a usual name
    if null, one request if ``"none"``."""

    rows_per_group: int | None = None
    """Consecutive query rows of one request."""

    requests: tuple[int, ...] | str | None = None
    """Request of each group, or a tensor's name or pattern; groups are spread evenly if null."""

    causal: bool = False
    """Whether a row sees the keys up to its own position; rows are a request's last positions."""

    positions: str | None = None
    """Tensor of each row's position, from 0, or a pattern."""

    score: str = "rows"
    """Score of a key: ``"rows"``, each query row by itself, or ``"relu-sum"``, the weighted sum of
    ReLUs over the heads of query rows ``[rows, heads, 128]``."""

    weights: str | None = None
    """Tensor of the weights of heads, or a pattern; every weight is 1 if null."""

    pool: int = 1
    """Tokens that a key stands for, as a capture's files state it: a row sees the keys of whole
    ones up to its position."""

    calibration: Path | None = None
    """Calibration file of another capture; null for what the other requests of a layer give."""
