"""The work folder of a study: a result file for each finished unit, so that a run can be resumed.

A result file is a small safetensors file that appears whole or not at all. It holds a `UnitResult`
bit for bit, so a report does not depend on which process wrote the files, or when. Each carries the
fingerprint of its study and a digest of its tensors: what another study made, or what is damaged,
is never read, and what this study did not make is never replaced or removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import torch

from sdsa_quant import __version__
from sdsa_quant.accuracy.blocks import BlockProfile
from sdsa_quant.environment import git_revision, installed_version
from sdsa_quant.errors import Hint, InputError, SdsaError
from sdsa_quant.files.atomic_file import write_text
from sdsa_quant.files.safetensors_reader import header_metadata, open_safetensors
from sdsa_quant.files.safetensors_writer import HeaderEntry, StreamedFile
from sdsa_quant.files.tensor_memory import tensor_memory
from sdsa_quant.files.tensor_source import source_files
from sdsa_quant.files.text import read_text

from .inputs import StudyInputs
from .layers import StudyLayer
from .settings import StudySettings
from .unit import UnitResult

RECORD_VERSION = "4"  # raised when a result file means something else

_DESCRIPTION = "study.json"
_VERSION_FIELD = "record_version"
_FINGERPRINT = "fingerprint"
_DIGEST = "sha256"
_RESULT_FILES = "layer-*.request-*.safetensors"
_PARTIAL = re.compile(r"\.layer-\d+\.request-\d+\.safetensors\.[0-9a-f]{8}\.partial")
_DTYPES = {torch.float64: "F64", torch.int64: "I64"}
# Of each input file: all of a small one, else its header and spots from the first byte to the last.
_WHOLE_FILE_BYTES = 4 << 20
_SPOTS = 64
_SPOT_BYTES = 16 << 10
_START_OVER = Hint("force", "to start over", True)


class _DamagedError(InputError):
    """A result file whose tensors are not those that were written."""


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
        self.fingerprint = _fingerprint(self._text)

    def prepare(self, *, restart: bool) -> None:
        """Make the folder, or continue in the one of an earlier run of the same study.

        Parameters
        ----------
        restart : bool
            Whether to remove the result files of an earlier run, whatever its study.

        Raises
        ------
        ValueError
            The folder is of another study and `restart` is false, it holds a file that no study
            made under a name that this one needs, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot be made: {error.strerror}", source=self.path) from None
        description = self.path / _DESCRIPTION
        earlier = self._earlier()
        if earlier is not None and restart:
            self._remove_study(earlier)
            self.path.mkdir(exist_ok=True)
        elif earlier is not None and earlier != self._text:
            raise InputError(
                f"holds an unfinished study of other inputs or settings "
                f"({_difference(earlier, self._text)})",
                source=self.path,
                hint=_START_OVER,
            )
        for file in sorted(self.path.glob(_RESULT_FILES)):
            if not _bears(file, self.fingerprint):
                raise InputError("is not a result file of this study; move it away", source=file)
        write_text(description, self._text, force=True)

    @property
    def is_unfinished(self) -> bool:
        """Whether an earlier run of this very study has left its description."""
        return self._earlier() == self._text

    def _earlier(self) -> str | None:
        """The description that is there; None without one."""
        path = self.path / _DESCRIPTION
        if not os.path.lexists(path):
            return None
        try:
            text = read_text(path)
            description = json.loads(text)
        except (SdsaError, ValueError, RecursionError):
            description = None
        if not isinstance(description, dict) or _VERSION_FIELD not in description:
            raise InputError(
                "is not the description of a study, or is damaged; move it away", source=path
            )
        return text

    @contextlib.contextmanager
    def held(self, *, shared: bool = False) -> Iterator[None]:
        """Keep other runs out of the folder for the time of the block.

        Parameters
        ----------
        shared : bool
            Whether others that share it too may come in: tasks that measure parts of one study.

        Raises
        ------
        ValueError
            Another run is at work in it, or it cannot be made.
        """
        folder = self._locked(fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(folder)
            with contextlib.suppress(OSError):  # it has files, or is gone
                self.path.rmdir()

    def _locked(self, kind: int) -> int:
        """The open folder, locked; another run may remove it between the two."""
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except OSError as error:
                raise InputError(f"cannot be made: {error.strerror}", source=self.path) from None
            try:
                fcntl.flock(folder, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(folder)
                raise InputError("another run is at work in it", source=self.path) from None
            except OSError:
                return folder  # a file system without locks: nothing tells two runs apart
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(folder), self.path.stat()):
                    return folder
            os.close(folder)

    def remove(self) -> None:
        """Remove the result files, the description and, if nothing else is in it, the folder."""
        self._remove_study(self._text)

    def _remove_study(self, description: str) -> None:
        """Remove what bears the fingerprint of a described study, and the description, last."""
        fingerprint = _fingerprint(description)
        for file in self.path.glob(_RESULT_FILES):
            if _bears(file, fingerprint):
                file.unlink()
        for file in self.path.glob(".layer-*.partial"):
            if _PARTIAL.fullmatch(file.name) and file.is_file() and not file.is_symlink():
                file.unlink()
        path = self.path / _DESCRIPTION
        with contextlib.suppress(InputError):
            if self._earlier() == description:
                path.unlink(missing_ok=True)
        if self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def remove_unless_used(self) -> None:
        """Remove a folder without any result file: a later run could not go on from it."""
        if not any(self.path.glob(_RESULT_FILES)):
            self.remove()

    def has(self, layer: int, request: int) -> bool:
        """Whether the unit is done: a damaged result file counts as none."""
        if not self._path_of(layer, request).exists():
            return False
        try:
            self.read(layer, request)
        except _DamagedError:
            return False
        return True

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
        metadata = {_FINGERPRINT: self.fingerprint, _DIGEST: _digest(tensors)}
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
            metadata = file.metadata() or {}
            if metadata.get(_FINGERPRINT) != self.fingerprint:
                raise InputError(
                    "is the result file of another study", source=path, hint=_START_OVER
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get(_DIGEST) != _digest(tensors):
            raise _DamagedError("is damaged; the same call measures it again", source=path)
        return _from_tensors(tensors)

    def _path_of(self, layer: int, request: int) -> Path:
        return self.path / f"layer-{layer:04}.request-{request:06}.safetensors"


def described(folder: Path) -> dict[str, Any] | None:
    """What a work folder says of its study; None without one.

    Raises
    ------
    ValueError
        What is there is not the description of a study.
    """
    text = StudyFolder(folder, {})._earlier()
    return None if text is None else json.loads(text)


def describe_study(
    inputs: StudyInputs, settings: StudySettings, layers: Sequence[StudyLayer], device: str
) -> dict[str, Any]:
    """What makes two runs the same study: all that a result depends on.

    Inputs and settings, every file that is read (keys, lengths, query rows, requests, positions,
    indices), the versions that compute, and the kind of device.
    """
    files = {path for named in (inputs.keys, inputs.queries) for path in source_files(named)}
    return {
        _VERSION_FIELD: RECORD_VERSION,
        "device": device.partition(":")[0],
        "inputs": {name: _plain(value) for name, value in asdict(inputs).items()},
        "settings": {name: _plain(value) for name, value in asdict(settings).items()},
        "layers": [layer.name for layer in layers],
        "files": [_describe_file(path) for path in sorted(files)],
        "versions": {
            "sdsa": f"{__version__} {git_revision() or ''}".strip(),
            "torch": installed_version("torch"),
        },
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.resolve())
    return list(value) if isinstance(value, tuple) else value


def _describe_file(path: Path) -> list[Any]:
    """Enough to notice that a file has changed, even with its size and time kept."""
    try:
        status = path.stat()
        with path.open("rb") as file:
            content = _sample_hash(file, status.st_size)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", source=path) from None
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, content]


def _sample_hash(file: BinaryIO, size: int) -> str:
    digest = hashlib.sha256()
    if size <= _WHOLE_FILE_BYTES:
        digest.update(file.read())
        return digest.hexdigest()
    header = int.from_bytes(file.read(8), "little")
    digest.update(file.read(min(header, _WHOLE_FILE_BYTES)))
    for spot in range(_SPOTS):
        file.seek((size - _SPOT_BYTES) * spot // (_SPOTS - 1))
        digest.update(file.read(_SPOT_BYTES))
    return digest.hexdigest()


def _fingerprint(description: str) -> str:
    return hashlib.sha256(description.encode()).hexdigest()


def _bears(file: Path, fingerprint: str) -> bool:
    """Whether a study of this fingerprint made a file."""
    return not file.is_symlink() and header_metadata(file).get(_FINGERPRINT) == fingerprint


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor_memory(tensor.contiguous()))
    return digest.hexdigest()


def _difference(earlier: str, now: str) -> str:
    before, after = json.loads(earlier), json.loads(now)
    return "different " + ", ".join(name for name in after if before.get(name) != after[name])


def _to_tensors(result: UnitResult) -> dict[str, torch.Tensor]:
    return {
        "rows": result.rows,
        "error_counts": result.error_counts,
        "channel_errors": result.channel_errors,
        "channel_squares": result.channel_squares,
        "gains": torch.tensor(result.gains, dtype=torch.float64, device="cpu"),
        "profiles": _counts(result.profiles),
        "query_profiles": _counts(result.query_profiles),
        "query_rows_lost": torch.tensor(result.query_rows_lost, dtype=torch.int64, device="cpu"),
    }


def _from_tensors(tensors: Mapping[str, torch.Tensor]) -> UnitResult:
    return UnitResult(
        rows=tensors["rows"],
        error_counts=tensors["error_counts"],
        channel_errors=tensors["channel_errors"],
        channel_squares=tensors["channel_squares"],
        gains=tuple(tensors["gains"].tolist()),
        profiles=_profiles(tensors["profiles"]),
        query_profiles=_profiles(tensors["query_profiles"]),
        query_rows_lost=tuple(tensors["query_rows_lost"].tolist()),
    )


def _counts(profiles: Sequence[BlockProfile]) -> torch.Tensor:
    return torch.tensor([profile.counts() for profile in profiles], dtype=torch.int64, device="cpu")


def _profiles(counts: torch.Tensor) -> tuple[BlockProfile, ...]:
    return tuple(BlockProfile.from_counts(each) for each in counts.tolist())
