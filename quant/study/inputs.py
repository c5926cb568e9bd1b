"""What a user names for a study: files, tensors, and how query rows belong to requests.

Nothing here needs torch, so that the command line and a report's readers can have it at no cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sdsa_quant.errors import InputError
from sdsa_quant.files.text import whole_number

DEFAULT_FORMATS = (
    "nvfp4",
    "nvfp4-mixed",
    "nvfp4-4over6",
    "mxfp4",
    "fp8",
)  # not bf16, nor the slow rules
FORMAT_NAMES = (
    "bf16",
    *DEFAULT_FORMATS,
    "nvfp4-search",
    "nvfp4-search-mixed",
    "nvfp4-covariance",
    "nvfp4-covariance-mixed",
)


ROWS, RELU_SUM, BLOCK_MAX = SCORES = ("rows", "relu-sum", "block-max")


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
    """Score of a key: ``"rows"``, each query row by itself; ``"relu-sum"``, the weighted sum of
    ReLUs over the heads of query rows ``[rows, heads, 128]``; ``"block-max"``, each head by itself,
    for blocks of keys."""

    weights: str | None = None
    """Tensor of the weights of heads, or a pattern; every weight is 1 if null."""

    pool: int = 1
    """Tokens that a key stands for, as a capture's files state it: a row sees the keys of whole
    ones up to its position."""

    block: int = 1
    """Keys of a block that is selected as a whole, by the maximum of their scores; 1 for keys that
    are selected one by one. Then "keys" of a row are blocks wherever rankings are counted."""

    local_blocks: int = 0
    """Of the blocks that a row sees, how many of the last are selected whatever their scores."""

    mean_pool: int = 1
    """Consecutive keys of the files whose mean is one key of the study; 1 for none."""

    calibration: Path | None = None
    """Calibration file of another capture; null for what the other requests of a layer give."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What is selected: the best keys, or the best blocks of `block` keys."""

    block: int
    """Keys of a block; 1 for keys."""

    top_k: tuple[int, ...]
    """How many a row selects, one or several numbers to study."""

    local: int = 0
    """Blocks among them that are selected whatever their scores."""


def parse_selection(text: str) -> Selection:
    """A selection such as ``tokens:2048`` or ``blocks:128:16``.

    Raises
    ------
    InputError
        The text is not a selection.
    """
    kind, *sizes = text.split(":")
    numbers = [whole_number(size) for size in sizes]
    if len(numbers) == {"tokens": 1, "blocks": 2}.get(kind) and all(numbers):
        *block, k = (number or 0 for number in numbers)
        if block != [1]:
            return Selection(block[0] if block else 1, (k,))
    raise InputError(
        f"must be like tokens:2048 or blocks:128:16 (blocks of 2 keys or more), got {text!r}",
        argument="select",
    )
