"""The files of a report folder that are made from its report.json: table, pictures and page."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdsa_cli.text import as_csv_cell
from sdsa_quant.errors import Hint, InputError

from .html import study_html
from .plots import PLOTS, PNG_TITLE, study_plots
from .verdict import Serving

if TYPE_CHECKING:
    from sdsa_quant.study.report import StudyReport
    from sdsa_quant.study.results import SettingResult

CSV_NAME = "report.csv"
HTML_NAME = "report.html"
CSV_HEADINGS = (
    "layer", "format", "transform", "bytes_per_key", "k", "rows", "rows_longer_than_k",
    "recall_mean", "recall_median", "recall_p1", "recall_min", "chance", "no_better_than_chance",
    "mass_mean", "mass_p1", "mass_min", "relative_l2_mean", "relative_l2_p99", "max_abs_max",
    "cosine_mean", "cosine_min", "spearman_mean", "spearman_min", "key_error",
)  # fmt: skip


# What the pages begin with, or have within their first bytes: a file without it is someone else's.
_MARKS = {
    ".csv": f"{','.join(CSV_HEADINGS[:5])},".encode(),
    ".html": b"<title>sdsa study</title>",
    ".png": PNG_TITLE.encode(),
}
_MARKED_BYTES = 1024


def write_pages(
    folder: Path, report: StudyReport, *, serving: Serving, with_plots: bool, force: bool = False
) -> Sequence[Path]:
    """Write ``report.csv``, ``report.html`` and a PNG for each picture; returns their paths.

    Each file appears whole or not at all, and replaces that of an earlier study. Pictures of an
    earlier study that this one does not have are removed.

    Raises
    ------
    InputError
        A file cannot be written, or is not a study's and `force` is false.
    """
    from sdsa_quant.files.atomic_file import AtomicFile, write_text

    if not force:
        refuse_foreign_pages(folder)
    plots = study_plots(report) if with_plots else {}
    written = [folder / CSV_NAME, folder / HTML_NAME]
    write_text(folder / CSV_NAME, study_csv(report), force=True)
    write_text(folder / HTML_NAME, study_html(report, plots, serving), force=True)
    for name in PLOTS:
        path = folder / f"{name}.png"
        if name in plots:
            with AtomicFile(path, force=True) as file:
                file.write_at(0, plots[name])
            written.append(path)
        elif path.exists() and _is_page(path):
            path.unlink()
    return written


def refuse_foreign_pages(folder: Path) -> None:
    """Refuse to replace files that no study made.

    Raises
    ------
    InputError
        A page's name is taken by such a file, or by a symbolic link.
    """
    names = (CSV_NAME, HTML_NAME, *(f"{name}.png" for name in PLOTS))
    for path in (folder / name for name in names):
        if os.path.lexists(path) and not _is_page(path):
            raise InputError(
                "is not a page of a study", source=path, hint=Hint("force", "to replace it", True)
            )


def _is_page(path: Path) -> bool:
    """Whether a study made a file."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return _MARKS[path.suffix] in file.read(_MARKED_BYTES)


def study_csv(report: StudyReport) -> str:
    """A study as one flat table: a line for each layer, setting and k.

    An undefined value is empty, and so is the layer of all layers. A name that a spreadsheet would
    take for a formula has an apostrophe before it.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEADINGS)
    for result in report.results:
        for index in range(len(report.settings.top_k)):
            writer.writerow(map(_csv_cell, _csv_line(result, index)))
    return text.getvalue()


def _csv_cell(cell: object) -> object:
    if isinstance(cell, str):
        return as_csv_cell(cell)
    return "" if cell is None else cell


def _csv_line(result: SettingResult, index: int) -> Iterator[object]:
    accuracy, top_k = result.accuracy, result.accuracy.top_k[index]
    recall, mass = top_k.recall, top_k.mass
    yield from (result.layer, result.format, result.transform, result.bytes_per_key)
    yield from (top_k.k, recall.rows, top_k.rows_longer_than_k)
    yield from (recall.mean, recall.median, recall.p1, recall.minimum)
    yield from (top_k.chance, result.no_better_than_chance[index])
    yield from (mass.mean, mass.p1, mass.minimum)
    yield from (accuracy.relative_l2.mean, accuracy.relative_l2.p99, accuracy.max_abs.maximum)
    yield from (accuracy.cosine.mean, accuracy.cosine.minimum)
    yield from (accuracy.spearman.mean, accuracy.spearman.minimum, result.key_error)
