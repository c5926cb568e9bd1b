"""A study's answer in one sentence, the command that deploys it, and the choice by layer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from sdsa_cli.options import at_least_one
from sdsa_cli.output import table
from sdsa_cli.table_data import TableData
from sdsa_cli.text import counted, similarity, visible
from sdsa_quant.errors import InputError
from sdsa_quant.files.names import without_common_ends
from sdsa_quant.files.text import whole_number
from sdsa_quant.study.results import NO_TRANSFORM

if TYPE_CHECKING:
    from sdsa_quant.study.report import StudyReport
    from sdsa_quant.study.verdict import Goal, JudgedSetting

DEFAULT_BATCH, DEFAULT_CONTEXT = 32, 131_072
GoalOption = Annotated[
    str | None,
    typer.Option(
        "--goal",
        metavar="GOAL",
        help="What every layer must reach, such as recall@2048=0.98: says the smallest setting "
        "that does, and that of each layer.",
    ),
]
BatchOption = Annotated[
    int, typer.Option("--batch", metavar="N", help="Requests to count saved bytes for.")
]
ContextOption = Annotated[
    int, typer.Option("--context", metavar="N", help="Keys of each of these requests.")
]
MarkdownFlag = Annotated[
    bool, typer.Option("--markdown", help="Print the tables in Markdown, to paste.")
]
_GOAL = re.compile(r"recall@(?P<k>[0-9]{1,10})=(?P<recall>[0-9.]+)")
_RULES = {
    "nvfp4": (),
    "nvfp4-mixed": (),
    "nvfp4-4over6": ("--rule", "4over6"),
    "nvfp4-search": ("--rule", "search"),
    "nvfp4-search-mixed": ("--rule", "search"),
    "nvfp4-covariance": ("--rule", "covariance"),
    "nvfp4-covariance-mixed": ("--rule", "covariance"),
}
_STATISTICS_FILE = "statistics.safetensors"


@dataclass(frozen=True, slots=True)
class Serving:
    """What is to be served, for which bytes are counted."""

    batch: int = DEFAULT_BATCH
    context: int = DEFAULT_CONTEXT

    @classmethod
    def checked(cls, batch: int, context: int) -> Serving:
        """Refuse numbers below 1, by their flags."""
        at_least_one("--batch", batch)
        at_least_one("--context", context)
        return cls(batch, context)


def parse_goal(text: str, top_k: Sequence[int]) -> Goal:
    """A goal such as ``recall@2048=0.98``.

    Raises
    ------
    InputError
        The text is not a goal, or its k is not among `top_k`.
    """
    from sdsa_quant.study.verdict import Goal

    match = _GOAL.fullmatch(text)
    k = whole_number(match["k"]) if match else None
    try:
        recall = float(match["recall"]) if match else 0.0
    except ValueError:
        recall = 0.0
    if k is None or not 0 < recall <= 1:
        raise InputError(f"--goal must be like recall@2048=0.98, up to 1, got {text!r}")
    if k not in top_k:
        raise InputError(
            f"--goal {text}: k must be one of those studied, {', '.join(map(str, top_k))}, got {k}"
        )
    return Goal(k, recall)


def verdict_line(report: StudyReport) -> str:
    """The answer in one sentence."""
    verdict = report.verdict
    if verdict.k is None:
        return "No verdict: most rows are shorter than every k, and cannot miss a key."
    if verdict.goal is not None and not verdict.by_layer:
        what = "key" if report.inputs.block == 1 else "block"
        return (
            f"No choice: recall@{verdict.k:,} is undefined, no row is longer than "
            f"{counted(verdict.k, what)}."
        )
    if verdict.setting is None:
        return "No verdict: neither an NVFP4 format nor FP8 was studied."
    goal, setting, fp8 = verdict.goal, verdict.setting, verdict.fp8
    measure = f"recall@{verdict.k:,}"
    sentence = f"{_name(setting)} keeps {_figures(report, setting, measure)}"
    if fp8 is not None and fp8 != setting:
        sentence += f"; {_name(fp8)} keeps {_figures(report, fp8, measure)}"
    if goal is None:
        return f"Take {sentence}."
    asked = f"{measure} of {goal.recall:g}"
    if verdict.reaches_goal:
        return f"Goal met, {asked} in every layer: {sentence}."
    missing = sum(choice.format == "bf16" for choice in verdict.by_layer)
    layers = counted(len(verdict.by_layer), "layer")
    by_layer = (
        "a setting for each layer does"
        if not missing
        else f"nothing measured does in {missing} of {layers}"
    )
    return f"Goal missed, {asked} in every layer: {by_layer}; {sentence}."


def _name(setting: JudgedSetting) -> str:
    return f"{setting.label} ({setting.bytes_per_key} bytes a key)"


def _figures(report: StudyReport, setting: JudgedSetting, measure: str) -> str:
    text = f"{measure} {similarity(setting.recall)}"
    if len(report.layers) > 1:
        text += f", {similarity(setting.worst_recall)} in the worst layer, {setting.worst_layer}"
    return visible(text)


def command_line(report: StudyReport) -> str | None:
    """The command that builds the recommended cache; None where that is none of ours."""
    setting, inputs = report.verdict.setting, report.inputs
    if setting is None or setting.format not in _RULES or inputs.mean_pool > 1:
        return None
    words = ["sdsa", "quantize-cache", str(inputs.keys), "-o", _output(report)]
    pattern = inputs.keys_pattern
    if pattern is None and len(report.layers) > 1:
        pattern = without_common_ends([layer.name for layer in report.layers])[0]
    if pattern is not None:
        words += ["--keys", pattern]
    if inputs.lengths is not None:
        words += ["--lengths", inputs.lengths]
    words += _RULES[setting.format]
    if "covariance" in setting.format:
        words += ["--calibration", str(inputs.calibration or _STATISTICS_FILE)]
    choice = next(each for each in report.settings.transforms if each.label == setting.transform)
    for name in ("rotate", "gain", "center"):
        value = getattr(choice, name)
        if value != NO_TRANSFORM:
            words += [f"--{name}", value]
    return shlex.join(words)


def _output(report: StudyReport) -> str:
    return "caches/" if len(report.layers) > 1 else "cache.safetensors"


def command_lines(report: StudyReport) -> list[str]:
    """The command below the verdict, and what it needs first."""
    command = command_line(report)
    if command is None:
        return []
    lines = [f"Build it: {command}"]
    if _STATISTICS_FILE in command:
        inputs = report.inputs
        first = ["sdsa", "calibrate", str(inputs.keys), str(inputs.queries)]
        lines.insert(0, f"Take statistics: {shlex.join([*first, '-o', _STATISTICS_FILE])}")
    return lines


def choices_table(report: StudyReport) -> TableData | None:
    """The smallest setting that reaches the goal, layer by layer; None without a goal."""
    verdict = report.verdict
    if verdict.goal is None or not verdict.by_layer:
        return None
    title = f"Smallest setting with recall@{verdict.goal.k:,} of {verdict.goal.recall:g} by layer"
    result = table("layer", "setting", "bytes", "recall", title=title, text=("setting",))
    for choice in verdict.by_layer:
        result.add_row(
            choice.layer, choice.label, str(choice.bytes_per_key), similarity(choice.recall)
        )
    return result


def savings_lines(report: StudyReport, serving: Serving) -> list[str]:
    """What the choice by layer takes and saves, for so many requests of so many keys."""
    batch, context = serving.batch, serving.context
    verdict = report.verdict
    if not verdict.by_layer:
        return []
    sizes = {name: verdict.key_bytes(name) * batch * context for name in ("chosen", "fp8", "bf16")}
    layers = counted(len(verdict.by_layer), "layer")
    of = f"{counted(batch, 'request')} of {context:,} keys in {layers}"
    counts: dict[str, int] = {}
    for choice in verdict.by_layer:
        counts[choice.label] = counts.get(choice.label, 0) + 1
    chosen = ", ".join(f"{label} in {counted(count, 'layer')}" for label, count in counts.items())
    saved = sizes["fp8"] - sizes["chosen"]
    against = f"saves {_size(saved)} over FP8"
    if saved < 0:
        against = f"costs {_size(-saved)} more than FP8"
    return [
        f"Choice by layer: {chosen}. For {of}: {_size(sizes['chosen'])}, where FP8 takes "
        f"{_size(sizes['fp8'])} and BF16 {_size(sizes['bf16'])}; it {against}."
    ]


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
