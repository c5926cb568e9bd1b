"""Arguments of other types than a public call states: refused by name, whatever the call.

The table has a right call of everything public. Each argument in turn is replaced by values of
every other type; none may be taken, and none may end in an error of Python's own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sdsa_quant
from sdsa_quant import study
from sdsa_quant.arguments import checked_argument
from sdsa_quant.calibration.calibrate import calibrate
from sdsa_quant.engines.convert import convert_engine_cache
from sdsa_quant.engines.dump import open_engine_cache
from sdsa_quant.errors import DtypeError, InputError, SdsaError
from sdsa_quant.files.cache_header import CacheHeader
from sdsa_quant.formats.transforms import TransformChoice
from sdsa_quant.study import StudyReport
from sdsa_quant.study.settings import StudySettings

WRONG = {
    "None": None,
    "no text": "",
    "text": "?",
    "bytes": b"x",
    "whole number": 5,
    "negative number": -1,
    "truth value": True,
    "number": 1.5,
    "object": object(),
    "mapping": {"a": 1},
    "list of numbers": [1.5],
    "list of truth values": [True],
    "list of texts": ["?"],
    "list of None": [None],
    "empty list": [],
}
KEYS = torch.ones(4, 128)
CODES, SCALES = sdsa_quant.quantize_nvfp4(KEYS)
VALUES = {"values": KEYS}
ROWS = torch.ones(2, 3, 128)
LENGTHS = torch.tensor([4, 4])

Call = tuple[Callable[..., Any], dict[str, Any]]


def calls(folder: Path) -> dict[str, Call]:
    """Everything public, with arguments that are right; what writes, writes below `folder`."""
    captures = {"keys": folder / "keys.safetensors", "queries": folder / "queries.safetensors"}
    header = CacheHeader("nvfp4")
    pages = torch.zeros(1, 4608, dtype=torch.uint8)
    paged = sdsa_quant.PagedKeys(
        *sdsa_quant.page_views(pages, "nvfp4"), torch.zeros(1, 1, dtype=torch.int32), LENGTHS[:1]
    )
    lengths = torch.tensor([4], dtype=torch.int32)
    row = {"row": 0, "request": 0, "scores": KEYS[0], "baseline": KEYS[0]}
    heads = {"query": ROWS, "keys": KEYS}
    blocks = {"lengths": LENGTHS, "block": 2}
    written = {"rows": 1, "max_context": 4, "top_k": 2, "source": {}}
    return {
        "study.run": (study.run, {**captures, "output": folder / "study"}),
        "calibrate": (calibrate, {**captures, "output": folder / "statistics"}),
        "StudyReport.read": (StudyReport.read, {"path": folder}),
        "StudySettings": (StudySettings, {}),
        "TransformChoice": (TransformChoice, {}),
        "CacheHeader": (CacheHeader, {"format": "nvfp4"}),
        "build_cache": (
            sdsa_quant.build_cache,
            {"keys": captures["keys"], "output": folder / "built"},
        ),
        "CacheWriter": (
            sdsa_quant.CacheWriter,
            {"path": folder / "cache", "header": header, "context_lengths": [4]},
        ),
        "ScoresWriter": (
            sdsa_quant.ScoresWriter,
            {"path": folder / "s", "context_lengths": lengths, "requests": lengths, **written},
        ),
        "sdsa_capture": (
            sdsa_quant.sdsa_capture,
            {"model": torch.nn.Module(), "output": folder / "captured"},
        ),
        "convert_engine_cache": (
            convert_engine_cache,
            {"path": captures["keys"], "output": folder / "decoded"},
        ),
        "open_engine_cache": (open_engine_cache, {"path": captures["keys"]}),
        "open_cache": (sdsa_quant.open_cache, {"path": folder}),
        "open_scores": (sdsa_quant.open_scores, {"path": folder}),
        "validate_cache": (sdsa_quant.validate_cache, {"cache": None}),
        "gather_keys": (sdsa_quant.gather_keys, {"paged": paged, "request": 0}),
        "page_views": (sdsa_quant.page_views, {"records": pages, "key_format": "nvfp4"}),
        "hadamard": (sdsa_quant.hadamard, VALUES),
        "quantize_nvfp4": (sdsa_quant.quantize_nvfp4, VALUES),
        "quantize_mxfp4": (sdsa_quant.quantize_mxfp4, VALUES),
        "quantize_fp8": (sdsa_quant.quantize_fp8, VALUES),
        "dequantize_nvfp4": (sdsa_quant.dequantize_nvfp4, {"codes": CODES, "scales": SCALES}),
        "dequantize_mxfp4": (sdsa_quant.dequantize_mxfp4, {"codes": CODES, "scales": SCALES}),
        "dequantize_fp8": (sdsa_quant.dequantize_fp8, {"codes": CODES, "scales": SCALES}),
        "linear_to_128x4": (sdsa_quant.linear_to_128x4, {"scales": SCALES}),
        "linear_from_128x4": (
            sdsa_quant.linear_from_128x4,
            {"tiled": torch.zeros(1024, dtype=torch.uint8), "rows": 4, "columns": 8},
        ),
        "relu_sum_scores": (sdsa_quant.relu_sum_scores, heads),
        "block_max_scores": (sdsa_quant.block_max_scores, {**heads, **blocks}),
        "select_blocks": (sdsa_quant.select_blocks, {"scores": ROWS, "k": 2, **blocks}),
        "mean_pooled_keys": (sdsa_quant.mean_pooled_keys, {"keys": ROWS[:, 0], "pool": 2}),
        "top_k_indices": (sdsa_quant.top_k_indices, {"scores": KEYS, "k": 2}),
        "row_accuracy": (sdsa_quant.row_accuracy, {**row, "top_k": [2], "softmax_scale": 1.0}),
        "summarize_accuracy": (sdsa_quant.summarize_accuracy, {"rows": [], "top_k": [2]}),
    }


NAMES = calls(Path("unused"))
RESULTS = {  # classes that calls return: no one makes them
    "Accuracy",
    "BuiltCaches",
    "CacheFile",
    "PagedKeys",
    "QuantizedCache",
    "RowAccuracy",
    "ScoresFile",
}


def test_the_table_has_everything_public() -> None:
    assert set(sdsa_quant.__all__) - RESULTS <= set(NAMES)


def fits(annotation: str, value: object) -> bool:
    """Whether a value is of a type that the source text of an annotation names."""
    plain = re.sub(r"\[.*?\]+", "", annotation)
    kinds = {part.strip() for part in plain.split("|")}
    if value is None:
        return "None" in kinds
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, int | float):
        return "float" in kinds or (isinstance(value, int) and "int" in kinds)
    if isinstance(value, str):
        listed = "Sequence[str" in annotation or "tuple[str" in annotation
        return value != "" and ("str" in kinds or listed)
    if isinstance(value, dict):
        return "Mapping" in kinds
    if isinstance(value, list):
        item = re.search(r"(?:Sequence|tuple)\[(\w+)", annotation)
        return item is not None and all(fits(item[1], each) for each in value)
    return False


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name, (function, _) in NAMES.items()
        for argument in inspect.signature(function).parameters
    ],
)
def test_values_of_other_types_are_refused_by_name(
    name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, tensor in (("keys", KEYS), ("queries", KEYS)):
        save_file({file: tensor}, tmp_path / f"{file}.safetensors")
    before = sorted(tmp_path.rglob("*"))
    function, right = calls(tmp_path)[name]
    parameter = inspect.signature(function).parameters[argument]
    tried = 0
    for what, value in WRONG.items():
        if fits(str(parameter.annotation), value) or value is parameter.default:
            continue
        tried += 1
        with pytest.raises(SdsaError) as caught:
            function(**{**right, argument: value})
        assert isinstance(caught.value, InputError | DtypeError), what
        assert re.match(rf"{argument} must be .*, got ", str(caught.value)), what
    assert tried > 3
    assert sorted(tmp_path.rglob("*")) == before, "a refused call wrote something"


@pytest.mark.parametrize("name", ["formats", "rotate", "gain", "center"])
def test_one_name_stands_for_a_list_of_one(name: str) -> None:
    assert checked_argument(name, "nvfp4", tuple[str, ...]) == ("nvfp4",)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("formats", [], "formats must be given, each once, got []"),
        ("formats", ["fp8", "fp8"], "formats must be given, each once, got ['fp8', 'fp8']"),
        ("formats", "fp9", "format must be one of bf16, nvfp4"),
        ("rotate", [], "rotate must be given, each once, got []"),
        ("rotate", "givens", "rotate must be one of none, hadamard, got 'givens'"),
        ("gain", "3", "gain must be none, auto or a power of two from 2^-40 to 2^40, got '3'"),
        ("top_k", [], "top_k must be distinct numbers from 1, got []"),
        ("top_k", [0], "top_k must be distinct numbers from 1, got [0]"),
        ("softmax_scale", 0, "softmax_scale must be positive and finite, got 0.0"),
        ("workers", 0, "workers must be at least 1, got 0"),
        ("device", "banana", "device must be cpu, cuda or cuda:N, got 'banana'"),
        ("score", "best", "score must be one of rows, relu-sum, block-max, got 'best'"),
    ],
)
def test_values_of_the_right_type_out_of_range(
    argument: str, value: Any, message: str, tmp_path: Path
) -> None:
    for file in ("keys", "queries"):
        save_file({file: KEYS}, tmp_path / f"{file}.safetensors")
    function, right = calls(tmp_path)["study.run"]
    with pytest.raises(InputError) as caught:
        function(**{**right, argument: value})
    assert str(caught.value).startswith(message)
