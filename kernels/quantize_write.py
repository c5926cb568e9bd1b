"""`quantize_write_nvfp4`: quantize keys into slots of a paged cache, and query rows beside them."""

from __future__ import annotations

import torch

from sdsa_quant.calibration.layer import LayerWeights
from sdsa_quant.errors import InputError, UnsupportedError
from sdsa_quant.formats.blocks import FLOAT_DTYPES
from sdsa_quant.formats.nvfp4 import (
    AMAX_OVER_6,
    COVARIANCE,
    NONFINITE_MESSAGE,
    RULES,
    quantize_nvfp4,
)
from sdsa_quant.formats.rule_weights import RuleWeights
from sdsa_quant.layout import (
    DIM,
    KEY_ALIGNMENT_BYTES,
    NVFP4,
    PACKED_DIM,
    PAGE,
    SCALES_PER_KEY,
)

from .checks import (
    check_page_scales,
    check_pages,
    check_row_scales,
    check_rows,
    describe,
    require_alignment,
    require_device,
    require_dtype,
    require_row_contiguous,
    require_shape,
)
from .device import can_find
from .problem import WriteProblem
from .switches import checked_mode
from .value_checks import check_slots, check_written_once

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
    rule: str = AMAX_OVER_6,
    calibration: LayerWeights | None = None,
) -> None:
    """Quantize keys into a paged cache and query rows into rows, as `indexer_scores` reads them.

    By the rule ``amax/6`` every block of 16 values gets the scale ``e4m3(amax / 6)``; there is no
    global scale. The bits, by any rule, are those of `sdsa_quant.quantize_nvfp4` with
    ``nonfinite="saturate"``. The signature and the meaning are those of
    ``flashinfer.sdsa.quantize_write_index_qk_nvfp4``; beyond it, the query may be left out, values
    may be float32, and any GPU from SM80 on and any CPU works. On a GPU it is one launch without
    host synchronization, and can be captured after one call.

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
    rule : str
        A rule of `sdsa_quant.quantize_nvfp4`.
    calibration : LayerWeights, optional
        What the rule ``"covariance"`` needs, and no other rule takes; on the device of the keys.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride, alignment or device is wrong, or some but not all of the query's arguments
        are given. On a CPU, and with ``SDSA_CHECK=1`` in the environment on any device, also a slot
        or query row that is past the last one; with that switch also one that occurs twice. The
        switch reads device values, so such a call cannot be captured.
    RuntimeError
        The device cannot do it, or a first call, which compiles, is made inside a capture.
    """
    keys = _check_keys(key, slots, key_cache, key_scales)
    queries = None
    if query is None or query_rows is None or packed_query is None or query_scales is None:
        _check_no_query(query, query_rows, packed_query, query_scales)
    else:
        queries = _check_queries(key, query, query_rows, packed_query, query_scales)
    _check_rule(rule, calibration, key_cache.device)
    halves = [(keys, "slots")] if queries is None else [(keys, "slots"), (queries, "query_rows")]
    on_the_cpu, checked = key_cache.device.type == "cpu", checked_mode()
    for rows, name in halves:
        if on_the_cpu or checked:
            check_slots(rows, name)
        if checked:
            check_written_once(rows, name)
    if on_the_cpu:
        weights = (None, None) if calibration is None else (calibration.keys, calibration.queries)
        for (rows, _), its_weights in zip(halves, weights, strict=False):
            _write_on_the_cpu(rows, rule, its_weights)
        return
    if key_cache.device.type != "cuda" or not can_find("triton"):
        raise UnsupportedError(
            f"quantize_write_nvfp4 needs CPU tensors, or CUDA tensors and triton, "
            f"got {key_cache.device}"
        )
    from .triton.write import launch

    launch(keys, queries, rule, calibration)


quantize_write_index_qk_nvfp4 = quantize_write_nvfp4  # the name that flashinfer.sdsa has for it


