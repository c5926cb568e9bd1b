"""Cache files from captured keys in one call, one layer or many: `build_cache`.

`plan_caches` is its first half: it opens the keys, finds the lengths that go with them, names the
files, and refuses what can be refused before a key is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .arguments import checked_arguments
from .calibration.file import read_calibration
from .calibration.layer import LayerCalibration
from .captures.keys import (
    CapturedKeys,
    are_queries,
    can_be_keys,
    captured_keys,
    lengths_for,
    select_keys,
)
from .devices import known_device
from .errors import InputError
from .files.cache_header import INTERLEAVED, CacheHeader
from .files.outputs import check_outputs, folders_made, output_paths
from .files.tensor_source import INDEX_SUFFIX, StoredTensor, TensorSource, open_tensors
from .formats.nvfp4 import AMAX_OVER_6, COVARIANCE, quantize_nvfp4
from .formats.scale_order import LINEAR
from .formats.transforms import NONE, TransformChoice
from .layout import NVFP4
from .quantize_cache import QuantizedCache, Quantizer, quantize_cache, require_transformable

Progress = Callable[[int, int], None]  # keys done, and keys in all


@dataclass(frozen=True, slots=True)
class BuiltCaches:
    """What `build_cache` has written."""

    caches: tuple[QuantizedCache, ...]
    """One for each tensor of keys, in the natural order of the tensors' names."""

    seconds: float
    """What it took to convert and write them."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Caches that are to be built."""

    source: TensorSource
    """Where the keys are."""

    keys: tuple[CapturedKeys, ...]
    """The keys of each cache, divided into requests."""

    paths: tuple[Path, ...]
    """The file of each cache."""

    header: CacheHeader
    """Format, layout, scale order and rule of every cache."""

    transform: TransformChoice
    """What is to be done to the keys before they are stored."""

    nonfinite: str
    """What becomes of NaN and infinities: ``"error"`` or ``"saturate"``."""

    force: bool
    """Whether existing files are replaced."""

    calibrations: tuple[LayerCalibration | None, ...]
    """What the rule ``covariance`` needs, for each cache."""

    @property
    def total_keys(self) -> int:
        """Keys in all caches together."""
        return sum(sum(keys.context_lengths) for keys in self.keys)

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        quantize: Quantizer = quantize_nvfp4,
    ) -> BuiltCaches:
        """Write the caches; parameters and errors are those of `build_cache`."""
        started = time.perf_counter()
        total, done = self.total_keys, 0

        def advance(keys: int) -> None:
            nonlocal done
            done += keys
            if progress is not None:
                progress(done, total)

        with folders_made(self.paths):
            caches = tuple(
                quantize_cache(
                    keys,
                    path,
                    replace(self.header, source=_source_name(self.source, keys.tensor)),
                    device=device,
                    transform=self.transform,
                    nonfinite=self.nonfinite,
                    force=self.force,
                    advance=advance,
                    quantize=quantize,
                    calibration=calibration,
                )
                for keys, path, calibration in zip(
                    self.keys, self.paths, self.calibrations, strict=True
                )
            )
        return BuiltCaches(caches, time.perf_counter() - started)


