"""What a model selects by: the kind of score, how many it selects of what, and what a key is of.

A capture's files carry it in their header metadata, as strings:

    score   relu-sum, or block-max
    heads   query heads of a row
    select  tokens:2048, the best keys; or blocks:128:16, each head's best 16 blocks of 128 keys
    local   blocks among them that are chosen whatever their scores
    pool    tokens that a key stands for: 1, or those of a pooled or compressed key
    scale   what the model multiplies its scores by besides
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sdsa_quant.errors import InputError
from sdsa_quant.files.text import whole_number

ROWS, RELU_SUM, BLOCK_MAX = "rows", "relu-sum", "block-max"
TOKENS, BLOCKS = "tokens", "blocks"
_FIELDS = ("score", "heads", "select", "local", "pool", "scale")


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """How an indexer selects."""

    score: str
    """``"relu-sum"`` or ``"block-max"``."""

    heads: int
    """Query heads of a row."""

    k: int
    """Keys that a row selects, or blocks that each of its heads selects."""

    block: int = 1
    """Keys of a block."""

    local: int = 0
    """Blocks that are chosen whatever their scores."""

    pool: int = 1
    """Tokens that a key stands for."""

    scale: float = 1.0
    """What the model multiplies its scores by besides, which changes no selection."""

    @property
    def select(self) -> str:
        """Such as ``tokens:2048`` or ``blocks:128:16``."""
        return f"{TOKENS}:{self.k}" if self.block == 1 else f"{BLOCKS}:{self.block}:{self.k}"

    def visible(self, positions: torch.Tensor) -> torch.Tensor:
        """Keys that rows at the positions of their tokens, from 0, see."""
        return (positions + 1) // self.pool

    def metadata(self) -> dict[str, str]:
        """The header fields that say it."""
        return {
            "score": self.score,
            "heads": str(self.heads),
            "select": self.select,
            "local": str(self.local),
            "pool": str(self.pool),
            "scale": repr(self.scale),
        }


def rule_of(metadata: Mapping[str, str], source: object) -> SelectionRule:
    """The rule that header metadata says.

    Parameters
    ----------
    metadata : mapping of str to str
        Of a capture's file.
    source : object
        The file, for messages.

    Raises
    ------
    ValueError
        A field is missing or is not what it must be.
    """
    for name in _FIELDS:
        if name not in metadata:
            raise InputError(f"header field {name} is missing, which captures have", source=source)
    numbers = {name: whole_number(metadata[name]) for name in ("heads", "local", "pool")}
    kind, *sizes = metadata["select"].split(":")
    counts = [whole_number(size) for size in sizes]
    try:
        scale = float(metadata["scale"])
    except ValueError:
        scale = float("nan")
    known = metadata["score"] in (RELU_SUM, BLOCK_MAX) and len(counts) == (
        1 if kind == TOKENS else 2 if kind == BLOCKS else -1
    )
    heads, local, pool = numbers["heads"], numbers["local"], numbers["pool"]
    if not known or None in counts or not heads or local is None or not pool or not scale > 0:
        found = ", ".join(f"{name} {metadata[name]!r}" for name in _FIELDS)
        raise InputError(
            f"header fields must say how a model selects, such as score relu-sum and select "
            f"tokens:2048, got {found}",
            source=source,
        )
    block, k = (1, counts[0]) if kind == TOKENS else (counts[0], counts[1])
    if not block or not k:
        raise InputError(
            f"header field select must have numbers from 1, got {metadata['select']!r}",
            source=source,
        )
    return SelectionRule(metadata["score"], heads, k, block, local, pool, scale)
