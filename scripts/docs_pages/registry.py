"""What is made, by which function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sdsa_cli.json_schema import all_schemas

from . import charts, diagrams, measurements
from .cli_reference import cli_reference
from .pages import Maker
from .python_reference import python_reference
from .report_reference import report_fields, schema_text

SCHEMAS = all_schemas()


def _fields(name: str) -> Maker:
    return lambda: report_fields(SCHEMAS[name])


def _schema(name: str) -> Maker:
    return lambda: schema_text(SCHEMAS[name])


PARTS: Mapping[str, Maker] = {
    "readme-table": measurements.readme_table,
    "backends-table": measurements.backends_table,
    "backends-gains": measurements.backends_gains,
    "host-times": measurements.host_times,
    "triton-table": measurements.triton_table,
    "tcgen05-budget": measurements.tcgen05_budget,
    "cli": cli_reference,
    "python": python_reference,
    **{f"{name}-report": _fields(name) for name in SCHEMAS},
}

FILES: Mapping[str, Maker] = {
    **{f"docs/reference/reports/schemas/{name}.schema.json": _schema(name) for name in SCHEMAS},
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
