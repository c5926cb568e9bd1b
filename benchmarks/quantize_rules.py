"""Time of every NVFP4 rule on made-up keys: PYTHONPATH=... python benchmarks/quantize_rules.py.

On a CPU, one JSON line for each rule: keys, the median seconds of 5 runs of `quantize_nvfp4`, and
its time relative to amax/6. On a GPU (--device cuda) `quantize_write_nvfp4` in CUDA graphs, one
line for each rule and number of keys, 1 to 8192: microseconds of a graph of one call, which has 2
to 3 of the graph and its events in it, and of one call of a graph of 32. Keys have correlated
channels. What a rule stores is checked: not to lose more than amax/6, and on a GPU to be the bytes
of the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from sdsa_kernels import quantize_write_nvfp4
from sdsa_kernels.measure.timing import time_graph
from sdsa_quant.calibration.layer import LayerWeights
from sdsa_quant.formats.nvfp4 import COVARIANCE, RULES, dequantize_nvfp4, quantize_nvfp4
from sdsa_quant.formats.rule_weights import RuleWeights, rule_weights
from sdsa_quant.paging import page_views

RUNS = 5
KEYS_OF_A_CALL = (1, 32, 512, 8192)
REPLAYS = 300
CALLS_PER_GRAPH = 32
_SETS = 4  # of keys and pages, taken in turn


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=65536, help="of a run on the CPU")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(128, 128, generator=generator) * torch.linspace(2, 0.1, 128)[:, None]
    covariance = (mixing.T @ mixing).double()
    weights = rule_weights((covariance + covariance.T) / 2)

    def make(count: int) -> torch.Tensor:
        return torch.randn(count, 128, generator=generator) @ mixing / 16

    if arguments.device == "cpu":
        time_on_the_cpu(make(arguments.keys), weights)
    else:
        time_on_a_gpu(make, weights, torch.device(arguments.device))


def time_on_the_cpu(keys: torch.Tensor, weights: RuleWeights) -> None:
    """`quantize_nvfp4` of all keys by every rule."""
    plain = (dequantize_nvfp4(*quantize_nvfp4(keys)) - keys).double()
    plain_time = None
    for rule in RULES:
        given = weights if rule == COVARIANCE else None
        times = []
        for _ in range(RUNS):
            started = time.perf_counter()
            stored = quantize_nvfp4(keys, rule=rule, weights=given)
            times.append(time.perf_counter() - started)
        errors = (dequantize_nvfp4(*stored) - keys).double()
        matrix = weights.matrix if rule == COVARIANCE else torch.eye(128, dtype=torch.float64)
        loss, limit = (float(((each @ matrix) * each).sum()) for each in (errors, plain))
        if loss > limit:
            raise SystemExit(f"{rule} loses more than amax/6")
        median = statistics.median(times)
        plain_time = median if plain_time is None else plain_time
        record = {
            "rule": rule,
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "keys": keys.shape[0],
            "seconds": median,
            "of_plain": median / plain_time,
        }
        print(json.dumps(record))


def time_on_a_gpu(
    make: Callable[[int], torch.Tensor], weights: RuleWeights, device: torch.device
) -> None:
    """`quantize_write_nvfp4` of a few numbers of BF16 keys by every rule, in CUDA graphs."""
    calibration = LayerWeights(weights, weights).to(device)
    for count in KEYS_OF_A_CALL:
        sets = [make(count).bfloat16() for _ in range(_SETS)]
        plain = None
        for rule in RULES:
            started = time.perf_counter()
            calls = [
                _write(keys.to(device), rule, calibration if rule == COVARIANCE else None)
                for keys in sets
            ]
            for keys, (call, cache, scales) in zip(sets, calls, strict=True):
                call()
                _check(keys, rule, weights if rule == COVARIANCE else None, cache, scales)
            first_call = time.perf_counter() - started
            writes = [call for call, _, _ in calls]
            alone = time_graph(writes, REPLAYS)
            together = time_graph(writes, REPLAYS // 10, calls_per_replay=CALLS_PER_GRAPH)
            plain = (alone.median_us, together.median_us) if plain is None else plain
            record = {
                "rule": rule,
                "device": torch.cuda.get_device_name(device),
                "keys": count,
                "us": round(alone.median_us, 2),
                "p90_us": round(alone.p90_us, 2),
                "of_plain": round(alone.median_us / plain[0], 2),
                "us_in_a_row": round(together.median_us, 2),
                "of_plain_in_a_row": round(together.median_us / plain[1], 2),
                "seconds_before": round(first_call, 1),
            }
            print(json.dumps(record), flush=True)


def _write(
    keys: torch.Tensor, rule: str, calibration: LayerWeights | None
) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    pages = -(-keys.shape[0] // 64)
    records = torch.zeros((pages, 4608), dtype=torch.uint8, device=keys.device)
    cache, scales = page_views(records, "nvfp4")
    assert scales is not None
    slots = torch.arange(keys.shape[0], device=keys.device)

    def call() -> None:
        quantize_write_nvfp4(
            keys, slots, key_cache=cache, key_scales=scales, rule=rule, calibration=calibration
        )

    return call, cache, scales


def _check(
    keys: torch.Tensor,
    rule: str,
    weights: RuleWeights | None,
    cache: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    codes, expected = quantize_nvfp4(keys, rule=rule, weights=weights)
    count = keys.shape[0]
    same = torch.equal(cache.reshape(-1, 64)[:count].cpu(), codes)
    found = scales.view(torch.uint8).reshape(-1, 8)[:count].cpu()
    if not same or not torch.equal(found, expected.view(torch.uint8)):
        raise SystemExit(f"{rule} stores other bytes on the GPU than on the CPU")


if __name__ == "__main__":
    main()
