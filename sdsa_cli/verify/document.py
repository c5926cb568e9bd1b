"""The JSON document of `sdsa verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sdsa_quant.environment import Environment, describe_environment

if TYPE_CHECKING:
    from sdsa_quant.engines.verify import Verdict


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an engine may do, and how much of what it has that explains."""

    name: str
    """Name of a mistake; ``"as the model"``, or a format."""
    text: str
    """What the engine would do, as a sentence goes on after "the engine"."""
    share: float
    """Mean share of the engine's selection that it explains; of a cache, 1 less the median relative
    error of its keys."""


@dataclass(frozen=True, slots=True)
class VerifiedLayer:
    """What was found of one layer."""

    layer: str
    """Layer of the capture."""
    tensor: str
    """Tensor of the dump."""
    compared: int
    """Query rows, or keys of a cache, that were compared."""
    share: float
    """Mean share of what the model selects that the engine selects; of a cache, 1 less the median
    relative error of its keys."""
    needed: float
    """The share from which on an engine is right: a coarse format loses no less."""
    right: bool
    """Whether it is."""
    mistake: str | None
    """The mistake that the engine makes; null if it is right, or no known one explains it."""
    explanations: list[Explanation]
    """All that was tried, the nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyDocument:
    """What `sdsa verify` found."""

    schema: Literal["sdsa.verify/1"] = "sdsa.verify/1"
    """Name and version of this document."""
    command: Literal["verify"] = "verify"
    """The command that wrote it."""
    dump: Path
    """The engine's dump."""
    kind: Literal["selection", "cache"]
    """Whether it has selections, or a cache."""
    layout: str | None
    """How a page of the cache is laid out; null for selections."""
    capture: Path
    """The capture."""
    layers: list[VerifiedLayer]
    """The layers that the dump has."""
    environment: Environment
    """Where it was found."""


def verify_document(
    dump: str, capture: str, layout: str | None, verdicts: Sequence[Verdict]
) -> VerifyDocument:
    """The document of a run."""
    return VerifyDocument(
        dump=Path(dump),
        kind="selection" if layout is None else "cache",
        layout=layout,
        capture=Path(capture),
        layers=[
            VerifiedLayer(
                layer=each.layer,
                tensor=each.tensor,
                compared=each.rows,
                share=each.share,
                needed=each.needed,
                right=each.is_right,
                mistake=each.mistake,
                explanations=[Explanation(one.name, one.text, one.share) for one in each.tried],
            )
            for each in verdicts
        ],
        environment=describe_environment(),
    )
