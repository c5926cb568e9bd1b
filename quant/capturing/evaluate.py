"""What a format of keys does to a model's output: its indexers quantized on the fly."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.errors import InputError, UnsupportedError
from sdsa_quant.formats.key_formats import key_format
from sdsa_quant.formats.transforms import HADAMARD, NONE, hadamard

from .capture import layer_names
from .indexers import KNOWN_CLASSES, Indexer, IndexerCall, Replacement, find_indexers
from .model import (
    DEFAULT_CHUNK,
    CapturedText,
    Progress,
    load_model,
    quiet,
    read_text,
    require_numbers,
    token_ids_of,
)

_ROTATIONS = (NONE, HADAMARD)


@dataclass
class FormatResult:
    """What one format does to the model, over all tokens that have a next one."""

    format: str
    """The format of keys, and of query rows where it quantizes them."""
    tokens: int = 0
    """Predictions that were compared."""
    kl_sum: float = 0.0
    """Sum of the KL divergences from the unquantized model, in nats."""
    kl_largest: float = 0.0
    """The largest of them."""
    same_top: int = 0
    """Predictions whose likeliest token is the same."""
    loss_sum: float = 0.0
    """Sum of the negative log likelihoods of the next tokens, in nats."""
    kept: dict[str, float] = field(default_factory=dict)
    """Of each layer, the sum over rows of the share of the selection that is the same."""
    rows: dict[str, int] = field(default_factory=dict)
    """Of each layer, its rows that see more than they select."""

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log likelihood."""
        return math.exp(self.loss_sum / self.tokens)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model without and with quantized indexers."""

    model: str
    """The model, as it was named."""
    class_name: str
    """Class of the model."""
    texts: list[CapturedText]
    """The texts."""
    rotate: str
    """What was done to keys and query rows before they were quantized."""
    perplexity: float
    """Of the model as it is."""
    formats: list[FormatResult]
    """One for each format."""


@contextlib.contextmanager
@checked_arguments
def quantized_indexers(
    model: torch.nn.Module, key_format: str, *, rotate: str = NONE
) -> Iterator[torch.nn.Module]:
    """Quantize the keys and query rows of a model's indexers where they are multiplied.

    Inside the block every forward pass of the model selects by scores of the format; nothing else
    of it changes. The model can be handed to any evaluation tool.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers with an indexer in it, not compiled.
    key_format : str
        Such as ``nvfp4``, ``nvfp4-mixed``, ``mxfp4`` or ``fp8``; ``bf16`` changes nothing in a
        model that computes in BF16.
    rotate : str
        ``"none"``, or ``"hadamard"`` to rotate both before they are quantized.

    Raises
    ------
    ValueError
        There is no such format or rotation, or it needs a calibration.
    UnsupportedError
        The model has no indexer, or one that is not known.
    """
    with _patched(model, format_replacement(key_format, rotate), lambda name, call: None):
        yield model


def format_replacement(name: str, rotate: str = NONE) -> Replacement:
    """What a format makes of query heads and keys, both float32 ``[..., 128]``.

    Raises
    ------
    ValueError
        There is no such format or rotation, or it needs a calibration.
    """
    found = key_format(name)
    if found.is_calibrated:
        raise InputError(f"must be formats without a calibration, got {name}", argument="formats")
    if rotate not in _ROTATIONS:
        raise InputError(f"must be one of {', '.join(_ROTATIONS)}, got {rotate}", argument="rotate")

    def replace(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if rotate == HADAMARD:
            query, keys = hadamard(query), hadamard(keys)
        stored = found.round_trip(keys.contiguous())
        if found.quantizes_query:
            query = found.round_trip(query.contiguous())
        return query, stored

    return replace


Seen = Callable[[str, IndexerCall], object]


@contextlib.contextmanager
def _patched(model: torch.nn.Module, replacement: Replacement | None, seen: Seen) -> Iterator[None]:
    """Have indexers score by a replacement, and tell what each call selected."""
    indexers = find_indexers(model)
    if not indexers:
        raise UnsupportedError(
            f"{type(model).__name__} has no indexer; known are {', '.join(KNOWN_CLASSES)}"
        )
    names = layer_names(list(indexers))
    with contextlib.ExitStack() as stack:
        for path, indexer in indexers.items():
            indexer.replacement = replacement
            stack.enter_context(_one_patched(indexer, names[path], seen))
        yield


@contextlib.contextmanager
def _one_patched(indexer: Indexer, name: str, seen: Seen) -> Iterator[None]:
    module, forward = indexer.module, indexer.module.forward

    @functools.wraps(forward)
    def patched(*args: Any, **kwargs: Any) -> Any:
        output, call = indexer.run(forward, args, kwargs)
        seen(name, call)
        return output

    module.forward = patched
    try:
        yield
    finally:
        del module.forward


@checked_arguments
def evaluate_model(
    model: str,
    texts: Sequence[str | Path],
    formats: Sequence[str],
    *,
    rotate: str = NONE,
    tokens: int | None = None,
    chunk: int = DEFAULT_CHUNK,
    revision: str | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Evaluation:
    """Compare what a model predicts with quantized indexers with what it predicts as it is.

    Each text is run in parts of `chunk` tokens, once for the model as it is and once for each
    format, each with a cache of its own.

    Parameters
    ----------
    model, texts, tokens, chunk, revision, device, progress
        As `capture_model`.
    formats : sequence of str
        As `quantized_indexers`.
    rotate : str
        As `quantized_indexers`.

    Raises
    ------
    ValueError, UnsupportedError
        As `capture_model` and `quantized_indexers`.
    """
    require_numbers(tokens=tokens, chunk=chunk)
    replacements = {name: format_replacement(name, rotate) for name in formats}
    contents = [read_text(Path(path)) for path in texts]
    if not contents:
        raise InputError("must be given, got none", argument="texts")
    network, tokenizer = load_model(model, revision, device)
    ids = [token_ids_of(tokenizer, path, text, tokens) for path, text, _ in contents]
    if all(len(each) < 2 for each in ids):
        raise InputError("must have two tokens at least, got one", argument="texts")
    results = [FormatResult(name) for name in replacements]
    plain = FormatResult("")
    done, total = 0, sum(map(len, ids))
    with quiet(), torch.no_grad():
        for each in ids:
            for passed in _compare_text(network, each, chunk, replacements, results, plain):
                done += passed
                if progress is not None:
                    progress(done, total)
    described = [
        CapturedText(path.name, digest, len(each))
        for (path, _, digest), each in zip(contents, ids, strict=True)
    ]
    kind = type(network).__name__
    return Evaluation(model, kind, described, rotate, plain.perplexity, results)


def _compare_text(
    network: Any,
    ids: Sequence[int],
    chunk: int,
    replacements: dict[str, Replacement],
    results: list[FormatResult],
    plain: FormatResult,
) -> Iterator[int]:
    caches: dict[str, Any] = dict.fromkeys(["", *replacements])
    rules = {
        layer_names(list(found))[path]: indexer.rule()
        for found in [find_indexers(network)]
        for path, indexer in found.items()
    }
    for start in range(0, len(ids), chunk):
        part = torch.tensor([ids[start : start + chunk]], dtype=torch.int64, device=network.device)
        following = torch.tensor(
            ids[start + 1 : start + chunk + 1], dtype=torch.int64, device=network.device
        )
        logs: torch.Tensor | None = None
        selections: dict[str, IndexerCall] = {}
        for name in caches:
            calls: dict[str, IndexerCall] = {}
            with _patched(network, replacements.get(name), calls.__setitem__):
                output = network(input_ids=part, past_key_values=caches[name], use_cache=True)
            caches[name] = output.past_key_values
            own = output.logits[0, : len(following)].float().log_softmax(-1)
            if logs is None:
                logs, selections = own, calls
                _add_loss(plain, own, following)
                continue
            result = next(each for each in results if each.format == name)
            _add_loss(result, own, following)
            divergences = (logs.exp() * (logs - own)).nan_to_num().sum(-1)
            if len(divergences):
                result.kl_sum += float(divergences.double().sum())
                result.kl_largest = max(result.kl_largest, float(divergences.max()))
                result.same_top += int((logs.argmax(-1) == own.argmax(-1)).sum())
            for layer, call in calls.items():
                rule = rules[layer]
                positions = torch.arange(
                    call.first,
                    call.first + call.query.shape[1],
                    dtype=torch.int64,
                    device=call.selected.device,
                )
                seen = -(-rule.visible(positions) // rule.block)
                kept, rows = _overlap(selections[layer].selected[0], call.selected[0], seen, rule.k)
                result.kept[layer] = result.kept.get(layer, 0.0) + kept
                result.rows[layer] = result.rows.get(layer, 0) + rows
        yield part.shape[1]


def _add_loss(result: FormatResult, logs: torch.Tensor, following: torch.Tensor) -> None:
    if len(following):
        result.loss_sum -= float(logs.gather(-1, following[:, None]).double().sum())
    result.tokens += len(following)


def _overlap(
    first: torch.Tensor, second: torch.Tensor, seen: torch.Tensor, k: int
) -> tuple[float, int]:
    """Sum over rows that see more than k of the share of choices in common, and their number."""
    rows = seen > k
    if not bool(rows.any()):
        return 0.0, 0
    most = int(seen.max())
    marks = []
    for each in (first, second):
        chosen = each[rows].reshape(int(rows.sum()), -1, each.shape[-1]).long()
        valid = (chosen >= 0) & (chosen < seen[rows][:, None, None])
        marks.append(
            torch.zeros(
                *chosen.shape[:2], most + 1, dtype=torch.bool, device=chosen.device
            ).scatter_(-1, chosen.where(valid, torch.full_like(chosen, most)), True)[..., :most]
        )
    both = (marks[0] & marks[1]).sum(-1) / marks[0].sum(-1).clamp(min=1)
    return float(both.double().mean(-1).sum()), int(rows.sum())
