"""Small studies for tests: files of several layers, measuring them, and `sdsa study` on them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sdsa_quant.study.inputs import StudyInputs
from sdsa_quant.study.settings import StudySettings
from sdsa_quant.study.work import Study, measure_units, open_study

from .command_line import Outcome, Run, read_document

LENGTHS = (70, 0, 300, 129)
ROWS = 2  # query rows of each request
PICTURES = {
    "recall-by-layer",
    "recall-by-bytes",
    "recall-by-length",
    "score-errors",
    "channel-errors",
    "block-magnitudes",
}
PNG = b"\x89PNG\r\n\x1a\n"
FAST = ("--workers", "1", "--device", "cpu")


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
    return StudyInputs(path, path, **options)


def measured_study(inputs: StudyInputs, settings: StudySettings, folder: Path) -> Study:
    """A study whose units are all measured, in this process, with `folder` as its work folder."""
    study = open_study(inputs, settings, folder)
    study.folder.prepare(restart=False)
    measure_units(study, study.units())
    return study


def same_page(path: Path) -> bytes:
    """A page of a report without its date and command line."""
    made = rb'<tr><td class="text">(made|by)</td><td class="text">[^<]*</td></tr>'
    return re.sub(made, b"", path.read_bytes())


class Studies:
    """A file of three layers and runs of `sdsa study` on it."""

    def __init__(self, sdsa: Run, folder: Path, generator: torch.Generator) -> None:
        self.sdsa = sdsa
        self.folder = folder
        self.layers = save_layers(folder / "layers.safetensors", generator)

    def arguments(self, output: str, *options: object) -> list[str]:
        files = ("study", self.layers, self.layers, "-o", self.folder / output)
        return [str(word) for word in (*files, "--lengths", "*.lengths", *options)]

    def run(self, output: str, *options: object) -> Outcome:
        """``sdsa study`` in this process, without pictures."""
        return self.sdsa(*self.arguments(output, *FAST, "--no-plots", *options))

    def document(self, output: str) -> dict[str, Any]:
        """The report, read by a strict parser."""
        return read_document(self.folder / output / "report.json")
