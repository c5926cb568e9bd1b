"""`quantize_write_nvfp4`: quantize keys into slots of a paged cache, and query rows beside them."""

from __future__ import annotations

import torch

from sdsa_quant.errors import InputError, UnsupportedError
from sdsa_quant.formats.blocks import FLOAT_DTYPES
from sdsa_quant.formats.nvfp4 import AMAX_OVER_6, NONFINITE_MESSAGE, quantize_nvfp4
from sdsa_quant.layout import (
    DIM,
    KEY_ALIGNMENT_BYTES,
    PACKED_DIM,
    PAGE,
    SCALE_ALIGNMENT_BYTES,
    SCALES_PER_KEY,
)

from .checks import (
    describe,
    require_alignment,
    require_dtype,
    require_page_contiguous,
    require_row_contiguous,
    require_shape,
    scale_bytes_of,
)
from .device import can_find
from .problem import WriteProblem

_QUERY_ARGUMENTS = ("query", "query_rows", "packed_query", "query_scales")


def quantize_write_nvfp4(
    key: torch.Tensor,
    slots: torch.Tensor,
    query: torch.Tensor | None = None,
    query_rows: torch.Tensor | None = None,
    *,
    key_cache: torch.Tensor,
    key_scales: torch.Tensor,
    packed_query: torch.Tensor | None = None,
    query_scales: torch.Tensor | None = None,
) -> None:
    """Quantize keys into a paged cache and query rows into rows, as `indexer_scores` reads them.

    Every block of 16 values gets the scale ``e4m3(amax / 6)``; there is no global scale. The bits
    are those of `sdsa_quant.quantize_nvfp4` with ``nonfinite="saturate"``. The signature and the
    meaning are those of ``flashinfer.sdsa.quantize_write_index_qk_nvfp4``; beyond it, the query may
    be left out, values may be float32, and every GPU from SM80 and every CPU will do. On a GPU it
    is one launch without host synchronization, and can be captured after one call.

    Parameters
    ----------
    key : torch.Tensor
        Input, bfloat16, float16 or float32 ``[tokens, 128]``; rows contiguous and a multiple of 16
        bytes apart.
    slots : torch.Tensor
        Input, int64 ``[tokens]``: slot ``s`` is key ``s % 64`` of page ``s // 64``. Negative slots
        are skipped. No slot may occur twice.
    query : torch.Tensor, optional
        Input, like `key` ``[queries, 128]`` and of its dtype.
    query_rows : torch.Tensor, optional
        Input, int64 ``[queries]``: rows of `packed_query`. Negative rows are skipped.
    key_cache : torch.Tensor
        Output, uint8 ``[pages, 64, 64]``; page stride a multiple of 16 bytes. Only the slots given
        are written.
    key_scales : torch.Tensor
        Output, float8_e4m3fn (or its uint8 bytes) ``[pages, 64, 8]``; page stride a multiple of 8
        bytes.
    packed_query : torch.Tensor, optional
        Output, uint8 ``[rows, 64]``, row stride a multiple of 16 bytes.
    query_scales : torch.Tensor, optional
        Output, float8_e4m3fn (or its uint8 bytes) ``[rows, 8]``, row stride a multiple of 8 bytes.

    Raises
    ------
    TypeError
        An argument is no tensor or has the wrong dtype.
    ValueError
        A shape, stride, alignment or device is wrong, or some but not all of the query's arguments
        are given.
    RuntimeError
        The device cannot do it, or a first call, which compiles, is made inside a capture.
    """
    keys = _check_keys(key, slots, key_cache, key_scales)
    queries = None
    if query is None or query_rows is None or packed_query is None or query_scales is None:
        _check_no_query(query, query_rows, packed_query, query_scales)
    else:
        queries = _check_queries(key.dtype, query, query_rows, packed_query, query_scales)
    for rows in (keys, queries):
        if rows is not None:
            _check_devices(rows, key_cache.device)
    if key_cache.device.type == "cpu":
        _write_on_the_cpu(keys)
        if queries is not None:
            _write_on_the_cpu(queries)
        return
    if key_cache.device.type != "cuda" or not can_find("triton"):
        raise UnsupportedError(
            f"quantize_write_nvfp4 needs CPU tensors, or CUDA tensors and triton, "
            f"got {key_cache.device}"
        )
    from .triton.write import launch

    launch(keys, queries)


