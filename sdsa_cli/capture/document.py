"""The JSON document of `sdsa capture`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sdsa_quant.environment import Environment, describe_environment

if TYPE_CHECKING:
    from sdsa_quant.capturing.capture import Capture
    from sdsa_quant.capturing.model import ModelCapture


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A text, which is a request."""

    name: str
    """Name of its file."""
    sha256: str
    """SHA-256 of the file's bytes."""
    tokens: int
    """Tokens that the model saw of it."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """What was captured of a layer."""

    name: str
    """Layer, such as ``layers.3``, or head of one, such as ``layers.3.heads.5``."""
    path: Path
    """Its file."""
    file_bytes: int
    """Size of the file."""
    keys: int
    """Keys of all requests."""
    rows: int
    """Query rows that were kept."""
    score: str
    """``"relu-sum"`` or ``"block-max"``; ``"rows"`` for attention."""
    heads: int
    """Query heads of a row."""
    select: str | None
    """What a row selects, such as ``"tokens:2048"``; null for attention."""
    local: int
    """Blocks that are selected whatever their scores."""
    pool: int
    """Tokens that a key stands for."""
    compared: int | None
    """Rows whose selection was computed anew and compared; null for attention."""
    same: int | None
    """Of those, rows that select what the model selected, ties aside; all of them."""
    ties: int | None
    """Of those, rows that differ only among scores that float32 cannot tell apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureDocument:
    """What `sdsa capture` wrote."""

    schema: Literal["sdsa.capture/1"] = "sdsa.capture/1"
    """Name and version of this document."""
    command: Literal["capture"] = "capture"
    """The command that wrote it."""
    path: Path
    """The folder."""
    model: str
    """The model, as it was named."""
    revision: str | None
    """Its commit; null where it has none."""
    class_name: str
    """Class of the model."""
    every: int
    """Of the positions of a text, one in so many kept its query row."""
    texts: list[TextRecord]
    """The texts, in order."""
    layers: list[LayerRecord]
    """The layers, in the model's order."""
    environment: Environment
    """Where it was made."""


def capture_document(path: str, written: ModelCapture) -> CaptureDocument:
    """The document of a run."""
    return CaptureDocument(
        path=Path(path),
        model=written.model,
        revision=written.revision,
        class_name=written.class_name,
        every=written.capture.every,
        texts=[TextRecord(each.name, each.sha256, each.tokens) for each in written.texts],
        layers=[_layer_record(written.capture, name) for name in written.capture.layers],
        environment=describe_environment(),
    )


def _layer_record(capture: Capture, name: str) -> LayerRecord:
    layer, path = capture.layers[name], capture.paths[name]
    rule, agreement = layer.rule, capture.agreements.get(name)
    return LayerRecord(
        name=name,
        path=path,
        file_bytes=path.stat().st_size,
        keys=sum(layer.lengths),
        rows=layer.rows,
        score="rows" if rule is None else rule.score,
        heads=1 if rule is None else rule.heads,
        select=None if rule is None else rule.select,
        local=0 if rule is None else rule.local,
        pool=1 if rule is None else rule.pool,
        compared=None if agreement is None else agreement.rows,
        same=None if agreement is None else agreement.same,
        ties=None if agreement is None else agreement.tied,
    )