@checked_arguments
def build_cache(
    keys: str | Path,
    output: str | Path,
    *,
    key_names: str | None = None,
    lengths: str | None = None,
    format: str = NVFP4,
    rule: str = AMAX_OVER_6,
    calibration: str | Path | None = None,
    layout: str = INTERLEAVED,
    scale_order: str = LINEAR,
    center: str = NONE,
    rotate: str = NONE,
    gain: str = NONE,
    nonfinite: str = "error",
    device: torch.device | str = "cpu",
    force: bool = False,
    progress: Progress | None = None,
    quantize: Quantizer = quantize_nvfp4,
) -> BuiltCaches:
    """Build paged cache files from captured keys, one for each tensor of keys.

    A file appears whole or not at all, and memory does not grow with the number of keys. Where one
    of several caches fails, those before it stay.

    Parameters
    ----------
    keys : str or Path
        A safetensors file, a folder of them, or a ``*.safetensors.index.json``. Keys are BF16, F16
        or F32 ``[tokens, 128]`` with the requests one after another, or ``[requests, tokens, 128]``
        padded and with `lengths`.
    output : str or Path
        The cache file. For several tensors of keys a folder (an existing one, or a text that ends
        in a slash), or a path in which ``{name}`` stands for the tensor's name.
    key_names : str, optional
        A tensor's name, or a pattern with ``*``, ``?`` and ``[..]`` for one cache each. By default
        the tensor ``keys``, ``key`` or ``k``, or else the only float tensor of 128 columns.
    lengths : str, optional
        Integer tensor of each request's length, or of offsets from 0 as in ``cu_seqlens``; or a
        pattern, of which each tensor of keys takes the one that goes with it
        (`sdsa_quant.captures.names`). By default one of a usual name that lies beside the keys, or
        else all keys are one request, as they are with ``"none"``.
    format : str
        ``"nvfp4"`` or ``"bf16"``.
    rule : str
        How NVFP4 codes and scales are chosen: ``"amax/6"``, ``"4over6"``, ``"search"`` or
        ``"covariance"``.
    calibration : str or Path, optional
        The calibration file that the rule ``"covariance"`` needs; each tensor of keys takes the
        layer of its name. With `center` its mean key is subtracted.
    layout : str
        ``"interleaved"``: a page's keys and scales in one record. ``"separate"``: two tensors.
    scale_order : str
        ``"linear"``, or ``"128x4"`` with the layout ``"separate"``.
    center, rotate, gain : str
        What is done to the keys before they are stored, see `sdsa_quant.formats.transforms`:
        ``"channel"``, ``"hadamard"``, and ``"auto"`` or a power of two such as ``"64"``.
    nonfinite : str
        ``"error"`` refuses NaN and infinities, ``"saturate"`` converts them, see `quantize_cache`.
    device : torch.device or str
        Where to convert.
    force : bool
        Whether to replace existing files.
    progress : callable, optional
        Called now and then with the keys done and the keys in all.
    quantize : callable
        What makes NVFP4 of keys: `quantize_nvfp4`, or another with the same arguments and bits.

    Returns
    -------
    BuiltCaches
        The caches, and what their format did to the keys.

    Raises
    ------
    InputError
        (A `ValueError`.) A file cannot be read or written, exists already, or is an input; no
        tensor or several are what a name means; lengths do not fit the keys; keys are quantized or
        not finite; an option is unknown or does not go with another. The error has the argument,
        the file and what would help as its attributes.
    DtypeError
        (A `TypeError`.) Keys are not floating point, or lengths are not integers.
    """
    device = known_device(device)
    plan = plan_caches(
        keys,
        output,
        key_names=key_names,
        lengths=lengths,
        header=CacheHeader(format, layout, scale_order, rule=rule),
        transform=TransformChoice(rotate, gain, center),
        nonfinite=nonfinite,
        force=force,
        calibration=calibration,
    )
    return plan.build(device=device, progress=progress, quantize=quantize)


def plan_caches(
    keys: str | Path,
    output: str | Path,
    *,
    key_names: str | None,
    lengths: str | None,
    header: CacheHeader,
    transform: TransformChoice,
    nonfinite: str,
    force: bool,
    calibration: str | Path | None = None,
) -> CachePlan:
    """Choose keys, lengths and files as `build_cache` says, and check all but the keys' values.

    Raises
    ------
    InputError, DtypeError
        As `build_cache`.
    """
    require_transformable(transform, nonfinite)
    source = open_tensors(keys)
    selected = tuple(
        captured_keys(source, tensor, lengths_for(source, tensor, key_names, lengths))
        for tensor in select_keys(source, key_names)
    )
    names = [_file_name(each.tensor) for each in selected]
    paths = tuple(output_paths(os.fspath(output), names))
    check_outputs(paths, [source.path], force=force)
    _refuse_captures_folder(source.path, paths)
    if calibration is None and header.rule == COVARIANCE:
        raise InputError(f"must be given for the rule {COVARIANCE}", argument="calibration")
    if calibration is not None and header.rule != COVARIANCE:
        raise InputError(
            f"is of use to the rule {COVARIANCE} only, got the rule {header.rule}",
            argument="calibration",
        )
    calibrations: tuple[LayerCalibration | None, ...] = (None,) * len(selected)
    if calibration is not None:
        check_outputs(paths, [Path(calibration)], force=True)
        read = read_calibration(calibration)
        calibrations = tuple(read.layer(each.name) for each in selected)
    return CachePlan(source, selected, paths, header, transform, nonfinite, force, calibrations)


def _refuse_captures_folder(captures: Path, paths: tuple[Path, ...]) -> None:
    """Refuse caches among the captures of a folder, which could not be read as captures again."""
    if not captures.is_dir() or any(captures.glob(f"*{INDEX_SUFFIX}")):
        return  # what an index leaves out is not read
    for path in paths:
        if path.parent.exists() and path.parent.samefile(captures):
            raise InputError(
                "would lie among the captures, which are read as one folder; give another one",
                source=path,
                argument="output",
            )


def _file_name(tensor: StoredTensor) -> str:
    """What stands for ``{name}``: without the colon of ``file:name``, at which scp splits."""
    return tensor.prefix.replace(":", "_") + tensor.name_in_file


def _source_name(source: TensorSource, tensor: StoredTensor) -> str:
    """The file that keys came from, and the tensor where others in the file could be keys too."""
    candidates = [
        other
        for other in source
        if other.path == tensor.path and can_be_keys(other) and not are_queries(other)
    ]
    name = tensor.path.name
    return f"{name}:{tensor.name_in_file}" if len(candidates) > 1 else name
