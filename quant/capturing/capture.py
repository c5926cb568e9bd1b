"""A context manager that captures what a model's indexers score and select in any forward pass."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.errors import CheckFailedError, InputError, UnsupportedError
from sdsa_quant.files.outputs import check_outputs, folders_made

from .check import Agreement
from .indexers import KNOWN_CLASSES, Indexer, find_indexers
from .layer import CapturedLayer

FORMAT = "sdsa-capture"
VERSION = "1"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?=\.|$)")


@dataclass
class Capture:
    """A capture under way, and what came of it."""

    folder: Path
    """Where the files go, one for each layer."""
    layers: dict[str, CapturedLayer]
    """Layers by name."""
    every: int
    """Of the positions of a text, one in so many keeps its query row."""
    metadata: dict[str, str]
    """Header fields of every file, to which a caller may add until the capture ends."""
    offset: int = 0
    """The first position that keeps its query row, less than `every`."""
    agreements: dict[str, Agreement] = field(default_factory=dict)
    """Of each layer, once the capture has ended."""
    paths: dict[str, Path] = field(default_factory=dict)
    """The file of each layer, once the capture has ended."""

    def path_of(self, name: str) -> Path:
        """The file of a layer."""
        return self.folder / f"{name}.safetensors"


@checked_arguments
@contextlib.contextmanager
def sdsa_capture(
    model: torch.nn.Module,
    output: str | Path,
    *,
    every: int = 1,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
) -> Iterator[Capture]:
    """Capture keys, query rows, weights and selections of every indexer of a model.

    Each forward pass inside the block is captured: a whole text, a batch of texts of one length, or
    a part of a text that goes on where the last one ended (with a cache). When the block ends, the
    selection is computed anew from what was captured; only if every row selects what the model
    selected, ties of float32 aside, are the files written. Memory does not grow with the texts.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers with an indexer in it, on any device, not compiled.
    output : str or Path
        Folder for one safetensors file a layer; made if it does not exist.
    every : int
        Keep the query row of one position in so many. Keys are kept of every position.
    metadata : mapping of str to str, optional
        More header fields, such as the model's name.
    force : bool
        Whether to replace files that exist.

    Yields
    ------
    Capture
        Its `offset` may be set between texts, and its `metadata` filled.

    Raises
    ------
    ValueError
        Files exist, a text is padded, or forward passes do not follow on from each other.
    UnsupportedError
        The model has no indexer, or one that is not known.
    CheckFailedError
        Rows select from what was captured what the model did not; nothing is written then.
    """
    if every < 1:
        raise InputError(f"must be at least 1, got {every}", argument="every")
    indexers = find_indexers(model)
    if not indexers:
        raise UnsupportedError(
            f"{type(model).__name__} has no indexer; known are {', '.join(KNOWN_CLASSES)}"
        )
    folder = Path(output)
    names = layer_names(list(indexers))
    layers = {
        names[path]: CapturedLayer(names[path], indexer.rule(), folder)
        for path, indexer in indexers.items()
    }
    capture = Capture(folder, layers, every, dict(metadata or {}))
    with _writing(capture, force=force), contextlib.ExitStack() as stack:
        stack.enter_context(_refusing_padding(model))
        for path, indexer in indexers.items():
            stack.enter_context(_captured(capture, layers[names[path]], indexer))
        kinds = {type(indexer.module).__name__ for indexer in indexers.values()}
        capture.metadata.setdefault("class", type(model).__name__)
        capture.metadata.setdefault("indexer", ", ".join(sorted(kinds)))
        yield capture
        for path, indexer in indexers.items():
            layer = layers[names[path]]
            layer.facts, layer.fields = indexer.facts()


@contextlib.contextmanager
def _writing(capture: Capture, *, force: bool) -> Iterator[None]:
    """Check and write the layers when the block ends well; let go of their files in any case."""
    paths = {name: capture.path_of(name) for name in capture.layers}
    check_outputs(list(paths.values()), [], force=force)
    with folders_made(list(paths.values())), contextlib.ExitStack() as stack:
        for layer in capture.layers.values():
            stack.callback(layer.close)
        yield
        write_layers(capture, force=force)


def write_layers(capture: Capture, *, force: bool) -> None:
    """Check every layer, then write their files.

    Raises
    ------
    CheckFailedError
        A row of a layer selects what the model did not.
    ValueError
        Nothing was captured, or a file cannot be written.
    """
    for name, layer in capture.layers.items():
        if not layer.rows:
            raise InputError(f"layer {name} was not called, or has no query row to keep")
    for name, layer in capture.layers.items():
        if layer.rule is None:
            continue
        agreement = capture.agreements[name] = layer.check()
        if agreement.same < agreement.rows:
            raise CheckFailedError(
                f"{name}: {agreement.rows - agreement.same} of {agreement.rows} rows select from "
                f"what was captured what the model did not, first row {agreement.first_other}; "
                f"nothing is written"
            )
    for name, layer in capture.layers.items():
        fields = {"format": FORMAT, "version": VERSION, **capture.metadata}
        if layer.rule is not None:
            agreement = capture.agreements[name]
            fields |= layer.rule.metadata()
            fields["checked"] = f"{agreement.same} of {agreement.rows} rows"
            fields["ties"] = str(agreement.tied)
        capture.paths[name] = capture.path_of(name)
        layer.write(capture.paths[name], fields, force=force)


def layer_names(paths: list[str]) -> dict[str, str]:
    """What layers are called whose modules have these names: ``layers.3``, or the module's name."""
    numbers = {path: found[-1] for path in paths if (found := _LAYER.findall(path))}
    if len(numbers) == len(paths) and len(set(numbers.values())) == len(paths):
        return {path: f"layers.{number}" for path, number in numbers.items()}
    return {path: path for path in paths}


@contextlib.contextmanager
def _captured(capture: Capture, layer: CapturedLayer, indexer: Indexer) -> Iterator[None]:
    """Have the calls of an indexer's ``forward`` added to a layer."""
    module, forward = indexer.module, indexer.module.forward

    @functools.wraps(forward)
    def capturing(*args: Any, **kwargs: Any) -> Any:
        output, call = indexer.run(forward, args, kwargs)
        layer.add(call, capture.every, capture.offset)
        return output

    module.forward = capturing  # of the instance, before that of its class
    try:
        yield
    finally:
        del module.forward


@contextlib.contextmanager
def _refusing_padding(model: torch.nn.Module) -> Iterator[None]:
    def refuse(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask.all()):
            raise InputError("texts of a capture must not be padded: give texts of one length")

    handle = model.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
