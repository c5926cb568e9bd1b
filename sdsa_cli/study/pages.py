"""The files of a report folder that are made from its document: table, pictures and page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .csv_file import study_csv
from .document import Document
from .html import study_html
from .plots import study_plots

CSV_NAME = "report.csv"
HTML_NAME = "report.html"


def write_pages(folder: Path, document: Document, *, with_plots: bool) -> Sequence[Path]:
    """Write ``report.csv``, ``report.html`` and a PNG for each picture; returns their paths.

    Each file appears whole or not at all, in place of an earlier one.

    Raises
    ------
    InputError
        A file cannot be written.
    """
    from sdsa_quant.files.atomic_file import AtomicFile, write_text

    plots = study_plots(document) if with_plots else {}
    written = [folder / CSV_NAME, folder / HTML_NAME]
    write_text(folder / CSV_NAME, study_csv(document), force=True)
    write_text(folder / HTML_NAME, study_html(document, plots), force=True)
    for name, data in plots.items():
        path = folder / f"{name}.png"
        with AtomicFile(path, force=True) as file:
            file.write_at(0, data)
        written.append(path)
    return written
