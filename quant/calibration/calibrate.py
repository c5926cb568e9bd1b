"""Captured keys and query rows to a calibration file, streamed, one layer or many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sdsa_quant.arguments import checked_arguments
from sdsa_quant.files.outputs import check_outputs
from sdsa_quant.study.inputs import StudyInputs
from sdsa_quant.study.layers import open_layers

from .file import Calibration, Source, read_calibration, write_calibration
from .layer import LayerCalibration, Moments
from .requests import request_moments


@checked_arguments
def calibrate(
    keys: str | Path,
    queries: str | Path,
    output: str | Path,
    *,
    keys_pattern: str | None = None,
    queries_pattern: str | None = None,
    lengths: str | None = None,
    merge: Sequence[str | Path] = (),
    force: bool = False,
    advance: Callable[[int], None] | None = None,
) -> Calibration:
    """Take the statistics of captured keys and query rows, and write them to a file.

    Parameters
    ----------
    keys, queries : str or Path
        Unquantized keys and query rows: a safetensors file, a folder of them, or an index. Both may
        be the same.
    output : str or Path
        The calibration file; it appears whole or not at all.
    keys_pattern, queries_pattern : str, optional
        Names or patterns of the key and the query tensors, as for a study.
    lengths : str, optional
        Tensor of request lengths or offsets, or a pattern; padding of ``[requests, tokens, 128]``
        is left out by it.
    merge : sequence of str or Path
        Calibration files of other captures of the same layers, to add.
    force : bool
        Whether to replace an existing file.
    advance : callable, optional
        Called with the number of layers done since the last call.

    Returns
    -------
    Calibration
        What the file holds.

    Raises
    ------
    ValueError
        An input is not what it must be, a value is not finite, layers differ, or the file exists
        and `force` is false.
    """
    others = [read_calibration(path) for path in merge]
    layers = open_layers(
        StudyInputs(
            keys=Path(keys),
            queries=Path(queries),
            keys_pattern=keys_pattern,
            queries_pattern=queries_pattern,
            lengths=lengths,
        )
    )
    read = {layer.keys.tensor.path for layer in layers}
    check_outputs([Path(output)], [*read, *layers[0].queries.files], force=force)
    measured = []
    for layer in layers:
        moments = Moments.total(request_moments(layer))
        measured.append(LayerCalibration.of(layer.name, moments))
        if advance is not None:
            advance(1)
    source = Source(Path(keys).resolve().name, Path(queries).resolve().name)
    calibration = Calibration(tuple(measured), (source,))
    for other in others:
        calibration = calibration.merged(other)
    write_calibration(output, calibration, force=force)
    return calibration
