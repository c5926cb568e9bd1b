"""Grids of the `cute` backend, and what a plan hands to the driver; no GPU needed."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import pytest
import torch

from sdsa_kernels.cute.arguments import Addresses, names_of
from sdsa_kernels.cute.compiled import LaunchConfig
from sdsa_kernels.plans import addresses_of
from sdsa_kernels.testing.problems import exact_problem
from sdsa_quant.errors import UnsupportedError

cute_launch = pytest.importorskip(
    "sdsa_kernels.cute.launch", reason="needs cuda-bindings", exc_type=ImportError
)

CONFIG = LaunchConfig(
    threads=256, shared_bytes=70_000, ctas_per_sm=2, teams=2, late_least_pages=12, two_late_pages=48
)
ADDRESSES = tuple(2**40 + 16 * i for i in range(8))
STRIDES = (256, 8, 16_384, 512, 40, 2**33)
SIZES = {
    "prefetched_bytes": 8192,  # by name, in any order
    "groups": 32,
    "rows": 3,
    "max_context": 4096,
    "query_stride": STRIDES[0],
    "query_scale_stride": STRIDES[1],
    "key_stride": STRIDES[2],
    "key_scale_stride": STRIDES[3],
    "table_stride": STRIDES[4],
    "score_stride": STRIDES[5],
}


@pytest.mark.parametrize(
    ("groups", "max_context", "grid"),
    [
        (1, 1, (1, 1)),
        (1, 8192, (128, 128)),  # a page for every CTA
        (32, 4096, (264, 264)),
        (1, 528 * 12 * 64, (264, 528)),  # 12 pages for every team
        (1, 528 * 12 * 64 - 64, (264, 264)),
        (32, 1_048_576, (264, 792)),
    ],
)
def test_grids_follow_the_capacity(groups: int, max_context: int, grid: tuple[int, int]) -> None:
    assert CONFIG.grid(132, groups, max_context) == grid


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_uint64),
        ("attribute_count", ctypes.c_uint),
    )


def plan_with(
    monkeypatch: pytest.MonkeyPatch,
    launch: Callable[..., int],
    tensor_maps: Callable[..., bytes] | None = None,
) -> Callable[..., None]:
    """A plan on device 0, whose current stream is 77, with `launch` for the driver's function."""
    monkeypatch.setattr(cute_launch, "_launch_function", lambda: launch)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: 77 + device, raising=False
    )
    kernel = object.__new__(cute_launch.LoadedKernel)  # nothing to load it with here
    kernel._function, kernel._config, kernel._device, kernel._sms = 1234, CONFIG, 0, 132
    return kernel.make_plan(SIZES, tensor_maps)


def test_a_plan_hands_over_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def launch(config_address: int, function: int, parameters: None, extra_address: int) -> int:
        config = Config.from_address(config_address)
        key, buffer, size_key, size_address, end = struct.unpack(
            "5q", ctypes.string_at(extra_address, 40)
        )
        size = ctypes.c_size_t.from_address(size_address).value
        assert (function, parameters, key, size_key, end) == (1234, None, 1, 2, 0)
        assert (tuple(config.grid), tuple(config.block)) == ((264, 1, 1), (256, 1, 1))
        assert (config.shared_bytes, config.stream, config.attribute_count) == (70_000, 77, 1)
        # Programmatic stream serialization, allowed.
        assert struct.unpack("i4xi", ctypes.string_at(config.attributes, 12)) == (6, 1)
        seen.append(struct.unpack("14q5iI", ctypes.string_at(buffer, size)))
        return 0

    plan = plan_with(monkeypatch, launch)
    for shift in (0, 64):
        addresses = tuple(address + shift for address in ADDRESSES)
        plan(*addresses)
        inverse = (2**32 - 1) // (264 * 2)
        assert seen[-1] == (*addresses, *STRIDES, 32, 3, 4096, 264, 8192, inverse)


@pytest.mark.parametrize("gap", [0, 48])  # of an SM100, of an SM90
def test_tensor_maps_of_the_addresses_stand_between_addresses_and_strides(
    monkeypatch: pytest.MonkeyPatch, gap: int
) -> None:
    def maps(query: int, query_scales: int, keys: int, *others: int) -> bytes:
        return query.to_bytes(128, "little") + keys.to_bytes(128, "little")

    seen = []

    def launch(config_address: int, function: int, parameters: None, extra_address: int) -> int:
        _, buffer, _, size_address, _ = struct.unpack("5q", ctypes.string_at(extra_address, 40))
        size = ctypes.c_size_t.from_address(size_address).value
        seen.append(struct.unpack(f"8q{gap}x128s128s6q5iI", ctypes.string_at(buffer, size)))
        return 0

    monkeypatch.setattr(
        cute_launch.LoadedKernel,
        "_parameter_offset",
        lambda self, index: {8: 64 + gap, 10: 320 + gap}[index],
    )
    plan = plan_with(monkeypatch, launch, maps)
    for shift in (0, 4096):
        addresses = tuple(address + shift for address in ADDRESSES)
        plan(*addresses)
        written, (query, keys), strides = seen[-1][:8], seen[-1][8:10], seen[-1][10:16]
        assert (written, strides) == (addresses, STRIDES)
        assert int.from_bytes(query, "little") == addresses[0]
        assert int.from_bytes(keys, "little") == addresses[2]


def test_a_thread_without_the_devices_context_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    plan = plan_with(monkeypatch, lambda *arguments: 0 if current else 201)
    monkeypatch.setattr(
        cute_launch.LoadedKernel, "_make_context_current", lambda self: current.append(self._device)
    )
    plan(*ADDRESSES)
    plan(*ADDRESSES)
    assert current == [0]


def test_a_refused_launch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_with(monkeypatch, lambda *arguments: 1)
    with pytest.raises(UnsupportedError, match="failed to launch a kernel: CUDA_ERROR_INVALID"):
        plan(*ADDRESSES)


def test_addresses_are_in_the_order_of_a_plan() -> None:
    problem = exact_problem("nvfp4", torch.device("cpu"), [70], rows_per_group=1)
    tensors = [getattr(problem, name) for name in names_of(Addresses)]
    assert addresses_of(problem) == tuple(tensor.data_ptr() for tensor in tensors)
