"""`quantize_write_nvfp4` on a CPU, and what it refuses anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdsa_kernels import quantize_write_nvfp4
from sdsa_quant.calibration.layer import LayerWeights
from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.formats.nvfp4 import quantize_nvfp4
from sdsa_quant.paging import page_views
from support.problems import gaussian_values
from support.rule_cases import some_weights


def arguments(generator: torch.Generator, **changes: Any) -> dict[str, Any]:
    """A right call of 5 keys and 3 query rows into poisoned outputs, except for the changes."""
    key_cache, key_scales = page_views(torch.full((2, 4608), 0xA5, dtype=torch.uint8), "nvfp4")
    call = {
        "key": gaussian_values((5, 128), generator),
        "slots": torch.tensor([70, -1, 3, 127, 0]),
        "query": gaussian_values((3, 128), generator),
        "query_rows": torch.tensor([2, -5, 0]),
        "key_cache": key_cache,
        "key_scales": key_scales,
        "packed_query": torch.full((4, 64), 0xA5, dtype=torch.uint8),
        "query_scales": torch.full((4, 8), 0xA5, dtype=torch.uint8),
    }
    return {**call, **changes}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_writes_the_places_given_and_no_others(
    generator: torch.Generator, dtype: torch.dtype
) -> None:
    call = arguments(generator)
    call["key"], call["query"] = call["key"].to(dtype), call["query"].to(dtype)
    quantize_write_nvfp4(**call)
    outputs = {
        "keys": (call["key"], call["slots"], call["key_cache"], call["key_scales"], 128),
        "query": (call["query"], call["query_rows"], call["packed_query"], call["query_scales"], 4),
    }
    for values, places, codes, scales, room in outputs.values():
        expected_codes, expected_scales = quantize_nvfp4(values)
        flat_codes = codes.reshape(room, 64)
        flat_scales = scales.view(torch.uint8).reshape(room, 8)
        untouched = torch.ones(room, dtype=torch.bool)
        for i, place in enumerate(places.tolist()):
            if place >= 0:
                untouched[place] = False
                assert torch.equal(flat_codes[place], expected_codes[i])
                assert torch.equal(flat_scales[place], expected_scales[i].view(torch.uint8))
        assert (flat_codes[untouched] == 0xA5).all()
        assert (flat_scales[untouched] == 0xA5).all()


def test_keys_alone(generator: torch.Generator) -> None:
    call = arguments(generator)
    keys = {name: call[name] for name in ("key", "slots", "key_cache", "key_scales")}
    quantize_write_nvfp4(**keys)
    assert torch.equal(call["key_cache"][1, 6], quantize_nvfp4(call["key"])[0][0])


def test_nothing_to_write(generator: torch.Generator) -> None:
    nothing = {"key": torch.zeros(0, 128), "slots": torch.zeros(0, dtype=torch.int64)}
    call = arguments(generator, **nothing, query=torch.zeros(3, 128))
    quantize_write_nvfp4(**call)
    assert (call["key_cache"] == 0xA5).all()
    assert (call["packed_query"][2] == 0).all()


WRONG = {
    "key-dtype": ({"key": torch.zeros(5, 128, dtype=torch.float64)}, "key must be bfloat16"),
    "key-shape": ({"key": torch.zeros(5, 64)}, r"key must be .*\[n, 128\], got float32 \[5, 64\]"),
    "key-stride": ({"key": torch.zeros(5, 256)[:, ::2]}, "key must have a last stride of 1"),
    "key-alignment": ({"key": torch.zeros(5, 129)[:, :128]}, "key must have a first stride"),
    "slots-dtype": ({"slots": torch.zeros(5, dtype=torch.int32)}, r"slots must be int64 \[5\]"),
    "slots-shape": ({"slots": torch.zeros(4, dtype=torch.int64)}, r"slots must be int64 \[5\]"),
    "cache-dtype": ({"key_cache": torch.zeros(2, 64, 64)}, "key_cache must be uint8"),
    "cache-shape": (
        {"key_cache": torch.zeros(2, 64, 128, dtype=torch.uint8)},
        r"key_cache must be uint8 \[pages, 64, 64\]",
    ),
    "scales-pages": (
        {"key_scales": torch.zeros(3, 64, 8, dtype=torch.uint8)},
        r"key_scales must be .*\[2, 64, 8\] for NVFP4 keys, got uint8 \[3, 64, 8\]",
    ),
    "query-dtype": ({"query": torch.zeros(3, 128)}, "query must have the dtype of key"),
    "query-rows": (
        {"query_rows": torch.zeros(2, dtype=torch.int64)},
        r"query_rows must be int64 \[3\]",
    ),
    "packed-shape": (
        {"packed_query": torch.zeros(4, 32, dtype=torch.uint8)},
        r"packed_query must be uint8 \[rows, 64\]",
    ),
    "query-scales": (
        {"query_scales": torch.zeros(3, 8, dtype=torch.uint8)},
        r"query_scales must be .*\[4, 8\]",
    ),
    "half-a-query": ({"query_scales": None}, "query, query_rows, .* must be given together"),
    "device": ({"slots": torch.zeros(5, dtype=torch.int64, device="meta")}, "must be on cpu"),
    "no-tensor": ({"slots": [1, 2, 3, 4, 5]}, "slots must be .* tensor, got list"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_named(
    generator: torch.Generator, changes: dict[str, Any], message: str
) -> None:
    call = arguments(generator, **changes)
    with pytest.raises((InputError, DtypeError), match=message):
        quantize_write_nvfp4(**call)
    for name in ("key_cache", "packed_query"):
        if name not in changes:
            assert (call[name] == 0xA5).all(), "nothing is written before the checks are done"


PAST = {
    "slots": ([70, -1, 3, 128, 0], "slots must be below 128, the slots of.* 128 at index 3"),
    "far-slot": ([2**40, 1, 2, 3, 4], f"slots must be below 128, .*got {2**40} at index 0"),
    "query_rows": ([2, 4, 0], "query_rows must be below 4, the rows of packed.* 4 at index 1"),
}  # fmt: skip


@pytest.mark.parametrize(("index", "message"), PAST.values(), ids=PAST.keys())
@pytest.mark.parametrize("switch", ["0", "1"])
def test_an_index_past_the_output_is_named_and_nothing_written(
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    index: list[int],
    message: str,
    switch: str,
) -> None:
    monkeypatch.setenv("SDSA_CHECK", switch)
    name = "slots" if len(index) == 5 else "query_rows"
    call = arguments(generator, **{name: torch.tensor(index)})
    with pytest.raises(InputError, match=message):
        quantize_write_nvfp4(**call)
    assert (call["key_cache"] == 0xA5).all()
    assert (call["packed_query"] == 0xA5).all()


TWICE = {
    "slots": ([70, -1, 3, 127, 70], "slots must not repeat, got 70 at index 0 and at index 4"),
    "slot-0": ([0, 0, 0, 5, 6], "slots must not repeat, got 0 at index 0 and at index 1"),
    "query_rows": ([2, 1, 2], "query_rows must not repeat, got 2 at index 0 and at index 2"),
}


@pytest.mark.parametrize(("index", "message"), TWICE.values(), ids=TWICE.keys())
def test_the_checked_mode_finds_an_index_that_occurs_twice(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, index: list[int], message: str
) -> None:
    monkeypatch.setenv("SDSA_CHECK", "yes")
    name = "slots" if len(index) == 5 else "query_rows"
    call = arguments(generator, **{name: torch.tensor(index)})
    with pytest.raises(InputError, match=message):
        quantize_write_nvfp4(**call)
    assert (call["key_cache"] == 0xA5).all()


def test_the_checked_mode_accepts_what_is_skipped_twice(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDSA_CHECK", "1")
    call = arguments(generator, slots=torch.tensor([-1, -1, 3, 127, 0]))
    quantize_write_nvfp4(**call)
    assert torch.equal(call["key_cache"][0, 3], quantize_nvfp4(call["key"])[0][2])


@pytest.mark.parametrize("rule", ["4over6", "search", "covariance"])
def test_writes_by_every_rule(generator: torch.Generator, rule: str) -> None:
    calibration = None
    if rule == "covariance":
        calibration = LayerWeights(some_weights(generator), some_weights(generator))
    call = arguments(generator)
    quantize_write_nvfp4(**call, rule=rule, calibration=calibration)
    outputs = {
        "keys": (call["key"], call["key_cache"][1, 6], call["key_scales"][1, 6]),
        "queries": (call["query"], call["packed_query"][2], call["query_scales"][2]),
    }
    for name, (values, codes, scales) in outputs.items():
        weights = None if calibration is None else getattr(calibration, name)
        expected = quantize_nvfp4(values[:1], rule=rule, weights=weights)
        assert torch.equal(codes, expected[0][0])
        assert torch.equal(scales.view(torch.uint8), expected[1][0].view(torch.uint8))


def test_a_rule_and_its_calibration_go_together(generator: torch.Generator) -> None:
    call = arguments(generator)
    with pytest.raises(InputError, match="calibration must be given for the rule covariance"):
        quantize_write_nvfp4(**call, rule="covariance")
    with pytest.raises(InputError, match="rule must be one of"):
        quantize_write_nvfp4(**call, rule="amax/7")
    assert (call["key_cache"] == 0xA5).all()
