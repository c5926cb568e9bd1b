"""What a terminal shows of a study: recall first, then layers, blocks and what to take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sdsa_cli.output import fields_table, table
from sdsa_cli.table_data import TableData
from sdsa_cli.text import counted, error_size, percent, similarity, ties_decide
from sdsa_quant.layout import HIGH_QUERY_ERROR, PACKED_DIM, SCALES_PER_KEY
from sdsa_quant.study.inputs import BLOCK_MAX, ROWS

from .verdict import Serving, choices_table, command_lines, savings_lines, verdict_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sdsa_quant.study.report import StudyReport
    from sdsa_quant.study.results import SettingResult, Suggestion


_LEADING = PACKED_DIM + SCALES_PER_KEY  # bytes of the keys whose setting orders the layers
_MANY_BLOCKS = 0.1  # of all, from which their loss is said in words
_LAYERS_SHOWN = 3  # at each end of the table of layers


def verdict_lines(report: StudyReport, serving: Serving) -> list[str]:
    """The answer, the command that deploys it, and what the choice by layer saves."""
    return [verdict_line(report), *command_lines(report), *savings_lines(report, serving)]


def study_tables(report: StudyReport, serving: Serving) -> list[RenderableType]:
    """Tables and lines in the order to print them."""
    choices = choices_table(report)
    parts: list[RenderableType] = [*verdict_lines(report, serving), ""]
    if choices is not None:
        parts += [choices, ""]
    parts += [fields_table(summary_fields(report)), "", recall_table(report)]
    parts += [
        *worst_row_lines(report),
        *range_lines(report),
        *chance_lines(report),
        *query_lines(report),
        *tie_lines(report),
        *transform_lines(report),
    ]
    if len(report.layers) > 1:
        parts += ["", layers_table(report, whole=False), *layers_lines(report)]
    parts += ["", errors_table(report), "", blocks_table(report)]
    return [*parts, "", *suggestion_lines(report)]


def summary_fields(report: StudyReport) -> dict[str, str]:
    """Sizes, and rows that are left out."""
    layers, first = report.layers, report.overall[0].accuracy
    fields = {
        "layers": f"{len(layers)}, {sum(layer.keys for layer in layers):,} keys of "
        f"{counted(sum(layer.requests for layer in layers), 'request')}",
        "query rows": f"{first.rows:,}, {first.rows_measured:,} measured"
        + (", causal" if report.inputs.causal else ""),
        "settings": f"{counted(len(report.formats), 'format')} x "
        f"{counted(len(report.transforms), 'transform')}",
    }
    selects = _selects(report)
    if selects:
        fields["selects"] = selects
    if report.inputs.requests is None and any(layer.requests > 1 for layer in layers):
        fields["requests"] = "assumed: query rows spread evenly over them, in order"
    if first.rows_empty:
        fields["left out"] = f"{first.rows_empty:,} rows of length 0"
    if report.rows_invalid:
        fields["INVALID"] = f"{report.rows_invalid:,} rows with scores that are not finite"
    if report.rows_constant:
        fields["CONSTANT"] = (
            f"{report.rows_constant:,} rows with one baseline score for all of their keys"
        )
    return fields


def _selects(report: StudyReport) -> str:
    """What is ranked and selected, where that is not keys by single query rows."""
    inputs = report.inputs
    words = [
        "" if inputs.score == ROWS else f"score {inputs.score}",
        f"blocks of {counted(inputs.block, 'key')}" if inputs.block > 1 else "",
        f"{counted(inputs.local_blocks, 'local block')} always" if inputs.local_blocks else "",
        f"means of {inputs.mean_pool} keys" if inputs.mean_pool > 1 else "",
    ]
    return ", ".join(word for word in words if word)


def recall_table(report: StudyReport) -> TableData:
    """Mean and worst recall over all layers, by transform and format."""
    top_k = report.settings.top_k
    headings = [heading for k in top_k for heading in (f"@{k:,}", "p1")]
    title = (
        "Recall of the unquantized keys' top-k over all layers, rows longer than k: mean and "
        "worst 1 %"
    )
    result = table("", "bytes", *headings, title=title)
    result.follows = ("p1",)
    for transform, results in _by_transform(report):
        result.add_heading(transform)
        for each in results:
            recalls = [each.recall(index) for index in range(len(top_k))]
            result.add_row(
                f"  {each.format}",
                str(each.bytes_per_key),
                *(similarity(cell) for recall in recalls for cell in (recall.mean, recall.p1)),
            )
    result.add_heading("by chance")
    first = report.overall[0].accuracy.top_k
    cells = [cell for of_k in first for cell in (similarity(of_k.chance), "")]
    result.add_row("", "", *cells)
    result.add_heading("rows longer than k")
    result.add_row("", "", *(cell for of_k in first for cell in (f"{of_k.recall.rows:,}", "")))
    return result


def tie_lines(report: StudyReport) -> list[str]:
    """One line for each k whose recall ties decide in some rows."""
    return [
        f"At k = {of_k.k:,}: {ties_decide(of_k.rows_decided_by_ties, of_k.most_ties_left_out)}"
        for of_k in report.overall[0].accuracy.top_k
        if of_k.rows_decided_by_ties
    ]


def _by_transform(report: StudyReport) -> Iterator[tuple[str, list[SettingResult]]]:
    """A heading for each transform, and its results over all layers."""
    for transform in report.transforms:
        heading = "no transform" if transform == "none" else transform
        results = report.overall
        yield heading, [result for result in results if result.transform == transform]


def range_lines(report: StudyReport) -> list[str]:
    """One line for each transform whose keys are out of NVFP4's range, and what helps."""
    lines = []
    for each in report.blocks:
        profile = each.profile
        if each.layer is not None or not profile.blocks:
            continue
        name = "no transform" if each.transform == "none" else each.transform
        shares = {"saturate": profile.saturated, "are flushed to zero": profile.flushed}
        for what, count in shares.items():
            if count > _MANY_BLOCKS * profile.blocks:
                lines.append(
                    f"OUT OF RANGE: with {name}, {percent(count / profile.blocks)} of NVFP4's "
                    f"blocks {what}; a gain would help (--gain auto)."
                )
    return lines