def quantize_keys(
    values: torch.Tensor,
    *,
    nonfinite: str = "error",
    rule: str = AMAX_OVER_6,
    weights: RuleWeights | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `sdsa_quant.quantize_nvfp4` returns for ``[n, 128]`` keys, in one launch on a GPU.

    Rules that the kernel does not have are left to `quantize_nvfp4`. Parameters, results and
    errors are those of that function.
    """
    if rule != AMAX_OVER_6:
        return quantize_nvfp4(values, nonfinite=nonfinite, rule=rule, weights=weights)
    if nonfinite == "error" and not bool(values.isfinite().all()):
        raise InputError(NONFINITE_MESSAGE)
    count = values.shape[0]
    pages = -(-count // PAGE)
    codes = values.new_empty((pages, PAGE, PACKED_DIM), dtype=torch.uint8)
    scales = values.new_empty((pages, PAGE, SCALES_PER_KEY), dtype=torch.uint8)
    slots = torch.arange(count, device=values.device, dtype=torch.int64)
    quantize_write_nvfp4(values.contiguous(), slots, key_cache=codes, key_scales=scales)
    return codes.flatten(0, 1)[:count], scales.flatten(0, 1)[:count].view(torch.float8_e4m3fn)


def _check_values(name: str, values: torch.Tensor, index_name: str, index: torch.Tensor) -> None:
    wanted = f"bfloat16, float16 or float32 [n, {DIM}]"
    require_dtype(name, values, FLOAT_DTYPES, wanted)
    require_shape(name, values, (None, DIM), wanted)
    require_row_contiguous(name, values)
    require_alignment(name, values, KEY_ALIGNMENT_BYTES)
    count = values.shape[0]
    wanted = f"int64 [{count}], one entry for each row of {name}"
    require_dtype(index_name, index, (torch.int64,), wanted)
    require_shape(index_name, index, (count,), wanted)
    require_row_contiguous(index_name, index)


def _check_keys(
    key: torch.Tensor, slots: torch.Tensor, key_cache: torch.Tensor, key_scales: torch.Tensor
) -> WriteProblem:
    _check_values("key", key, "slots", slots)
    check_pages(key_cache, (NVFP4,))
    scale_bytes = check_page_scales(key_scales, key_cache.shape[0], may_be_tiled=False)
    for name, tensor in (("key", key), ("slots", slots), ("key_scales", key_scales)):
        require_device(name, tensor, key_cache.device, "key_cache")
    return WriteProblem(key, slots, key_cache, scale_bytes)


def _check_queries(
    key: torch.Tensor,
    query: torch.Tensor,
    query_rows: torch.Tensor,
    packed_query: torch.Tensor,
    query_scales: torch.Tensor,
) -> WriteProblem:
    _check_values("query", query, "query_rows", query_rows)
    if query.dtype != key.dtype:
        raise InputError(f"query must have the dtype of key, {key.dtype}, got {describe(query)}")
    check_rows("packed_query", packed_query, (NVFP4,))
    scale_bytes = check_row_scales(query_scales, packed_query.shape[0])
    outputs = (("packed_query", packed_query), ("query_scales", query_scales))
    for name, tensor in (("query", query), ("query_rows", query_rows), *outputs):
        require_device(name, tensor, key.device, "key_cache")
    return WriteProblem(query, query_rows, packed_query, scale_bytes)


def _check_no_query(*arguments: torch.Tensor | None) -> None:
    given = [name for name, it in zip(_QUERY_ARGUMENTS, arguments, strict=True) if it is not None]
    if given:
        raise InputError(
            f"{', '.join(_QUERY_ARGUMENTS)} must be given together or not at all, "
            f"got {' and '.join(given)}"
        )


def _check_rule(rule: str, calibration: LayerWeights | None, device: torch.device) -> None:
    if rule not in RULES:
        raise InputError(f"rule must be one of {RULES}, got {rule!r}")
    if (calibration is not None) != (rule == COVARIANCE):
        raise InputError(f"calibration must be given for the rule {COVARIANCE} and for no other")
    if calibration is not None and calibration.device != device:
        raise InputError(f"calibration must be on {device}, got {calibration.device}")


def _write_on_the_cpu(rows: WriteProblem, rule: str, weights: RuleWeights | None) -> None:
    kept = rows.index >= 0
    index = rows.index[kept]
    codes, scales = quantize_nvfp4(
        rows.values[kept], nonfinite="saturate", rule=rule, weights=weights
    )
    scale_bytes = scales.view(torch.uint8)
    if rows.codes.dim() == 2:
        rows.codes[index] = codes
        rows.scales[index] = scale_bytes
    else:
        page, key = index // PAGE, index % PAGE
        rows.codes[page, key] = codes
        rows.scales[page, key] = scale_bytes
