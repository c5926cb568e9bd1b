"""Calibration files: safetensors with three tensors and two counts for each layer.

``NAME.key_mean`` float64 ``[128]``, ``NAME.key_covariance`` and ``NAME.query_covariance`` float64
``[128, 128]``, ``NAME.counts`` int64 ``[2]`` (keys and query rows). ``NAME`` is that of the tensor
of keys. The metadata has ``format: sdsa-calibration``, ``version: 1`` and ``sources``, a JSON list
of the captures: file names of keys and query rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.errors import InputError
from sdsa_quant.files.safetensors_reader import open_safetensors
from sdsa_quant.files.safetensors_writer import HeaderEntry, StreamedFile
from sdsa_quant.layout import DIM

from .layer import LayerCalibration, Moments

FORMAT = "sdsa-calibration"
NONE = "none"  # what stands for no digest in a cache's header
VERSION = "1"
_SHAPES = {
    "key_mean": ("F64", torch.float64, (DIM,)),
    "key_covariance": ("F64", torch.float64, (DIM, DIM)),
    "query_covariance": ("F64", torch.float64, (DIM, DIM)),
    "counts": ("I64", torch.int64, (2,)),
}


@dataclass(frozen=True, slots=True)
class Source:
    """A capture that a calibration was made from."""

    keys: str
    """Name of the file or folder of keys."""

    queries: str
    """Name of the file or folder of query rows."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The statistics of some layers, and where they come from."""

    layers: tuple[LayerCalibration, ...]
    sources: tuple[Source, ...]
    path: Path | None = None  # of the file that it was read from

    def layer(self, name: str) -> LayerCalibration:
        """That of a tensor of keys, by its name; a calibration of one layer goes with any.

        Raises
        ------
        ValueError
            There are several layers and none has that name.
        """
        for layer in self.layers:
            if layer.name == name or len(self.layers) == 1:
                return layer
        names = ", ".join(layer.name for layer in self.layers[:8])
        raise InputError(f"has no layer {name}; there are {names}", source=self.path)

    def layer_of_cache(self, digest: str) -> LayerCalibration:
        """The layer whose statistics a cache was made with, by the digest in its header.

        A cache that names none, with ``"none"``, goes with a calibration of one layer.

        Raises
        ------
        ValueError
            No layer has that digest, or the cache names none and there are several layers.
        """
        if digest != NONE:
            for layer in self.layers:
                if layer.digest == digest:
                    return layer
            raise InputError(
                f"has no layer of the statistics that the cache was made with, {digest}",
                source=self.path,
            )
        if len(self.layers) > 1:
            raise InputError(
                f"must have one layer for a cache that does not name its own, "
                f"got {len(self.layers)}",
                source=self.path,
            )
        return self.layers[0]

    def merged(self, other: Calibration) -> Calibration:
        """The statistics of both captures together, layer by layer.

        Raises
        ------
        ValueError
            They are of other layers.
        """
        ours, theirs = ([each.name for each in one.layers] for one in (self, other))
        if sorted(ours) != sorted(theirs):
            raise InputError(
                f"must be of the layers {', '.join(ours)}, got {', '.join(theirs)}",
                source=other.path,
            )
        layers = tuple(
            LayerCalibration.of(
                layer.name, Moments.total([layer.moments(), other.layer(layer.name).moments()])
            )
            for layer in self.layers
        )
        return Calibration(layers, self.sources + other.sources)


@checked_arguments
def write_calibration(path: str | Path, calibration: Calibration, *, force: bool = False) -> None:
    """Write a calibration file; it appears whole or not at all.

    Raises
    ------
    ValueError
        The file exists and `force` is false, or it cannot be written.
    """
    tensors = dict(_tensors(calibration.layers))
    dtypes = {name: dtype for name, (dtype, _, _) in _SHAPES.items()}
    entries = {
        name: HeaderEntry(dtypes[name.rpartition(".")[2]], tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    }
    sources = [{"keys": each.keys, "queries": each.queries} for each in calibration.sources]
    metadata = {"format": FORMAT, "version": VERSION, "sources": json.dumps(sources)}
    with StreamedFile(path, entries, metadata, tensors, force=force):
        pass  # every tensor is known from the start


def _tensors(layers: Sequence[LayerCalibration]) -> Iterator[tuple[str, torch.Tensor]]:
    for layer in layers:
        yield f"{layer.name}.key_mean", layer.key_mean
        yield f"{layer.name}.key_covariance", layer.key_covariance
        yield f"{layer.name}.query_covariance", layer.query_covariance
        yield f"{layer.name}.counts", _counts(layer)


@checked_arguments
def _counts(layer: LayerCalibration) -> torch.Tensor:
    return torch.tensor([layer.keys, layer.rows], dtype=torch.int64, device="cpu")


def read_calibration(path: str | Path) -> Calibration:
    """Read a calibration file.

    Raises
    ------
    ValueError
        It cannot be read, is not a calibration file, or holds what no calibration gives.
    """
    path = Path(path)
    with open_safetensors(path) as file:
        metadata = file.metadata() or {}
        for field, value in (("format", FORMAT), ("version", VERSION)):
            if metadata.get(field) != value:
                raise InputError(
                    f"is not a calibration: {field} must be {value}, got {metadata.get(field)!r}",
                    source=path,
                )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    names = [name.removesuffix(".counts") for name in tensors if name.endswith(".counts")]
    layers = tuple(_layer(path, name, tensors) for name in names)
    if not layers:
        raise InputError("is not a calibration: it has no layer", source=path)
    return Calibration(layers, _sources(path, metadata.get("sources", "")), path)


def _layer(path: Path, name: str, tensors: dict[str, torch.Tensor]) -> LayerCalibration:
    parts = {}
    for part, (stored, dtype, shape) in _SHAPES.items():
        tensor = tensors.get(f"{name}.{part}")
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise InputError(f"tensor {name}.{part} must be {stored} {list(shape)}", source=path)
        if not bool(tensor.isfinite().all()):
            raise InputError(f"tensor {name}.{part} must be finite", source=path)
        parts[part] = tensor
    keys, rows = parts.pop("counts").tolist()
    if keys < 1 or rows < 1:
        raise InputError(
            f"tensor {name}.counts must be at least 1, got {[keys, rows]}", source=path
        )
    layer = LayerCalibration(name, keys, rows, **parts)
    try:
        layer.key_weights("none"), layer.query_weights("none")
    except InputError as error:
        raise InputError(f"layer {name}: {error}", source=path) from None
    return layer


def _sources(path: Path, text: str) -> tuple[Source, ...]:
    try:
        return tuple(Source(str(each["keys"]), str(each["queries"])) for each in json.loads(text))
    except (ValueError, TypeError, KeyError):
        raise InputError("has no readable list of sources", source=path) from None
