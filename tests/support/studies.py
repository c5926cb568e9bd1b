"""Small studies for tests: files of several layers, and measuring what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from sdsa_quant.study.inputs import StudyInputs
from sdsa_quant.study.settings import StudySettings
from sdsa_quant.study.work import Study, measure_units, open_study

LENGTHS = (70, 0, 300, 129)
ROWS = 2  # query rows of each request


def save_layers(
    path: Path,
    generator: torch.Generator,
    layers: Sequence[int] = (0, 2, 10),
    lengths: Sequence[int] = LENGTHS,
    rows: int = ROWS,
) -> Path:
    """Keys, queries and lengths of some layers; each layer has channel offsets of its own."""
    tensors = {}
    for layer in layers:
        offsets = 3 * torch.randn(128, generator=generator)
        keys = torch.randn(sum(lengths), 128, generator=generator) + offsets
        queries = torch.randn(len(lengths), rows, 128, generator=generator)
        tensors[f"layers.{layer}.keys"] = keys.bfloat16()
        tensors[f"layers.{layer}.queries"] = queries.bfloat16()
        tensors[f"layers.{layer}.lengths"] = torch.tensor(lengths, dtype=torch.int32)
    save_file(tensors, path)
    return path


def layer_inputs(path: Path, **changes: object) -> StudyInputs:
    """Inputs of a file of `save_layers`."""
    options: dict[str, object] = {"lengths": "*.lengths", **changes}
    return StudyInputs(path, path, **options)  # type: ignore[arg-type]


def measured_study(inputs: StudyInputs, settings: StudySettings, folder: Path) -> Study:
    """A study whose units are all measured, in this process, with `folder` as its work folder."""
    study = open_study(inputs, settings, folder)
    study.folder.prepare(restart=False)
    measure_units(study, study.units())
    return study
