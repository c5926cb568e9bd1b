"""What files of `sdsa_quant.capturing` say of themselves, for what a study was not told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sdsa_quant.captures.names import QUERY_NAMES
from sdsa_quant.errors import InputError
from sdsa_quant.files.safetensors_reader import header_metadata
from sdsa_quant.files.tensor_source import TensorSource, open_tensors
from sdsa_quant.layout import DEFAULT_TOP_K

from .inputs import RELU_SUM, ROWS, Selection, StudyInputs, parse_selection

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
    captured = _captured_files(source)
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


def chosen_selection(
    queries: Path, select: str | None, top_k: Sequence[int] | None, local_blocks: int | None
) -> Selection:
    """What to select: as it was given, else as a capture's files state, else some numbers of keys.

    Parameters
    ----------
    queries : Path
        The files of the query rows.
    select : str or None
        Such as ``tokens:2048`` or ``blocks:128:16``.
    top_k : sequence of int or None
        Numbers of keys, or of blocks where a capture states blocks.
    local_blocks : int or None
        Of the blocks that a row sees, how many of the last are selected whatever their scores.

    Raises
    ------
    ValueError
        `select` is not a selection, or it is given with `top_k`; the files state different blocks;
        or as many blocks are forced as are selected.
    """
    if select is not None and top_k is not None:
        raise InputError(f"must be left out with select, got {list(top_k)}", argument="top_k")
    chosen = None if select is None else parse_selection(select)
    chosen = chosen or _stated_selection(open_tensors(queries)) or Selection(1, DEFAULT_TOP_K)
    if top_k is not None:
        chosen = replace(chosen, top_k=tuple(top_k))
    if local_blocks is not None:
        chosen = replace(chosen, local=local_blocks)
    if chosen.local and chosen.local >= min(chosen.top_k, default=0):
        raise InputError(
            f"must be fewer than are selected, {min(chosen.top_k, default=0)}, got {chosen.local}",
            argument="local_blocks",
        )
    return chosen


def _stated_selection(source: TensorSource) -> Selection | None:
    """What the files of a capture select; None without any that select."""
    from sdsa_quant.capturing.rule import rule_of

    rules = {
        path: rule_of(metadata, path)
        for path, metadata in _captured_files(source).items()
        if metadata.get("score") != ROWS
    }
    if not rules:
        return None
    first, *others = rules
    for path in others:
        if (rules[path].block, rules[path].local) != (rules[first].block, rules[first].local):
            raise InputError(
                f"states the selection {rules[path].select}, and {first.name} "
                f"{rules[first].select}: give captures of one model",
                source=path,
            )
    top_k = sorted({rule.k for rule in rules.values()})  # layers may select different numbers
    return Selection(rules[first].block, tuple(top_k), rules[first].local)


def _captured_files(source: TensorSource) -> dict[Path, dict[str, str]]:
    """The files that `sdsa_quant.capturing` wrote, with their metadata."""
    stated = {path: header_metadata(path) for path in source.files}
    return {path: each for path, each in stated.items() if each.get("format") == FORMAT}


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
