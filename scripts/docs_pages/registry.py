"""What is made, by which function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sdsa_quant.files.typed_json import json_schema
from sdsa_quant.study import StudyReport

from . import charts, diagrams, measurements
from .cli_reference import cli_reference
from .pages import Maker
from .python_reference import python_reference
from .report_reference import Schema, report_fields, schema_text


def study_schema() -> Schema:
    """The JSON Schema of a study's report."""
    return json_schema(StudyReport)


PARTS: Mapping[str, Maker] = {
    "readme-table": measurements.readme_table,
    "backends-table": measurements.backends_table,
    "backends-gains": measurements.backends_gains,
    "host-times": measurements.host_times,
    "triton-table": measurements.triton_table,
    "cli": cli_reference,
    "python": python_reference,
    "study-report": lambda: report_fields(study_schema()),
}

FILES: Mapping[str, Maker] = {
    "docs/reference/reports/study.schema.json": lambda: schema_text(study_schema()),
    "docs/pictures/overview.svg": diagrams.overview,
    "docs/pictures/page-record.svg": diagrams.page_record,
    "docs/pictures/tiled-scales.svg": diagrams.tiled_scales,
    "docs/pictures/block-table.svg": diagrams.block_table,
    "docs/pictures/shares.svg": diagrams.shares,
    "docs/pictures/roof-shares.svg": charts.roof_shares,
    "docs/pictures/recall-by-bytes.svg": charts.recall_by_bytes,
}


def pages(root: Path) -> list[Path]:
    """The Markdown pages that may hold made parts."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
