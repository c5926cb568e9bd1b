"""What files of `sdsa_quant.capturing` say of themselves, for what a study was not told."""

from __future__ import annotations

from dataclasses import replace

from sdsa_quant.captures.names import QUERY_NAMES
from sdsa_quant.errors import InputError
from sdsa_quant.files.safetensors_reader import header_metadata
from sdsa_quant.files.tensor_source import TensorSource, open_tensors

from .inputs import RELU_SUM, ROWS, StudyInputs

# As `sdsa_quant.capturing.capture` writes it; that module loads what a study does not need.
FORMAT = "sdsa-capture"


def with_stated(inputs: StudyInputs, score: str | None) -> StudyInputs:
    """The inputs, with the score, weights, requests and positions that a capture's files state.

    Parameters
    ----------
    inputs : StudyInputs
        As they were given.
    score : str or None
        The score that was given; None for what the files state, or else ``rows``.

    Raises
    ------
    ValueError
        Files do not agree on how the model selects, or their tensors are not as they state.
    """
    source = open_tensors(inputs.queries)
    stated = {path: header_metadata(path) for path in source.files}
    captured = {path: each for path, each in stated.items() if each.get("format") == FORMAT}
    if not captured:
        return replace(inputs, score=score or ROWS)
    first, *others = captured
    for name in ("score", "heads", "pool"):
        for path in others:
            if captured[path].get(name) != captured[first].get(name):
                raise InputError(
                    f"has {name} {captured[path].get(name)} in its metadata, and {first.name} has "
                    f"{captured[first].get(name)}: give captures of one model",
                    source=path,
                )
    if captured[first].get("score") != ROWS:
        inputs = replace(inputs, pool=_check_heads(source, captured[first]))
    score = score or captured[first].get("score", ROWS)
    weights = _pattern(source, "weights") if score == RELU_SUM else None
    positions = None if inputs.causal else _pattern(source, "positions")
    return replace(
        inputs,
        score=score,
        weights=inputs.weights or weights,
        requests=_pattern(source, "requests") if inputs.requests is None else inputs.requests,
        positions=inputs.positions or positions,
        causal=inputs.causal or inputs.positions is not None or positions is not None,
    )


def _pattern(source: TensorSource, name: str) -> str | None:
    """A pattern for the tensors that end with a name; None where none does."""
    return f"*.{name}" if any(tensor.name.endswith(f".{name}") for tensor in source) else None


def _check_heads(source: TensorSource, metadata: dict[str, str]) -> int:
    """Compare the heads of query tensors with those stated; returns tokens of a key."""
    from sdsa_quant.capturing.rule import rule_of

    rule = rule_of(metadata, source.path)
    for tensor in source:
        if tensor.name_in_file.rpartition(".")[2] in QUERY_NAMES and (
            len(tensor.shape) != 3 or tensor.shape[1] != rule.heads
        ):
            raise InputError(
                f"tensor {tensor.name} must have the {rule.heads} heads that its file's metadata "
                f"states, got {list(tensor.shape)}",
                source=tensor.path,
            )
    return rule.pool
