"""A study as one HTML page that needs no other file and no network.

The page is `page.html.j2`: the answer, a map of layers by settings whose cells show their figures,
tables that sort, and embedded pictures, for light and dark screens of any width.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdsa_cli.text import counted, similarity, visible

from .tables import (
    blocks_table,
    chance_lines,
    errors_table,
    layers_table,
    query_lines,
    range_lines,
    recall_table,
    suggestion_lines,
    summary_fields,
    tie_lines,
    transform_lines,
    verdict_lines,
    worst_row_lines,
)
from .verdict import Serving, choices_table

if TYPE_CHECKING:
    from sdsa_quant.study.report import StudyReport
    from sdsa_quant.study.results import SettingResult

CAPTIONS = {
    "recall-by-layer": "Recall by layer, or by setting if there is one layer. A row's recall is "
    "the share of the unquantized keys' top-k that its quantized scores still choose.",
    "recall-by-bytes": "Mean recall against the bytes that a key takes.",
    "recall-by-length": "Mean recall by the number of keys that a row sees, and what a random "
    "choice would have. Rows with no more than k keys cannot miss one and are left out.",
    "score-errors": "Errors of the scores, relative to the standard deviation of the row's "
    "unquantized scores. What is a small error depends on how close the scores near rank k are.",
    "channel-errors": "Error by channel of the keys, transforms undone. A bright channel sets the "
    "scale of its blocks, or is lost in the blocks that others set.",
    "block-magnitudes": "Largest magnitude of each block of 16 values. A gain moves the curves.",
}


_INK = "#111111", "#ffffff"  # on light cells and on dark ones
_DARK, _LIGHT = (8, 48, 107), (222, 235, 247)  # Blues of ColorBrewer, from the least recall up


@dataclass(frozen=True, slots=True)
class _Cell:
    """A layer's recall in one setting: its colours, and its figures for a pointer."""

    text: str
    tip: str
    background: str
    ink: str


@dataclass(frozen=True, slots=True)
class _Line:
    layer: str
    cells: tuple[_Cell, ...]


@dataclass(frozen=True, slots=True)
class _Map:
    """Mean recall of layers by settings, as a table of colours."""

    k: str
    least: str
    most: str
    headings: tuple[str, ...]
    rows: tuple[_Line, ...]


def study_html(report: StudyReport, plots: Mapping[str, bytes], serving: Serving) -> str:
    """The page's text.

    Parameters
    ----------
    report : StudyReport
        The study.
    plots : mapping of str to bytes
        PNG pictures by name, from `study_plots`; may be empty.
    serving : Serving
        For what saved bytes are counted.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["shown"] = visible
    environment.filters["shown_lines"] = lambda text: "\n".join(map(visible, text.split("\n")))
    template = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    several = len(report.layers) > 1
    contents = {
        "answer": "Answer",
        "choices": "Choice by layer" if report.verdict.by_layer else "",
        "map": "Layers by settings",
        "take": "What to take",
        "recall": "Recall",
        "layers": "Layers" if several else "",
        "errors": "Errors",
        "blocks": "Blocks",
        "provenance": "Where this comes from",
    }
    return environment.from_string(template).render(
        verdict=verdict_lines(report, serving),
        contents=[(name, text) for name, text in contents.items() if text],
        summary=summary_fields(report),
        flags=[
            *range_lines(report),
            *chance_lines(report),
            *query_lines(report),
            *tie_lines(report),
        ],
        choices=choices_table(report),
        map=_layer_map(report),
        suggestions=suggestion_lines(report),
        recall=recall_table(report),
        recall_lines=[
            *worst_row_lines(report),
            *transform_lines(report),
        ],
        layers=layers_table(report, whole=True) if several else None,
        errors=errors_table(report),
        blocks=blocks_table(report),
        provenance=_provenance(report),
        plots={name: base64.b64encode(data).decode() for name, data in plots.items()},
        captions=CAPTIONS,
    )


def _layer_map(report: StudyReport) -> _Map:
    index = report.leading_index
    by_layer = [(layer.name, report.of_layer(layer.name)) for layer in report.layers]
    means = [
        mean
        for _, results in by_layer
        for each in results
        if (mean := each.recall(index).mean) is not None
    ]
    least, most = min(means, default=0.0), max(means, default=1.0)
    return _Map(
        k=f"{report.settings.top_k[index]:,}",
        least=similarity(least),
        most=similarity(most),
        headings=tuple(each.label for each in report.overall),
        rows=tuple(
            _Line(name, tuple(_cell(each, index, least, most) for each in results))
            for name, results in by_layer
        ),
    )


def _cell(result: SettingResult, index: int, least: float, most: float) -> _Cell:
    recall = result.recall(index)
    tip = "\n".join(
        [
            str(result.layer),
            f"{result.label}, {result.bytes_per_key} bytes a key",
            f"recall@{result.accuracy.top_k[index].k:,} {similarity(recall.mean)}, worst 1 % "
            f"{similarity(recall.p1)}, least {similarity(recall.minimum)}",
            f"{counted(recall.rows, 'row')} longer than k",
        ]
    )
    if recall.mean is None:
        return _Cell("-", tip, "transparent", "inherit")
    share = (recall.mean - least) / (most - least) if most > least else 1.0
    colour = [round(d + share * (li - d)) for d, li in zip(_DARK, _LIGHT, strict=True)]
    background = "#" + "".join(f"{each:02x}" for each in colour)
    return _Cell(similarity(recall.mean), tip, background, _INK[share < 0.55])


def _provenance(report: StudyReport) -> dict[str, str]:
    environment = report.environment
    return {
        "keys": str(report.inputs.keys),
        "queries": str(report.inputs.queries),
        "softmax scale of mass": f"{report.settings.softmax_scale:.6g}",
        "sdsa": f"{environment.sdsa} ({environment.git_revision or 'no checkout'})",
        "torch": environment.packages.get("torch") or "-",
        "device": report.device,
        "CPU": environment.cpu or "unknown",
        "made": environment.date,
        "by": environment.command_line,
    }
