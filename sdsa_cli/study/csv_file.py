"""A study as one flat table: a line for each layer, setting and k, for spreadsheets and plots."""

from __future__ import annotations

import csv
import io
from typing import Any

from .document import Document

HEADINGS = (
    "layer", "format", "transform", "bytes_per_key", "k", "rows", "rows_longer_than_k",
    "recall_mean", "recall_median", "recall_p1", "recall_min", "chance", "no_better_than_chance",
    "mass_mean", "mass_p1", "mass_min", "relative_l2_mean", "relative_l2_p99", "max_abs_max",
    "cosine_mean", "cosine_min", "spearman_mean", "spearman_min", "key_error",
)  # fmt: skip


def study_csv(document: Document) -> str:
    """The text of the table; an undefined value is empty, and so is the layer of all layers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADINGS)
    for result in document["results"]:
        for place in range(len(document["settings"]["top_k"])):
            writer.writerow("" if cell is None else cell for cell in _line(result, place))
    return text.getvalue()


def _line(result: Document, place: int) -> list[Any]:
    accuracy, top_k = result["accuracy"], result["accuracy"]["top_k"][place]
    recall, mass = top_k["recall"], top_k["mass"]
    return [
        result["layer"],
        result["format"],
        result["transform"],
        result["bytes_per_key"],
        top_k["k"],
        recall["rows"],
        top_k["rows_longer_than_k"],
        *(recall[name] for name in ("mean", "median", "p1", "minimum")),
        top_k["chance"],
        result["no_better_than_chance"][place],
        *(mass[name] for name in ("mean", "p1", "minimum")),
        *(accuracy["relative_l2"][name] for name in ("mean", "p99")),
        accuracy["max_abs"]["maximum"],
        *(accuracy["cosine"][name] for name in ("mean", "minimum")),
        *(accuracy["spearman"][name] for name in ("mean", "minimum")),
        result["key_error"],
    ]
