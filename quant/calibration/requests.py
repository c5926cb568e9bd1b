"""The sums of each request of a layer, so that a request is measured with those of the others."""

from __future__ import annotations

from collections.abc import Sequence

from sdsa_quant.errors import Hint, InputError
from sdsa_quant.layout import DIM
from sdsa_quant.study.layers import StudyLayer

from .layer import LayerCalibration, Moments

_ROWS_AT_A_TIME = 16384


def request_moments(layer: StudyLayer) -> list[Moments]:
    """The sums of each request of a layer.

    Raises
    ------
    ValueError
        A key or a query value is not finite.
    """
    found = []
    for request, rows in enumerate(layer.request_rows):
        moments = Moments()
        for _, keys in layer.key_chunks(request):
            moments.add_keys(keys)
        for start in range(0, len(rows), _ROWS_AT_A_TIME):
            moments.add_rows(layer.read_query(rows[start : start + _ROWS_AT_A_TIME]).view(-1, DIM))
        found.append(moments)
    return found


def held_out(layer: StudyLayer, moments: Sequence[Moments], request: int) -> LayerCalibration:
    """The calibration of all requests of a layer except one, whose figures it may serve.

    Raises
    ------
    ValueError
        The other requests have no keys or no query rows.
    """
    others = Moments.total(each for index, each in enumerate(moments) if index != request)
    if not others.keys or not others.rows:
        raise InputError(
            f"tensor {layer.name} must have other requests with query rows than request {request} "
            f"to calibrate on, which a figure of it may not be part of",
            source=layer.keys.tensor.path,
            hint=Hint("calibration", "to use another capture's statistics"),
        )
    return LayerCalibration.of(f"{layer.name} without request {request}", others)
