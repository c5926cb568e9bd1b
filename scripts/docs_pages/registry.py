"""What is made, by which function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sdsa_cli.bench.document import BenchDocument
from sdsa_cli.doctor import DoctorDocument
from sdsa_cli.inspect.documents import (
    CacheDocument,
    CachesDocument,
    PageDocument,
    ScoresDocument,
    TensorsDocument,
)
from sdsa_cli.quantize_cache.document import QuantizeCacheDocument
from sdsa_cli.score.document import ScoreDocument
from sdsa_cli.study.compare import ComparisonReport
from sdsa_quant.files.typed_json import json_schema
from sdsa_quant.study import StudyReport

from . import charts, diagrams, measurements
from .cli_reference import cli_reference
from .pages import Maker
from .python_reference import python_reference
from .report_reference import report_fields, schema_text

# The class of each JSON document, by the name of its part and of its schema's file.
DOCUMENTS: Mapping[str, type] = {
    "bench": BenchDocument,
    "compare": ComparisonReport,
    "doctor": DoctorDocument,
    "inspect-cache": CacheDocument,
    "inspect-caches": CachesDocument,
    "inspect-page": PageDocument,
    "inspect-scores": ScoresDocument,
    "inspect-tensors": TensorsDocument,
    "quantize-cache": QuantizeCacheDocument,
    "score": ScoreDocument,
    "study": StudyReport,
}


def _fields(document: type) -> Maker:
    return lambda: report_fields(json_schema(document))


def _schema(document: type) -> Maker:
    return lambda: schema_text(json_schema(document))


PARTS: Mapping[str, Maker] = {
    "readme-table": measurements.readme_table,
    "backends-table": measurements.backends_table,
    "backends-gains": measurements.backends_gains,
    "host-times": measurements.host_times,
    "triton-table": measurements.triton_table,
    "cli": cli_reference,
    "python": python_reference,
    **{f"{name}-report": _fields(document) for name, document in DOCUMENTS.items()},
}

FILES: Mapping[str, Maker] = {
    **{
        f"docs/reference/reports/schemas/{name}.schema.json": _schema(document)
        for name, document in DOCUMENTS.items()
    },
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
