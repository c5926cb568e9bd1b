"""The JSON document of `sdsa eval`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sdsa_quant.environment import Environment, describe_environment

if TYPE_CHECKING:
    from sdsa_quant.capturing.evaluate import Evaluation, FormatResult


@dataclass(frozen=True, slots=True)
class EvaluatedText:
    """A text that the model predicted."""

    name: str
    """Name of its file."""
    sha256: str
    """SHA-256 of the file's bytes."""
    tokens: int
    """Tokens that the model saw of it."""


@dataclass(frozen=True, slots=True)
class LayerOverlap:
    """How much of a layer's selection a format leaves."""

    name: str
    """Layer, such as ``layers.3``."""
    rows: int
    """Rows that see more keys than they select."""
    overlap: float | None
    """Mean share of what the unquantized model selects that is still selected; null without such
    rows."""


@dataclass(frozen=True, slots=True)
class EvaluatedFormat:
    """What a format does to the model."""

    format: str
    """The format of keys, and of query rows where it quantizes them."""
    kl_mean: float
    """Mean KL divergence of the next token's distribution from the unquantized model's, in nats."""
    kl_largest: float
    """The largest of them."""
    top1_agreement: float
    """Share of predictions whose likeliest token is the same."""
    perplexity: float
    """Perplexity of the texts."""
    layers: list[LayerOverlap]
    """The selections, layer by layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDocument:
    """What `sdsa eval` found."""

    schema: Literal["sdsa.eval/1"] = "sdsa.eval/1"
    """Name and version of this document."""
    command: Literal["eval"] = "eval"
    """The command that wrote it."""
    model: str
    """The model, as it was named."""
    class_name: str
    """Class of the model."""
    texts: list[EvaluatedText]
    """The texts, in order."""
    tokens: int
    """Predictions that were compared: tokens that have a next one."""
    rotate: str
    """What was done to keys and query rows before they were quantized."""
    perplexity: float
    """Perplexity of the texts, of the model as it is."""
    formats: list[EvaluatedFormat]
    """What each format does."""
    environment: Environment
    """Where it was found."""


def eval_document(found: Evaluation) -> EvalDocument:
    """The document of a run."""
    return EvalDocument(
        model=found.model,
        class_name=found.class_name,
        texts=[EvaluatedText(each.name, each.sha256, each.tokens) for each in found.texts],
        tokens=found.formats[0].tokens,
        rotate=found.rotate,
        perplexity=found.perplexity,
        formats=[_format(each) for each in found.formats],
        environment=describe_environment(),
    )


def _format(result: FormatResult) -> EvaluatedFormat:
    return EvaluatedFormat(
        format=result.format,
        kl_mean=result.kl_sum / result.tokens,
        kl_largest=result.kl_largest,
        top1_agreement=result.same_top / result.tokens,
        perplexity=result.perplexity,
        layers=[
            LayerOverlap(name, rows, result.kept[name] / rows if rows else None)
            for name, rows in result.rows.items()
        ],
    )