def chance_lines(report: StudyReport) -> list[str]:
    """One line for each setting that chooses no better than chance somewhere."""
    lines = []
    top_k = report.settings.top_k
    for result in report.overall:
        for index, k in enumerate(top_k):
            layers = [
                each.layer
                for each in report.by_layer(result.format, result.transform)
                if each.no_better_than_chance[index]
            ]
            if layers:
                where = "every layer" if len(layers) == len(report.layers) else layers[0]
                more = f" and {len(layers) - 1} more" if where == layers[0] and layers[1:] else ""
                lines.append(f"NO BETTER THAN CHANCE: {result.label} at k = {k:,} in {where}{more}")
    return lines


def query_lines(report: StudyReport) -> list[str]:
    """One line for each setting that loses query rows."""
    lines = []
    for result in report.overall:
        if not result.query_rows_lost:
            continue
        profile = next(
            each.query_profile
            for each in report.blocks
            if each.layer is None and each.transform == result.transform
        )
        blocks = profile.blocks or float("nan")
        lines.append(
            f"QUERY ROWS LOST: {result.label} loses more than {HIGH_QUERY_ERROR} of the norm of "
            f"{result.query_rows_lost:,} of {counted(result.accuracy.rows, 'query row')} (as "
            f"NVFP4 {percent(profile.flushed / blocks)} of their blocks are flushed to zero, "
            f"{percent(profile.saturated / blocks)} saturated). BF16 query rows keep them, and so "
            f"do rows multiplied by a power of two, which changes no ranking."
        )
    return lines


def transform_lines(report: StudyReport) -> list[str]:
    """What this study's transforms leave as it is, whatever the keys."""
    choices = report.settings.transforms
    lines = []
    if any(choice.center != "none" for choice in choices):
        lines.append(
            "center moves all scores of a row by the same amount: this alone changes no ranking."
        )
    if any(choice.gain != "none" for choice in choices):
        lines.append("gain multiplies all scores by a power of two: this alone changes no ranking.")
    return lines


def _layers_settings(report: StudyReport) -> list[SettingResult]:
    """What the table of layers has columns of: what to take at each size, then what is plain.

    NVFP4's size first, which the others are compared with.
    """
    suggested = sorted(report.suggestions.by_size, key=lambda each: each.bytes_per_key != _LEADING)
    labels = [each.label for each in suggested]
    plain = [each.label for each in report.overall if each.transform == "none"]
    labels = list(dict.fromkeys([*labels, *(plain or [report.overall[0].label])]))
    by_label = {each.label: each for each in report.overall}
    return [by_label[label] for label in labels]


def leading_setting(report: StudyReport) -> SettingResult:
    """The setting over all layers that layers are ordered by and drawn with: the one to take.

    Not that of unquantized keys, while there is another.
    """
    settings = _layers_settings(report)
    return next((each for each in settings if each.format != "bf16"), settings[0])


def layers_table(report: StudyReport, *, whole: bool) -> TableData:
    """Mean recall by layer, in the order of the leading setting, worst first.

    Parameters
    ----------
    report : StudyReport
        The study.
    whole : bool
        Whether to show every layer, or of many only the worst and the best.
    """
    k_index = report.leading_index
    k = report.settings.top_k[k_index]
    columns = _layers_settings(report)
    title = f"Mean recall@{k:,} by layer, worst layers first, by {leading_setting(report).label}"
    result = table("layer", *(each.label for each in columns), title=title, shortens="layer")
    layers = _ordered_layers(report)
    for name in layers if whole else _both_ends(layers):
        if name is None:
            result.add_row(*["..."] * (len(columns) + 1))
            continue
        means = {each.label: each.recall(k_index).mean for each in report.of_layer(name)}
        result.add_row(name, *(similarity(means[each.label]) for each in columns))
    return result


