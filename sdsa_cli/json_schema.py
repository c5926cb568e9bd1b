"""The JSON documents of the commands by name, and a JSON Schema of each, from its dataclass."""

from __future__ import annotations

import importlib
from typing import Any

# Name of the document and the dataclass that it is written from. Some load torch.
DOCUMENTS = {
    "quantize-cache": "sdsa_cli.quantize_cache.document:QuantizeCacheDocument",
    "calibrate": "sdsa_cli.calibrate.document:CalibrateDocument",
    "capture": "sdsa_cli.capture.document:CaptureDocument",
    "convert": "sdsa_cli.convert.document:ConvertDocument",
    "verify": "sdsa_cli.verify.document:VerifyDocument",
    "eval": "sdsa_cli.evaluate.document:EvalDocument",
    "score": "sdsa_cli.score.document:ScoreDocument",
    "inspect-tensors": "sdsa_cli.inspect.documents:TensorsDocument",
    "inspect-cache": "sdsa_cli.inspect.documents:CacheDocument",
    "inspect-caches": "sdsa_cli.inspect.documents:CachesDocument",
    "inspect-page": "sdsa_cli.inspect.documents:PageDocument",
    "inspect-scores": "sdsa_cli.inspect.documents:ScoresDocument",
    "bench": "sdsa_cli.bench.document:BenchDocument",
    "doctor": "sdsa_cli.doctor:DoctorDocument",
    "study": "sdsa_quant.study.report:StudyReport",
    "compare": "sdsa_cli.study.compare:ComparisonReport",
}


def document_class(name: str) -> type:
    """The dataclass of a document of `DOCUMENTS`."""
    module, _, attribute = DOCUMENTS[name].partition(":")
    found: type = getattr(importlib.import_module(module), attribute)
    return found


def all_schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema (draft 2020-12) of every document, by its name in `DOCUMENTS`."""
    from sdsa_quant.files.typed_json import json_schema

    return {name: json_schema(document_class(name)) for name in DOCUMENTS}
