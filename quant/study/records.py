"""The work folder of a study: a result file for each finished unit, so that a run can be resumed.

A result file is a small safetensors file that appears whole or not at all. It holds a `UnitResult`
bit for bit, so a report does not depend on which process wrote the files, or when. Each carries the
fingerprint of its study: result files of another study are never read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sdsa_quant.accuracy.blocks import BlockProfile
from sdsa_quant.errors import Hint, InputError
from sdsa_quant.files.atomic_file import write_text
from sdsa_quant.files.safetensors_reader import open_safetensors
from sdsa_quant.files.safetensors_writer import HeaderEntry, StreamedFile

from .inputs import StudyInputs
from .layers import StudyLayer
from .settings import StudySettings
from .unit import UnitResult

RECORD_VERSION = "1"  # raised when a result file means something else

_DESCRIPTION = "study.json"
_FINGERPRINT = "fingerprint"
_RESULT_FILES = "layer-*.request-*.safetensors"
_DTYPES = {torch.float64: "F64", torch.int64: "I64"}


class StudyFolder:
    """Result files of one study in a folder.

    Parameters
    ----------
    path : Path
        The folder; it need not exist yet.
    description : mapping
        What the study is, from `describe_study`: JSON values only.
    """

    def __init__(self, path: Path, description: Mapping[str, Any]) -> None:
        self.path = path
        self._text = json.dumps(description, indent=1, sort_keys=True)
        self.fingerprint = hashlib.sha256(self._text.encode()).hexdigest()

    def prepare(self, *, restart: bool) -> None:
        """Make the folder, or continue in the one of an earlier run of the same study.

        Parameters
        ----------
        restart : bool
            Whether to remove the result files of an earlier run, whatever its study.

        Raises
        ------
        ValueError
            The folder is of another study and `restart` is false, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot be made: {error.strerror}", source=self.path) from None
        description = self.path / _DESCRIPTION
        if description.exists():
            earlier = description.read_text(encoding="utf-8")
            if earlier == self._text and not restart:
                return
            if not restart:
                raise InputError(
                    f"holds an unfinished study of other inputs or settings "
                    f"({_difference(earlier, self._text)})",
                    source=self.path,
                    hint=Hint("force", "to start over", True),
                )
            self.remove()
            self.path.mkdir()
        write_text(description, self._text, force=True)

    def remove(self) -> None:
        """Remove the result files, the description and, if nothing else is in it, the folder."""
        for pattern in (_RESULT_FILES, ".layer-*.request-*.partial"):
            for file in self.path.glob(pattern):
                file.unlink()
        (self.path / _DESCRIPTION).unlink(missing_ok=True)
        if self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def remove_unless_used(self) -> None:
        """Remove a folder without any result file: a later run could not go on from it."""
        if not any(self.path.glob(_RESULT_FILES)):
            self.remove()

    def has(self, layer: int, request: int) -> bool:
        """Whether the unit is done."""
        return self._path_of(layer, request).exists()

    def write(self, layer: int, request: int, result: UnitResult) -> None:
        """Store a unit's result.

        Raises
        ------
        ValueError
            The disk is full or failing.
        """
        tensors = _to_tensors(result)
        entries = {
            name: HeaderEntry(_DTYPES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
            for name, tensor in tensors.items()
        }
        metadata = {_FINGERPRINT: self.fingerprint}
        with StreamedFile(self._path_of(layer, request), entries, metadata, tensors, force=True):
            pass  # every tensor is known from the start

    def read(self, layer: int, request: int) -> UnitResult:
        """Read a unit's result back, the same bits.

        Raises
        ------
        ValueError
            There is no such result file, it is damaged, or it is of another study.
        """
        path = self._path_of(layer, request)
        with open_safetensors(path) as file:
            if (file.metadata() or {}).get(_FINGERPRINT) != self.fingerprint:
                raise InputError(
                    "is the result file of another study",
                    source=path,
                    hint=Hint("force", "to start over", True),
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _from_tensors(tensors)

    def _path_of(self, layer: int, request: int) -> Path:
        return self.path / f"layer-{layer:04}.request-{request:06}.safetensors"


def describe_study(
    inputs: StudyInputs, settings: StudySettings, layers: Sequence[StudyLayer], device: str
) -> dict[str, Any]:
    """What makes two runs the same study: inputs, their files, settings and the kind of device."""
    files = {path for layer in layers for path in (layer.keys.tensor.path, *layer.queries.files)}
    return {
        "record_version": RECORD_VERSION,
        "device": device.partition(":")[0],
        "inputs": {name: _plain(value) for name, value in asdict(inputs).items()},
        "settings": {name: _plain(value) for name, value in asdict(settings).items()},
        "layers": [layer.name for layer in layers],
        "files": [_describe_file(path) for path in sorted(files)],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.resolve())
    return list(value) if isinstance(value, tuple) else value


def _describe_file(path: Path) -> list[Any]:
    """Enough to notice that a file has changed, without reading all of it."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _difference(earlier: str, now: str) -> str:
    try:
        before, after = json.loads(earlier), json.loads(now)
        names = [name for name in after if before.get(name) != after[name]]
    except (ValueError, AttributeError):
        return "its description is damaged"
    return "different " + ", ".join(names)


def _to_tensors(result: UnitResult) -> dict[str, torch.Tensor]:
    return {
        "rows": result.rows,
        "error_counts": result.error_counts,
        "channel_errors": result.channel_errors,
        "channel_squares": result.channel_squares,
        "gains": torch.tensor(result.gains, dtype=torch.float64),
        "profiles": torch.tensor([profile.counts() for profile in result.profiles]),
    }


def _from_tensors(tensors: Mapping[str, torch.Tensor]) -> UnitResult:
    return UnitResult(
        rows=tensors["rows"],
        error_counts=tensors["error_counts"],
        channel_errors=tensors["channel_errors"],
        channel_squares=tensors["channel_squares"],
        gains=tuple(tensors["gains"].tolist()),
        profiles=tuple(BlockProfile.from_counts(each) for each in tensors["profiles"].tolist()),
    )