def layers_lines(report: StudyReport) -> list[str]:
    """What the shortened table of layers leaves out."""
    left_out = len(report.layers) - 2 * _LAYERS_SHOWN
    if left_out < 2:
        return []
    return [f"{left_out} of {len(report.layers)} layers left out; the page and the CSV have all."]


def _ordered_layers(report: StudyReport) -> list[str]:
    """Layers by their mean recall in the leading setting, worst first, undefined ones last."""
    k_index, label = report.leading_index, leading_setting(report).label
    means = {
        each.layer: math.inf if (mean := each.recall(k_index).mean) is None else mean
        for each in report.results
        if each.label == label
    }
    return sorted((layer.name for layer in report.layers), key=lambda name: means[name])


def _both_ends(layers: Sequence[str]) -> list[str | None]:
    if len(layers) <= 2 * _LAYERS_SHOWN + 1:
        return list(layers)
    return [*layers[:_LAYERS_SHOWN], None, *layers[-_LAYERS_SHOWN:]]


def worst_row_lines(report: StudyReport) -> list[str]:
    """Where the row with the least recall is, for the first setting and each k."""
    result = report.overall[0]
    lines = []
    for index, k in enumerate(report.settings.top_k):
        worst = result.recall(index).worst
        if worst is not None and worst.value < 1:
            lines.append(
                f"Worst row of {result.label}, recall@{k:,} "
                f"{similarity(worst.value)}: {result.worst_layers[index]}, request "
                f"{worst.request}, {_row_name(report, result.worst_layers[index], worst.row)}, "
                f"{counted(worst.length, 'block' if report.inputs.block > 1 else 'key')}"
            )
    return lines


def _row_name(report: StudyReport, layer: str | None, row: int) -> str:
    """A row by its number; where heads rank by themselves, by its query row and head."""
    heads = next((each.heads for each in report.layers if each.name == layer), None)
    if report.inputs.score != BLOCK_MAX or not heads:
        return f"row {row}"
    return f"row {row // heads}, head {row % heads}"


def errors_table(report: StudyReport) -> TableData:
    """Errors of keys and scores over all layers, by transform and format."""
    k_index = report.leading_index
    k = report.settings.top_k[k_index]
    title = "Relative L2 error of keys, and measures of the scores, over all layers"
    headings = ("key L2", "score L2", "cosine", "Spearman", f"mass@{k:,}")
    result = table("", *headings, title=title)
    for transform, results in _by_transform(report):
        result.add_heading(transform)
        for each in results:
            accuracy = each.accuracy
            result.add_row(
                f"  {each.format}",
                error_size(each.key_error),
                error_size(accuracy.relative_l2.mean),
                similarity(accuracy.cosine.mean),
                similarity(accuracy.spearman.mean),
                similarity(accuracy.top_k[k_index].mass.mean),
            )
    return result


def blocks_table(report: StudyReport) -> TableData:
    """How the keys of all layers fall into NVFP4 blocks, by transform."""
    title = "Blocks of 16 values, as NVFP4 scales them; outlier: amax > 8 x median"
    result = table("", "gain", "flushed", "subnormal", "saturated", "outliers", title=title)
    for each in report.blocks:
        if each.layer is None:
            profile = each.profile
            blocks = profile.blocks or float("nan")
            result.add_row(
                "no transform" if each.transform == "none" else each.transform,
                "by layer" if each.gain is None else f"{each.gain:g}",
                percent(profile.flushed / blocks),
                percent(profile.subnormal / blocks),
                percent(profile.saturated / blocks),
                percent(profile.outliers / blocks),
            )
    return result


def suggestion_lines(report: StudyReport) -> list[str]:
    """What to take at each size of a key, and the evidence."""
    k, sizes = report.suggestions.k, report.suggestions.by_size
    if k is None:
        return ["No suggestion: most rows are shorter than every k, and cannot miss a key."]
    return [suggestion_line(each, k) for each in sizes]


def suggestion_line(suggestion: Suggestion, k: int) -> str:
    """One size's suggestion in a sentence."""
    line = (
        f"At {suggestion.bytes_per_key} bytes a key: {suggestion.label}, mean "
        f"recall@{k:,} {similarity(suggestion.recall)} of the rows with more keys than that"
    )
    evidence = suggestion.evidence
    if suggestion.candidates == 1:
        return f"{line}; the only setting measured at this size."
    if evidence is None:
        return f"{line}; nothing measured at this size is clearly better."
    gain = evidence.gain
    error = ""
    if gain.standard_error is not None:
        over = counted(gain.requests, "request") if gain.requests > 1 else "rows of one request"
        error = f" ± {gain.standard_error:.4f} (standard error over {over})"
    return (
        f"{line}; {gain.mean:+.4f}{error} against "
        f"{evidence.plain.label}, better in {gain.rows_better:,} and worse in {gain.rows_worse:,} "
        f"of {gain.rows:,} rows, better in {evidence.layers_better} and worse in "
        f"{evidence.layers_worse} layers."
    )
