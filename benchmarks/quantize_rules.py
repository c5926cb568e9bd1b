"""Time of every NVFP4 rule on made-up keys: PYTHONPATH=... python benchmarks/quantize_rules.py.

Prints one JSON line for each rule: keys, the median seconds of 5 runs, and its time relative to
amax/6. Keys have correlated channels; what a rule stores is checked not to lose more than amax/6.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from sdsa_quant.formats.nvfp4 import COVARIANCE, RULES, dequantize_nvfp4, quantize_nvfp4
from sdsa_quant.formats.rule_weights import rule_weights

RUNS = 5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=65536)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(128, 128, generator=generator) * torch.linspace(2, 0.1, 128)[:, None]
    keys = torch.randn(arguments.keys, 128, generator=generator) @ mixing / 16
    covariance = (mixing.T @ mixing).double()
    weights = rule_weights((covariance + covariance.T) / 2).to(arguments.device)
    keys = keys.to(arguments.device)
    plain_loss = plain_time = None
    for rule in RULES:
        given = weights if rule == COVARIANCE else None
        times = []
        for _ in range(RUNS):
            _wait(keys)
            started = time.perf_counter()
            stored = quantize_nvfp4(keys, rule=rule, weights=given)
            _wait(keys)
            times.append(time.perf_counter() - started)
        errors = (dequantize_nvfp4(*stored) - keys).double()
        matrix = weights.matrix.double()
        loss = float(((errors @ matrix) * errors if rule == COVARIANCE else errors**2).sum())
        if plain_loss is None or plain_time is None:
            plain = (dequantize_nvfp4(*stored) - keys).double()
            plain_loss = {False: loss, True: float(((plain @ matrix) * plain).sum())}
            plain_time = statistics.median(times)
        if loss > plain_loss[rule == COVARIANCE]:
            raise SystemExit(f"{rule} loses more than amax/6")
        median = statistics.median(times)
        record = {
            "rule": rule,
            "device": arguments.device,
            "threads": torch.get_num_threads(),
            "keys": arguments.keys,
            "seconds": median,
            "of_plain": median / plain_time,
        }
        print(json.dumps(record))


def _wait(keys: torch.Tensor) -> None:
    if keys.is_cuda:
        torch.cuda.synchronize(keys.device)


if __name__ == "__main__":
    main()
