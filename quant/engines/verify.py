"""Whether an engine selects what the model selects, and what it gets wrong if not.

A dump has an engine's selections for the rows of a capture, or its cache of a layer. Quantized keys
never select quite the same, so that an engine is right as long as it is no worse than the coarsest
format would be. If it is worse, every known mistake is tried on what was captured: the one whose
selection, or keys, come nearest to the engine's is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sdsa_quant.captures.names import INTEGER_DTYPES
from sdsa_quant.capturing.capture import FORMAT
from sdsa_quant.capturing.check import selection_scores
from sdsa_quant.capturing.rule import BLOCK_MAX, SelectionRule, rule_of
from sdsa_quant.errors import Hint, InputError
from sdsa_quant.files.safetensors_reader import header_metadata
from sdsa_quant.files.tensor_source import StoredTensor, TensorSource, open_tensors
from sdsa_quant.files.text import numbers_in, whole_number
from sdsa_quant.formats.key_formats import key_format
from sdsa_quant.formats.transforms import hadamard

from .dump import EngineCache
from .mistakes import HADAMARD, LAYERS_MIXED, MISTAKES, Captured, Change, Mistake

_AS_MODEL = "as the model"
_FORMATS = ("fp8", "mxfp4", "nvfp4")  # that an engine may hold keys in
_MOST_ROWS = 96  # of a layer, spread evenly
_SLACK = 1.5  # of what the coarsest format loses, that an engine may lose
_LEAST_SLACK = 0.02
_RIGHT_ERROR = 0.2  # of decoded keys; NVFP4 has 0.095, MXFP4 0.12
# A mistake is named where it explains more than anything harmless does, by so much; the smaller one
# where it explains all but 3 %.
_CLEAR, _CLEARER, _NEARLY_ALL = 0.02, 0.05, 0.97


@dataclass(frozen=True, slots=True)
class Tried:
    """How near one explanation comes."""

    name: str
    """Name of a mistake; ``as the model``, or a format."""
    text: str
    """What the engine would do."""
    share: float
    """Mean share of the engine's selection that it explains, or of its keys' length that it does
    not leave as an error, at least 0."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found of one layer."""

    layer: str
    """Layer of the capture."""
    tensor: str
    """Tensor of the dump."""
    rows: int
    """Query rows, or keys, that were compared."""
    share: float
    """Mean share of what the model selects that the engine selects, or, of a cache, 1 less the
    median relative error of its keys."""
    needed: float
    """The share from which on an engine is right."""
    is_right: bool
    """Whether it is."""
    mistake: str | None
    """The mistake that explains the engine; null if it is right, or no known one does."""
    text: str | None
    """What the engine does, as a sentence."""
    tried: tuple[Tried, ...]
    """Every explanation, the nearest first."""


