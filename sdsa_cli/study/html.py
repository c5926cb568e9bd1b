"""A study as one HTML page that needs no other file: tables, and embedded pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sdsa_cli.text import html_text as escape

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

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 72em; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2em 0.8em; border-bottom: 1px solid #ddd; text-align: right; }
th.text, td.text { text-align: left; }
th { border-bottom: 2px solid #888; }
figure { margin: 1.5em 0; } figcaption { color: #555; font-size: 13px; max-width: 60em; }
img { max-width: 100%; height: auto; }
div.wide { overflow-x: auto; }
p.verdict { font-size: 17px; font-weight: bold; }
p.flag { color: #b00020; font-weight: bold; }
"""


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
    answer, *others = verdict_lines(report, serving)
    choices = choices_table(report)
    body = [
        "<h1>Accuracy study of quantized indexer keys</h1>",
        f'<p class="verdict">{escape(answer)}</p>',
        *(f"<p>{escape(line)}</p>" for line in others),
        *([] if choices is None else [choices.html()]),
        _fields(summary_fields(report)),
        "<h2>What to take</h2>",
        *(f"<p>{escape(line)}</p>" for line in suggestion_lines(report)),
        *(
            f'<p class="flag">{escape(line)}</p>'
            for lines in (range_lines, chance_lines, query_lines, tie_lines)
            for line in lines(report)
        ),
        "<h2>Recall</h2>",
        recall_table(report).html(),
        *(
            f"<p>{escape(line)}</p>"
            for line in (*worst_row_lines(report), *transform_lines(report))
        ),
        *_pictures(plots, ("recall-by-layer", "recall-by-bytes", "recall-by-length")),
    ]
    if len(report.layers) > 1:
        body += ["<h2>Layers</h2>", layers_table(report, whole=True).html()]
    body += [
        "<h2>Errors</h2>",
        errors_table(report).html(),
        *_pictures(plots, ("score-errors", "channel-errors")),
        "<h2>Blocks</h2>",
        blocks_table(report).html(),
        *_pictures(plots, ("block-magnitudes",)),
        "<h2>Where this comes from</h2>",
        _fields(_provenance(report)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>sdsa study</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


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


def _fields(fields: Mapping[str, str]) -> str:
    rows = "".join(
        f'<tr><td class="text">{escape(name)}</td><td class="text">{escape(value)}</td></tr>'
        for name, value in fields.items()
    )
    return f"<table>{rows}</table>"


def _pictures(plots: Mapping[str, bytes], names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if name in plots:
            data = base64.b64encode(plots[name]).decode()
            yield (
                f'<figure><img src="data:image/png;base64,{data}" alt="{escape(CAPTIONS[name])}">'
                f"<figcaption>{escape(CAPTIONS[name])}</figcaption></figure>"
            )
