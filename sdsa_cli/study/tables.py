"""What a terminal shows of a study: recall first, then layers, blocks and what to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sdsa_cli.output import fields_table, table
from sdsa_cli.text import counted, error_size, percent, similarity

from .document import (
    Document,
    formats,
    layer_results,
    leading_k,
    overall_results,
    recall_of,
    results_of,
    setting_label,
    transforms,
)

_FIRST_COLUMN = 14  # characters: the longest name of a format, set in by two
_LAYERS_SHOWN = 3  # at each end of the table of layers


def study_tables(document: Document) -> list[Any]:
    """Tables and lines in the order to print them."""
    parts: list[Any] = [fields_table(summary_fields(document)), "", recall_table(document)]
    parts += [
        *worst_row_lines(document),
        *chance_lines(document),
        *transform_lines(document),
    ]
    if len(document["layers"]) > 1:
        parts += ["", layers_table(document)]
    parts += ["", errors_table(document), "", blocks_table(document)]
    return [*parts, "", *suggestion_lines(document)]


def summary_fields(document: Document) -> dict[str, str]:
    """Sizes, and rows that are left out."""
    layers, first = document["layers"], overall_results(document)[0]["accuracy"]
    fields = {
        "layers": f"{len(layers)}, {sum(layer['keys'] for layer in layers):,} keys of "
        f"{counted(sum(layer['requests'] for layer in layers), 'request')}",
        "query rows": f"{first['rows']:,}, {first['rows_measured']:,} measured"
        + (", causal" if document["inputs"]["causal"] else ""),
        "settings": f"{counted(len(formats(document)), 'format')} x "
        f"{counted(len(transforms(document)), 'transform')}",
    }
    if first["rows_empty"]:
        fields["left out"] = f"{first['rows_empty']:,} rows of length 0"
    if document["rows_invalid"]:
        fields["INVALID"] = f"{document['rows_invalid']:,} rows with scores that are not finite"
    return fields


def recall_table(document: Document) -> Any:
    """Mean and worst recall over all layers, by transform and format."""
    top_k = document["settings"]["top_k"]
    headings = [heading for k in top_k for heading in (f"@{k:,}", "p1")]
    title = "Recall of the unquantized keys' top-k over all layers, mean and worst 1 %"
    result = _narrow_table(title, "", "bytes", *headings)
    for transform, results in _by_transform(document):
        _add_heading(result, transform)
        for each in results:
            recalls = [recall_of(each, index) for index in range(len(top_k))]
            result.add_row(
                f"  {each['format']}",
                str(each["bytes_per_key"]),
                *(similarity(recall[name]) for recall in recalls for name in ("mean", "p1")),
            )
    _add_heading(result, "by chance")
    first = overall_results(document)[0]["accuracy"]["top_k"]
    cells = [cell for of_k in first for cell in (similarity(of_k["chance"]), "")]
    result.add_row("", "", *cells)
    return result


def _narrow_table(title: str, *headings: str) -> Any:
    """A table that fits 80 columns by breaking the lines of its first column only."""
    result = table(*headings, title=title)
    result.min_width = len(title)  # else a narrow table breaks the line of its title
    result.columns[0].min_width = _FIRST_COLUMN
    for column in result.columns[1:]:
        column.no_wrap = True
    return result


def _by_transform(document: Document) -> Iterator[tuple[str, list[Document]]]:
    """A heading for each transform, and its results over all layers."""
    for transform in transforms(document):
        heading = "no transform" if transform == "none" else transform
        results = overall_results(document)
        yield heading, [result for result in results if result["transform"] == transform]


def _add_heading(result: Any, text: str) -> None:
    result.add_row(text, *[""] * (len(result.columns) - 1), style="bold")


def chance_lines(document: Document) -> list[str]:
    """One line for each setting that chooses no better than chance somewhere."""
    lines = []
    top_k = document["settings"]["top_k"]
    for result in overall_results(document):
        for index, k in enumerate(top_k):
            layers = [
                each["layer"]
                for each in results_of(document, result["format"], result["transform"])
                if each["no_better_than_chance"][index]
            ]
            if layers:
                where = "every layer" if len(layers) == len(document["layers"]) else layers[0]
                more = f" and {len(layers) - 1} more" if where == layers[0] and layers[1:] else ""
                lines.append(
                    f"NO BETTER THAN CHANCE: {setting_label(result)} at k = {k:,} in {where}{more}"
                )
    return lines


def transform_lines(document: Document) -> list[str]:
    """What is the same by construction for the transforms of this study."""
    choices = document["settings"]["transforms"]
    lines = []
    if any(choice["center"] != "none" for choice in choices):
        lines.append(
            "center moves all scores of a row by the same amount: by itself it changes no ranking."
        )
    if any(choice["gain"] != "none" for choice in choices):
        lines.append(
            "gain multiplies all scores by a power of two: by itself it changes no ranking."
        )
    return lines


def ordered_layers(document: Document) -> list[tuple[str, float]]:
    """Layers and their mean recall with the first setting, worst first; undefined ones left out."""
    place = leading_k(document)
    means = [
        (layer["name"], recall_of(layer_results(document, layer["name"])[0], place)["mean"])
        for layer in document["layers"]
    ]
    return sorted(
        ((name, mean) for name, mean in means if mean is not None), key=lambda each: each[1]
    )


def layers_table(document: Document) -> Any:
    """Worst and best layers, by the mean recall of the first setting."""
    place = leading_k(document)
    k = document["settings"]["top_k"][place]
    shown = [result for result in overall_results(document) if result["transform"] == "none"]
    shown = shown or overall_results(document)[:1]
    title = f"Mean recall@{k:,} by layer, worst layers first"
    result = _narrow_table(title, "layer", *(setting_label(each) for each in shown))
    result.columns[0].overflow = "fold"
    layers = ordered_layers(document)
    for name, _ in _both_ends(layers):
        if name is None:
            result.add_row(*["..."] * (len(shown) + 1))
            continue
        of_layer = layer_results(document, name)
        cells = [
            similarity(recall_of(each, place)["mean"])
            for each in of_layer
            if setting_label(each) in {setting_label(other) for other in shown}
        ]
        result.add_row(name, *cells)
    return result


def _both_ends(layers: Sequence[tuple[str, float]]) -> list[tuple[str | None, float]]:
    if len(layers) <= 2 * _LAYERS_SHOWN + 1:
        return list(layers)
    return [*layers[:_LAYERS_SHOWN], (None, 0.0), *layers[-_LAYERS_SHOWN:]]


def worst_row_lines(document: Document) -> list[str]:
    """Where the row with the least recall is, for the first setting and each k."""
    result = overall_results(document)[0]
    lines = []
    for index, k in enumerate(document["settings"]["top_k"]):
        worst = recall_of(result, index)["worst"]
        if worst is not None and worst["value"] < 1:
            lines.append(
                f"Worst row of {setting_label(result)}, recall@{k:,} "
                f"{similarity(worst['value'])}: {result['worst_layers'][index]}, request "
                f"{worst['request']}, row {worst['row']}, {worst['length']:,} keys"
            )
    return lines


def errors_table(document: Document) -> Any:
    """Errors of keys and scores over all layers, by transform and format."""
    place = leading_k(document)
    k = document["settings"]["top_k"][place]
    title = "Relative L2 error of keys, and measures of the scores, over all layers"
    headings = ("key L2", "score L2", "cosine", "Spearman", f"mass@{k:,}")
    result = _narrow_table(title, "", *headings)
    for transform, results in _by_transform(document):
        _add_heading(result, transform)
        for each in results:
            accuracy = each["accuracy"]
            result.add_row(
                f"  {each['format']}",
                error_size(each["key_error"]),
                error_size(accuracy["relative_l2"]["mean"]),
                similarity(accuracy["cosine"]["mean"]),
                similarity(accuracy["spearman"]["mean"]),
                similarity(accuracy["top_k"][place]["mass"]["mean"]),
            )
    return result


def blocks_table(document: Document) -> Any:
    """How the keys of all layers fall into NVFP4 blocks, by transform."""
    title = "Blocks of 16 values, as NVFP4 scales them; outlier: amax > 8 x median"
    result = _narrow_table(title, "", "gain", "flushed", "subnormal", "saturated", "outliers")
    for each in document["blocks"]:
        if each["layer"] is None:
            profile = each["profile"]
            blocks = profile["blocks"] or float("nan")
            result.add_row(
                "no transform" if each["transform"] == "none" else each["transform"],
                "by layer" if each["gain"] is None else f"{each['gain']:g}",
                *(
                    percent(profile[name] / blocks)
                    for name in ("flushed", "subnormal", "saturated", "outliers")
                ),
            )
    return result


def suggestion_lines(document: Document) -> list[str]:
    """What to take at each size of a key, and the evidence."""
    k, sizes = document["suggestions"]["k"], document["suggestions"]["by_size"]
    if k is None:
        return ["No suggestion: most rows are shorter than every k, and cannot miss a key."]
    return [suggestion_line(each, k) for each in sizes]


def suggestion_line(suggestion: Document, k: int) -> str:
    """One size's suggestion in a sentence."""
    line = (
        f"At {suggestion['bytes_per_key']} bytes a key: {setting_label(suggestion)}, mean "
        f"recall@{k:,} {similarity(suggestion['recall'])} of the rows with more keys than that"
    )
    evidence = suggestion["evidence"]
    if suggestion["candidates"] == 1:
        return f"{line}; the only setting measured at this size."
    if evidence is None:
        return f"{line}; nothing measured at this size is clearly better."
    gain = evidence["gain"]
    error = gain["standard_error"]
    return (
        f"{line}; {gain['mean']:+.4f}" + ("" if error is None else f" ± {error:.4f}") + " against "
        f"{setting_label(evidence['plain'])}, better in {gain['rows_better']:,} and worse in "
        f"{gain['rows_worse']:,} of {gain['rows']:,} rows, better in {evidence['layers_better']} "
        f"and worse in {evidence['layers_worse']} layers."
    )