class CapturedLayerFile:
    """A layer of a capture, to read.

    Parameters
    ----------
    source : TensorSource
        The capture.
    name : str
        The layer, such as ``layers.3``.
    """

    def __init__(self, source: TensorSource, name: str) -> None:
        self.name = name
        self._source = source
        metadata = header_metadata(source[f"{name}.keys"].path)
        if metadata.get("format") != FORMAT:
            raise InputError("is not a capture of sdsa capture", source=source[f"{name}.keys"].path)
        self.rule: SelectionRule = rule_of(metadata, source.path)
        style, _, start = metadata.get("rope", "").partition(":")
        self._style, self._start = style, whole_number(start) or 0
        self.lengths: list[int] = self.read("lengths").tolist()
        self.requests, self.positions = self.read("requests").long(), self.read("positions").long()
        self.selected = self.read("selected").long()

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the layer."""
        return self._source.read(f"{self.name}.{name}")

    def has(self, name: str) -> bool:
        """Whether the layer has such a tensor."""
        return f"{self.name}.{name}" in self._source

    def keys_of(self, request: int) -> slice:
        """Where the keys of a request are."""
        first = sum(self.lengths[:request])
        return slice(first, first + self.lengths[request])

    def request(self, request: int, rows: torch.Tensor) -> Captured:
        """Keys of a request and some of its rows, by their numbers in the file."""
        where = self.keys_of(request)
        weights = self.read("weights")[rows].float() if self.has("weights") else None
        return Captured(
            self.read("keys")[where].float(),
            self.read("queries")[rows].float(),
            weights,
            self.positions[rows],
            self.rule.pool,
            has_relu=self.rule.score != BLOCK_MAX,
            rope=self.read("rope") if self.has("rope") else None,
            rope_style=self._style,
            rope_start=self._start,
            norms=self.read("norms")[where] if self.has("norms") else None,
            norm=self.read("norm").view(2, -1) if self.has("norm") else None,
        )


def open_capture(path: str | Path) -> dict[str, CapturedLayerFile]:
    """The layers of a capture by name.

    Raises
    ------
    ValueError
        It is not a capture of an indexer.
    """
    source = open_tensors(path)
    names = [each.name.removesuffix(".keys") for each in source if each.name.endswith(".keys")]
    if not names or any(f"{name}.selected" not in source for name in names):
        raise InputError("has no layers with a selection, as sdsa_capture writes them", source=path)
    return {name: CapturedLayerFile(source, name) for name in names}


def verify_selection(dump: str | Path, capture: str | Path) -> list[Verdict]:
    """Compare an engine's selections with those of a capture's model.

    Parameters
    ----------
    dump : str or Path
        A safetensors file, a folder or an index with a tensor of integers for each layer, matched
        by the numbers in its name: ``[rows, k]`` (``[rows, heads, k]`` where heads select blocks),
        rows as in the capture or one for each token of all texts. What is negative or beyond what
        a row sees is no choice.
    capture : str or Path
        A folder of `sdsa_capture`.

    Raises
    ------
    ValueError
        A file cannot be read, tensors do not match the capture's layers or rows, or no row sees
        more than it selects.
    """
    layers, source = open_capture(capture), open_tensors(dump)
    pairs = _pairs(source, list(layers), dump)
    verdicts = []
    for name, tensor in pairs:
        layer = layers[name]
        engine = _of_rows(layer, source.read(tensor.name).long(), tensor, dump)
        verdicts.append(_verdict(layer, engine, tensor.name, layers))
    return verdicts


def _pairs(
    source: TensorSource, names: list[str], dump: str | Path
) -> list[tuple[str, StoredTensor]]:
    """Each layer of the capture that the dump has a selection of, and its tensor."""
    tensors = [
        each for each in source if each.dtype in INTEGER_DTYPES and len(each.shape) in (2, 3)
    ]
    if len(tensors) == len(names) == 1:
        return [(names[0], tensors[0])]
    pairs = []
    for name in names:
        found = [each for each in tensors if numbers_in(each.name) == numbers_in(name)]
        if len(found) > 1:
            raise InputError(
                f"{found[0].name} and {found[1].name} both have the numbers of {name}", source=dump
            )
        pairs += [(name, found[0])] if found else []
    if not pairs:
        raise InputError(
            f"no tensor of integers [rows, k] has the numbers of a layer of the capture "
            f"({names[0]}); {source.describe_names()}",
            source=dump,
        )
    return pairs


def _of_rows(
    layer: CapturedLayerFile, engine: torch.Tensor, tensor: StoredTensor, dump: str | Path
) -> torch.Tensor:
    """The engine's selections of the capture's rows."""
    if engine.dim() != layer.selected.dim():
        raise InputError(
            f"tensor {tensor.name} must have {layer.selected.dim()} dimensions, as the selections "
            f"of {layer.name}, got {list(engine.shape)}",
            source=dump,
        )
    if engine.shape[0] == layer.selected.shape[0]:
        return engine
    counts = layer.lengths
    if layer.rule.pool > 1:  # keys are not tokens; the last token of a text keeps its row
        of = [layer.positions[layer.requests == each] for each in range(len(layer.lengths))]
        counts = [int(each.max()) + 1 if len(each) else 0 for each in of]
    if engine.shape[0] != sum(counts):
        raise InputError(
            f"tensor {tensor.name} must have {layer.selected.shape[0]} rows, those of "
            f"{layer.name}, or one for each of its {sum(counts)} tokens, got {engine.shape[0]}",
            source=dump,
        )
    starts = torch.tensor(
        [sum(counts[:request]) for request in range(len(counts))], dtype=torch.int64, device="cpu"
    )
    return engine[starts[layer.requests] + layer.positions]


def _sampled(layer: CapturedLayerFile) -> torch.Tensor:
    """Some of the rows that see more than they select, spread evenly."""
    seen = -(-layer.rule.visible(layer.positions) // layer.rule.block)
    rows = (seen > layer.rule.k).nonzero().flatten()
    if not len(rows):
        raise InputError(
            f"no row of {layer.name} sees more than the {layer.rule.k} that it selects, so that "
            f"every engine would be right: capture longer texts"
        )
    picked = torch.linspace(
        0, len(rows) - 1, min(_MOST_ROWS, len(rows)), dtype=torch.float64, device="cpu"
    )
    return rows[picked.round().long().unique()]


def _verdict(
    layer: CapturedLayerFile,
    engine: torch.Tensor,
    tensor: str,
    layers: dict[str, CapturedLayerFile],
) -> Verdict:
    rows = _sampled(layer)
    model = _choices(layer, layer.selected[rows], rows)
    chosen = _choices(layer, engine[rows], rows)
    share = _share(chosen, model)
    harmless = [Tried(_AS_MODEL, "selects what the model selects", share)]
    coarsest = 1.0
    for name in _FORMATS:
        for queries_too in (True, False):
            made = _selected(layer, rows, _round_trip(name, queries_too))
            coarsest = min(coarsest, _share(made, model))
            text = f"holds keys in {name}" + (", and query rows too" if queries_too else "")
            harmless.append(Tried(name, text, _share(chosen, made)))
    mistakes = []
    for mistake in MISTAKES:
        # As it is, and with keys in FP8, which most engines hold.
        both = [_selected(layer, rows, each) for each in (mistake, _then_fp8(mistake))]
        if both[0] is not None:
            nearest = max(_share(chosen, made) for made in both)
            mistakes.append(Tried(mistake.name, mistake.text, nearest))
    for name, other in layers.items():
        if name != layer.name and other.selected.shape == layer.selected.shape:
            text = f"selects for {layer.name} what the model selects in {name}"
            made = _choices(layer, other.selected[rows], rows)
            mistakes.append(Tried(LAYERS_MIXED, text, _share(chosen, made)))
    needed = 1 - max(_SLACK * (1 - coarsest), _LEAST_SLACK)
    return _decided(layer.name, tensor, len(rows), share, needed, harmless, mistakes)


def _decided(
    layer: str,
    tensor: str,
    rows: int,
    share: float,
    needed: float,
    harmless: list[Tried],
    mistakes: list[Tried],
) -> Verdict:
    """The verdict: a mistake where one explains clearly more than all that is harmless does."""
    most = max(each.share for each in harmless)
    best = max(mistakes, key=lambda each: each.share)
    named = best.share >= most + (_CLEAR if best.share >= _NEARLY_ALL else _CLEARER)
    return Verdict(
        layer,
        tensor,
        rows,
        share,
        needed,
        share >= needed and not named,
        best.name if named else None,
        best.text if named else None,
        tuple(sorted([*harmless, *mistakes], key=lambda each: -each.share)),
    )


def _round_trip(name: str, queries_too: bool) -> Mistake:
    """A format of keys, and of query rows, as a change of them."""
    found = key_format(name)

    def change(captured: Captured) -> Captured:
        query = found.round_trip(captured.query) if queries_too else captured.query
        return replace(captured, keys=found.round_trip(captured.keys), query=query)

    return Mistake(name, f"holds keys in {name}", change)


def _then_fp8(mistake: Mistake) -> Mistake:
    """A mistake that is made with keys in FP8."""

    def change(captured: Captured) -> Captured | None:
        made = mistake.change(captured)
        if made is None:
            return None
        return replace(made, keys=key_format("fp8").round_trip(made.keys))

    return replace(mistake, change=change)


def _choices(layer: CapturedLayerFile, selected: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Choices that a row sees, ascending, -1 for others: int64 ``[rows, 1 or heads, k]``."""
    seen = -(-layer.rule.visible(layer.positions[rows]) // layer.rule.block)
    chosen = selected.reshape(len(rows), -1, selected.shape[-1])
    return chosen.masked_fill((chosen < 0) | (chosen >= seen[:, None, None]), -1)


def _selected(
    layer: CapturedLayerFile, rows: torch.Tensor, mistake: Mistake
) -> torch.Tensor | None:
    """What rows would select under a mistake, as `_choices`; None where it does not apply."""
    parts = []
    for request in layer.requests[rows].unique().tolist():
        some = rows[layer.requests[rows] == request]
        captured = mistake.change(layer.request(request, some))
        if captured is None:
            return None
        lengths = layer.rule.visible(captured.positions)
        parts.append(_best(layer.rule, captured, lengths))
    return torch.cat(parts)


def _best(rule: SelectionRule, captured: Captured, lengths: torch.Tensor) -> torch.Tensor:
    query, weights = captured.query, captured.weights
    if not captured.has_relu and rule.score != BLOCK_MAX:
        # Without ReLUs the heads are one; two of opposite signs give it back from a sum of them.
        one = query if weights is None else query * weights[..., None]
        total = one.sum(1, keepdim=True)
        query = torch.cat([total, -total], 1)
        weights = torch.tensor([[1.0, -1.0]], dtype=torch.float32, device="cpu").expand(
            len(query), 2
        )
    scores = selection_scores(rule, query, captured.keys, weights, lengths)
    return scores.topk(min(rule.k, scores.shape[-1]), -1).indices


def _share(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    """Mean share of the choices of `second` that `first` has too."""
    if first is None or second is None:
        return 0.0
    most = int(max(first.max(), second.max())) + 2
    marks = [
        torch.zeros(*each.shape[:2], most, dtype=torch.bool, device="cpu").scatter_(
            -1, each.where(each >= 0, torch.full_like(each, most - 1)), True
        )[..., :-1]
        for each in (first, second)
    ]
    both, of = (marks[0] & marks[1]).sum(-1), marks[1].sum(-1).clamp(min=1)
    return float((both / of).double().mean())


def verify_cache(cache: EngineCache, capture: str | Path, layer: str | None = None) -> Verdict:
    """Compare the keys of an engine's cache with those of a capture.

    Keys that are rotated by the Hadamard matrix are right as long as the query rows are rotated
    too, which a cache does not show.

    Parameters
    ----------
    cache : EngineCache
        A dump of one layer's cache with the texts of the capture for its requests, in their order.
    capture : str or Path
        A folder of `sdsa_capture`.
    layer : str, optional
        The layer that the dump is of; may be left out where the capture has one.

    Raises
    ------
    ValueError
        There is no such layer, or the dump's requests are not the capture's.
    """
    layers = open_capture(capture)
    if layer is None and len(layers) == 1:
        layer = next(iter(layers))
    if layer is None or layer not in layers:
        raise InputError(
            f"must be one of {', '.join(layers)}, got {layer!r}",
            argument="layer",
            hint=None if layer else Hint("layer", "to name the layer of the cache"),
        )
    own = layers[layer]
    if list(cache.context_lengths) != own.lengths:
        raise InputError(
            f"must have the requests of {layer}, {own.lengths} keys, got "
            f"{list(cache.context_lengths)}",
            source=cache.path,
        )
    held = [cache.keys(request) for request in range(len(own.lengths))]
    rotated = [hadamard(keys) for keys in held]
    harmless = [
        Tried(_AS_MODEL, "holds the keys of the model", _nearness(held, own, _unchanged)),
        Tried(
            "as the model, rotated",
            "holds the model's keys rotated by the Hadamard matrix",
            _nearness(rotated, own, _unchanged),
        ),
    ]
    share = max(each.share for each in harmless)
    mistakes = []
    for mistake in MISTAKES:
        if mistake.of_keys and mistake is not HADAMARD:
            nearest = max(_nearness(each, own, mistake.change) for each in (held, rotated))
            mistakes.append(Tried(mistake.name, mistake.text, nearest))
    for name, other in layers.items():
        if name != layer and other.lengths == own.lengths:
            text = f"holds for {layer} the keys of {name}"
            nearest = max(_nearness(each, other, _unchanged) for each in (held, rotated))
            mistakes.append(Tried(LAYERS_MIXED, text, nearest))
    keys = sum(own.lengths)
    return _decided(layer, cache.name, keys, share, 1 - _RIGHT_ERROR, harmless, mistakes)


def _unchanged(captured: Captured) -> Captured:
    return captured


def _nearness(held: Sequence[torch.Tensor], layer: CapturedLayerFile, change: Change) -> float:
    """1 less the median relative error of the keys held, at least 0."""
    errors, nobody = [], torch.zeros(0, dtype=torch.int64, device="cpu")
    for request, keys in enumerate(held):
        if not len(keys):
            continue
        made = change(layer.request(request, nobody))
        if made is None:
            return 0.0
        length = made.keys.norm(dim=-1).clamp(min=1e-30)
        errors.append((keys - made.keys).norm(dim=-1) / length)
    return max(0.0, 1 - float(torch.cat(errors).median())) if errors else 0.0
