"""What to deploy, from a study's results: one setting for all layers, or one for each layer.

Candidates are the NVFP4 formats, which are what caches are made of here, and FP8, which engines
hold. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sdsa_quant.errors import InputError

from .results import NO_TRANSFORM, SettingResult, Suggestions, _OfSetting

FP8, NVFP4, BF16 = "fp8", "nvfp4", "bf16"
BF16_BYTES = 256  # of a key that stays as it is


@dataclass(frozen=True, slots=True)
class Goal:
    """What every layer must reach."""

    k: int
    """Number of keys, or blocks, that are selected."""

    recall: float
    """Mean recall over the rows of the layer that are longer than k."""


@dataclass(frozen=True, slots=True)
class JudgedSetting(_OfSetting):
    """A setting with what it keeps over all layers and in its worst one."""

    format: str
    """Name of the format."""

    transform: str
    """Label of the transform, ``"none"`` without one."""

    bytes_per_key: int
    """Bytes that a stored key takes."""

    recall: float
    """Mean recall over all layers."""

    worst_layer: str
    """The layer of the least mean recall, the first of them."""

    worst_recall: float
    """Its mean recall."""


@dataclass(frozen=True, slots=True)
class LayerChoice(_OfSetting):
    """The smallest setting that reaches the goal in a layer."""

    layer: str
    """The layer."""

    format: str
    """Name of the format; ``"bf16"`` where nothing measured reaches the goal."""

    transform: str
    """Label of the transform, ``"none"`` without one."""

    bytes_per_key: int
    """Bytes that a stored key takes."""

    recall: float | None
    """Its mean recall in this layer; null if no row is longer than k."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a study says to deploy."""

    k: int | None
    """The k that it is about; null, and nothing else, where most rows are shorter than every k."""

    goal: Goal | None
    """What was asked of every layer; null if nothing was."""

    setting: JudgedSetting | None
    """The setting to take for all layers: with a goal the smallest that reaches it in every layer,
    or else the suggestion at the size of NVFP4; null if no candidate was measured."""

    reaches_goal: bool | None
    """Whether `setting` reaches the goal in every layer; null without a goal, or where no row is
    longer than its k."""

    fp8: JudgedSetting | None
    """FP8 beside it, without a transform where that was measured, as engines hold it."""

    by_layer: tuple[LayerChoice, ...]
    """The choice for each layer; empty without a goal, or where no row is longer than its k."""

    def key_bytes(self, setting: str) -> int:
        """Bytes of a token's keys in all layers: ``"chosen"`` by layer, ``"fp8"`` or ``"bf16"``."""
        each = {FP8: 132, BF16: BF16_BYTES}.get(setting)
        if each is not None:
            return each * len(self.by_layer)
        return sum(choice.bytes_per_key for choice in self.by_layer)


def judge(
    layers: Sequence[str],
    results: Sequence[SettingResult],
    top_k: Sequence[int],
    suggestions: Suggestions,
    goal: Goal | None,
) -> Verdict:
    """The verdict of a study.

    Parameters
    ----------
    layers : sequence of str
        Names of the layers.
    results : sequence of SettingResult
        Every setting over all layers and in each layer.
    top_k : sequence of int
        What was studied.
    suggestions : Suggestions
        What to take at each size.
    goal : Goal or None
        What every layer must reach.

    Raises
    ------
    InputError
        The goal's k is not among those studied.
    """
    if goal is not None and goal.k not in top_k:
        raise InputError(
            f"must be of a k that is studied, {', '.join(map(str, top_k))}, got {goal.k}",
            argument="goal",
        )
    k = goal.k if goal is not None else suggestions.k
    if k is None:
        return Verdict(None, None, None, None, None, ())
    table = _Recalls(layers, results, list(top_k).index(k))
    if goal is not None and not table.is_defined():  # every setting would reach it
        return Verdict(k, goal, None, None, None, ())
    candidates = [each for each in table.judged() if each.format.startswith((NVFP4, FP8))]
    fp8 = [each for each in candidates if each.format == FP8]
    setting = _suggested(candidates, suggestions)
    reaching = []
    if goal is not None:
        reaching = [each for each in candidates if each.worst_recall >= goal.recall]
        # The smallest; of these the one with the fewest transforms, then the best.
        reaching.sort(key=lambda each: (each.bytes_per_key, _steps(each), -each.recall))
        setting = reaching[0] if reaching else setting
    return Verdict(
        k=k,
        goal=goal,
        setting=setting,
        reaches_goal=None if goal is None else bool(reaching),
        fp8=next((each for each in fp8 if each.transform == NO_TRANSFORM), fp8[0] if fp8 else None),
        by_layer=() if goal is None else tuple(table.choices(goal)),
    )


def _suggested(
    candidates: Sequence[JudgedSetting], suggestions: Suggestions
) -> JudgedSetting | None:
    """The suggestion at the size of NVFP4, else at the smallest size."""
    for by_format in (NVFP4, FP8):
        for each in suggestions.by_size:
            for candidate in candidates:
                same = (candidate.format, candidate.transform) == (each.format, each.transform)
                if same and candidate.format.startswith(by_format):
                    return candidate
    return None


def _steps(setting: _OfSetting) -> int:
    """Transforms that a setting makes."""
    return 0 if setting.transform == NO_TRANSFORM else 1 + setting.transform.count("+")


class _Recalls:
    """Mean recall at one k, by setting and layer."""

    def __init__(self, layers: Sequence[str], results: Sequence[SettingResult], index: int) -> None:
        self._layers, self._index = layers, index
        self._overall = [each for each in results if each.layer is None]
        self._means = {
            (each.layer, each.format, each.transform): each.recall(index).mean for each in results
        }

    def is_defined(self) -> bool:
        """Whether any row is longer than k."""
        return any(mean is not None for mean in self._means.values())

    def judged(self) -> Iterator[JudgedSetting]:
        """Each setting that has a recall."""
        for each in self._overall:
            mean = each.recall(self._index).mean
            of_layers = [
                (recall, name)
                for name in self._layers
                if (recall := self._means[name, each.format, each.transform]) is not None
            ]
            if mean is None or not of_layers:
                continue
            least, worst = min(of_layers, key=lambda pair: pair[0])
            yield JudgedSetting(each.format, each.transform, each.bytes_per_key, mean, worst, least)

    def choices(self, goal: Goal) -> Iterator[LayerChoice]:
        """The choice for each layer; where no row can lose a key, the smallest plain setting."""
        candidates = [each for each in self._overall if each.format.startswith((NVFP4, FP8))]
        candidates.sort(key=lambda each: (each.bytes_per_key, _steps(each)))
        for layer in self._layers:
            found = LayerChoice(layer, BF16, NO_TRANSFORM, BF16_BYTES, 1.0)
            best: tuple[int, int, float] | None = None
            for each in candidates:
                recall = self._means[layer, each.format, each.transform]
                rank = (each.bytes_per_key, _steps(each), -(recall or 0.0))
                reaches = recall is None or recall >= goal.recall
                if reaches and (best is None or rank < best):
                    best = rank
                    found = LayerChoice(
                        layer, each.format, each.transform, each.bytes_per_key, recall
                    )
            yield found
