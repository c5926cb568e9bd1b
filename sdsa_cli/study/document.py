"""The JSON document of a study, described in docs/reference/reports/study.md, and reading it back.

Tables, plots and pages are made from the document alone, so that `sdsa report` can make them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdsa_cli.json_documents import SCHEMA_VERSION, command_document
from sdsa_quant.environment import describe_environment
from sdsa_quant.errors import InputError
from sdsa_quant.files.text import read_json

if TYPE_CHECKING:
    from sdsa_quant.study.run import Study
    from sdsa_quant.study.settings import Setting, TransformChoice
    from sdsa_quant.study.suggestion import Suggestion
    from sdsa_quant.study.summary import SettingResult, StudySummary, TransformResult

COMMAND = "study"
REPORT_NAME = "report.json"

Document = dict[str, Any]


def study_document(study: Study, summary: StudySummary, timing: Document) -> Document:
    """The document of a finished study."""
    from sdsa_quant.accuracy.blocks import FIRST_EXPONENT
    from sdsa_quant.formats.key_formats import KEY_FORMATS
    from sdsa_quant.study.suggestion import suggest
    from sdsa_quant.study.unit import ERROR_STEPS

    settings = summary.settings
    k, suggestions = suggest(summary)
    return command_document(
        COMMAND,
        {
            "inputs": study.inputs,
            "device": study.device.partition(":")[0],  # the same for every rank
            "settings": {
                "formats": [
                    {
                        "name": name,
                        "bytes_per_key": KEY_FORMATS[name].bytes_per_key,
                        "quantizes_query": KEY_FORMATS[name].quantizes_query,
                        "summary": KEY_FORMATS[name].summary,
                    }
                    for name in settings.formats
                ],
                "transforms": [_transform_fields(choice) for choice in settings.transforms],
                "top_k": settings.top_k,
                "softmax_scale": settings.softmax_scale,
                "error_steps": ERROR_STEPS,
                "first_exponent": FIRST_EXPONENT,
            },
            "layers": summary.layers,
            "rows_invalid": summary.rows_invalid,
            "suggestions": {"k": k, "by_size": [_suggestion_fields(each) for each in suggestions]},
            "results": [
                _result_fields(result)
                for results in (summary.overall, *summary.by_layer)
                for result in results
            ],
            "blocks": [_block_fields(result) for result in summary.transforms],
            "environment": describe_environment(),
            "timing": timing,
        },
    )


def _transform_fields(choice: TransformChoice) -> Document:
    return {
        "label": choice.label,
        "center": choice.center,
        "rotate": choice.rotate,
        "gain": choice.gain,
    }


def _setting_fields(setting: Setting) -> Document:
    return {
        "format": setting.format.name,
        "transform": setting.transform.label,
        "bytes_per_key": setting.format.bytes_per_key,
    }


def _result_fields(result: SettingResult) -> Document:
    return {
        "layer": result.layer,
        **_setting_fields(result.setting),
        "accuracy": result.accuracy,
        "worst_layers": result.worst_layers,
        "no_better_than_chance": result.no_better_than_chance,
        "by_length": result.by_length,
        "key_error": result.key_error,
        "channel_errors": result.channel_errors,
        "error_counts": result.error_counts,
    }


def _block_fields(result: TransformResult) -> Document:
    return {
        "layer": result.layer,
        "transform": result.transform,
        "gain": result.gain,
        "profile": result.profile,
    }


def _suggestion_fields(suggestion: Suggestion) -> Document:
    evidence = suggestion.evidence
    return {
        **_setting_fields(suggestion.setting),
        "candidates": suggestion.candidates,
        "recall": suggestion.recall,
        "best": _setting_fields(suggestion.best),
        "evidence": None
        if evidence is None
        else {
            "plain": _setting_fields(evidence.plain),
            "gain": evidence.gain,
            "is_clear": evidence.gain.is_clear,
            "layers_better": evidence.layers_better,
            "layers_worse": evidence.layers_worse,
        },
    }


def read_document(path: Path) -> Document:
    """Read a study's report: the file, or the one in a folder.

    Raises
    ------
    InputError
        It cannot be read, is no JSON, or is no report of `sdsa study` of this version.
    """
    if path.is_dir():
        path = path / REPORT_NAME
    document = read_json(path)
    if not isinstance(document, dict) or document.get("command") != COMMAND:
        raise InputError(f"{path}: must be a report of sdsa study ({REPORT_NAME}), it is not")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise InputError(
            f"{path}: schema_version must be {SCHEMA_VERSION}, "
            f"got {document.get('schema_version')!r}"
        )
    return document


def setting_label(fields: Document) -> str:
    """Short name of a result's or suggestion's setting: ``nvfp4, hadamard``."""
    if fields["transform"] == "none":
        return fields["format"]
    return f"{fields['format']}, {fields['transform']}"


def overall_results(document: Document) -> list[Document]:
    """The results over all layers, by setting."""
    return [result for result in document["results"] if result["layer"] is None]


def layer_results(document: Document, layer: str) -> list[Document]:
    """The results of one layer, by setting."""
    return [result for result in document["results"] if result["layer"] == layer]


def results_of(document: Document, format_name: str, transform: str) -> Iterator[Document]:
    """One setting's results, layer by layer."""
    for result in document["results"]:
        if result["layer"] is not None and (result["format"], result["transform"]) == (
            format_name,
            transform,
        ):
            yield result


def formats(document: Document) -> list[str]:
    """Names of the formats, in order."""
    return [each["name"] for each in document["settings"]["formats"]]


def transforms(document: Document) -> list[str]:
    """Labels of the transforms, in order."""
    return [each["label"] for each in document["settings"]["transforms"]]


def leading_k(document: Document) -> int:
    """Place of the k that a page leads with: that of the suggestions, or else the smallest."""
    top_k: Sequence[int] = document["settings"]["top_k"]
    suggested = document["suggestions"]["k"]
    return top_k.index(suggested) if suggested is not None else top_k.index(min(top_k))


def recall_of(result: Document, place: int) -> Document:
    """The recall summary of the k at `place`."""
    return result["accuracy"]["top_k"][place]["recall"]
