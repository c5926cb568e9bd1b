"""`sdsa report`: a study's pages made again from its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdsa_cli.options import ForceFlag, examples
from sdsa_cli.output import Output
from sdsa_quant.errors import InputError

from .markdown import study_markdown
from .pages import write_pages
from .plots import choose_plots
from .tables import study_tables
from .verdict import (
    DEFAULT_BATCH,
    DEFAULT_CONTEXT,
    BatchOption,
    ContextOption,
    GoalOption,
    MarkdownFlag,
    Serving,
    parse_goal,
)

COMMAND = "report"
EXAMPLES = examples(
    "sdsa report report/ --goal recall@256=0.95 --markdown", "sdsa report report/ --no-plots"
)


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Report folder of sdsa study.")],
    plots: Annotated[
        bool | None,
        typer.Option(
            "--plots/--no-plots",
            help="Draw pictures, with matplotlib; default: where it is installed.",
        ),
    ] = None,
    goal: GoalOption = None,
    batch: BatchOption = DEFAULT_BATCH,
    context: ContextOption = DEFAULT_CONTEXT,
    markdown: MarkdownFlag = False,
    force: ForceFlag = False,
) -> None:
    """Make a study's table, pictures and page again from its report.json, and print its tables."""
    from sdsa_quant.study.report import REPORT_NAME, StudyReport

    if folder.is_file():
        if folder.name != REPORT_NAME:
            raise InputError(
                f"must be a study's folder or its {REPORT_NAME}, whose pages are made again: "
                f"{folder.name} has none",
                source=folder,
            )
        folder = folder.parent
    study_report = StudyReport.read(folder)
    if goal is not None:
        study_report = study_report.judged(parse_goal(goal, study_report.settings.top_k))
    serving = Serving.checked(batch, context)
    sink = Output()
    draws = choose_plots(plots, sink.note)
    written = write_pages(folder, study_report, serving=serving, with_plots=draws, force=force)
    if markdown:
        sink.result(study_markdown(study_report, serving))
        return
    parts = study_tables(study_report, serving)
    sink.result(*parts, "", "Written: " + ", ".join(map(str, written)))