def quantize_keys(
    values: torch.Tensor, *, nonfinite: str = "error", rule: str = AMAX_OVER_6
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `sdsa_quant.quantize_nvfp4` returns for ``[n, 128]`` keys, in one launch on a GPU.

    The rule ``4over6``, which the kernel does not have, is left to `quantize_nvfp4`. Parameters,
    results and errors are those of that function.
    """
    if rule != AMAX_OVER_6:
        return quantize_nvfp4(values, nonfinite=nonfinite, rule=rule)
    if nonfinite == "error" and not bool(values.isfinite().all()):
        raise InputError(NONFINITE_MESSAGE)
    count = values.shape[0]
    pages = -(-count // PAGE)
    codes = values.new_empty((pages, PAGE, PACKED_DIM), dtype=torch.uint8)
    scales = values.new_empty((pages, PAGE, SCALES_PER_KEY), dtype=torch.uint8)
    slots = torch.arange(count, device=values.device)
    quantize_write_nvfp4(values.contiguous(), slots, key_cache=codes, key_scales=scales)
    return codes.flatten(0, 1)[:count], scales.flatten(0, 1)[:count].view(torch.float8_e4m3fn)


def _check_values(name: str, values: torch.Tensor, places_name: str, places: torch.Tensor) -> None:
    wanted = f"bfloat16, float16 or float32 [n, {DIM}]"
    require_dtype(name, values, FLOAT_DTYPES, wanted)
    require_shape(name, values, (None, DIM), wanted)
    require_row_contiguous(name, values)
    require_alignment(name, values, KEY_ALIGNMENT_BYTES)
    count = values.shape[0]
    wanted = f"int64 [{count}], one entry for each row of {name}"
    require_dtype(places_name, places, (torch.int64,), wanted)
    require_shape(places_name, places, (count,), wanted)
    require_row_contiguous(places_name, places)


def _check_keys(
    key: torch.Tensor, slots: torch.Tensor, key_cache: torch.Tensor, key_scales: torch.Tensor
) -> WriteProblem:
    _check_values("key", key, "slots", slots)
    wanted = f"uint8 [pages, {PAGE}, {PACKED_DIM}]"
    require_dtype("key_cache", key_cache, (torch.uint8,), wanted)
    require_shape("key_cache", key_cache, (None, PAGE, PACKED_DIM), wanted)
    require_page_contiguous("key_cache", key_cache)
    require_alignment("key_cache", key_cache, KEY_ALIGNMENT_BYTES)
    pages = key_cache.shape[0]
    wanted = f"float8_e4m3fn or uint8 [{pages}, {PAGE}, {SCALES_PER_KEY}]"
    scale_bytes = scale_bytes_of("key_scales", key_scales, wanted)
    require_shape("key_scales", scale_bytes, (pages, PAGE, SCALES_PER_KEY), wanted)
    require_page_contiguous("key_scales", scale_bytes)
    require_alignment("key_scales", scale_bytes, SCALE_ALIGNMENT_BYTES)
    return WriteProblem(key, slots, key_cache, scale_bytes)


def _check_queries(
    dtype: torch.dtype,
    query: torch.Tensor,
    query_rows: torch.Tensor,
    packed_query: torch.Tensor,
    query_scales: torch.Tensor,
) -> WriteProblem:
    _check_values("query", query, "query_rows", query_rows)
    if query.dtype != dtype:
        raise InputError(f"query must have the dtype of key, {dtype}, got {describe(query)}")
    wanted = f"uint8 [rows, {PACKED_DIM}]"
    require_dtype("packed_query", packed_query, (torch.uint8,), wanted)
    require_shape("packed_query", packed_query, (None, PACKED_DIM), wanted)
    require_row_contiguous("packed_query", packed_query)
    require_alignment("packed_query", packed_query, KEY_ALIGNMENT_BYTES)
    rows = packed_query.shape[0]
    wanted = f"float8_e4m3fn or uint8 [{rows}, {SCALES_PER_KEY}]"
    scale_bytes = scale_bytes_of("query_scales", query_scales, wanted)
    require_shape("query_scales", scale_bytes, (rows, SCALES_PER_KEY), wanted)
    require_row_contiguous("query_scales", scale_bytes)
    require_alignment("query_scales", scale_bytes, SCALE_ALIGNMENT_BYTES)
    return WriteProblem(query, query_rows, packed_query, scale_bytes)


def _check_no_query(*arguments: torch.Tensor | None) -> None:
    given = [name for name, it in zip(_QUERY_ARGUMENTS, arguments, strict=True) if it is not None]
    if given:
        raise InputError(
            f"{', '.join(_QUERY_ARGUMENTS)} must be given together or not at all, "
            f"got {' and '.join(given)}"
        )


def _check_devices(rows: WriteProblem, device: torch.device) -> None:
    for tensor in (rows.values, rows.places, rows.codes, rows.scales):
        if tensor.device != device:
            raise InputError(
                f"every tensor must be on {device}, the device of key_cache, got "
                f"{describe(tensor)} on {tensor.device}"
            )


def _write_on_the_cpu(rows: WriteProblem) -> None:
    kept = rows.places >= 0
    places = rows.places[kept]
    codes, scales = quantize_nvfp4(rows.values[kept], nonfinite="saturate")
    scale_bytes = scales.view(torch.uint8)
    if rows.codes.dim() == 2:
        rows.codes[places] = codes
        rows.scales[places] = scale_bytes
    else:
        page, key = places // PAGE, places % PAGE
        rows.codes[page, key] = codes
        rows.scales[page, key] = scale_bytes
