"""What the CPU path costs beside plain torch: quantization and scoring of 1,000,000 keys.

    python benchmarks/cpu.py [--keys 1000000] [--repeats 5] [--busy 0] [--json FILE]

Quantization is compared with the plain vectorized form, which compares the whole tensor against
each of the seven boundaries between levels, and with the same form in chunks of 4,096 keys. Scoring
is compared with `torch.matmul` on the same keys, already dense and in float32. Results are checked
against each other before a time is printed; every figure is the median of the repeats, and the
compared forms take turns, so that a slow moment of the machine meets them all. ``--busy N`` runs N
busy loops beside them. Threads and spinning are those that the `sdsa` command would choose.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sdsa_quant.threads import prepare_threads

prepare_threads()  # before torch is loaded

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from sdsa_kernels import indexer_scores  # noqa: E402
from sdsa_quant import dequantize_nvfp4, page_views, quantize_nvfp4  # noqa: E402
from sdsa_quant.layout import DIM, NVFP4_RECORD_BYTES, PACKED_DIM, PAGE, SCALES_PER_KEY  # noqa: E402

ROWS = 8
# Between neighbouring levels; a tie goes to the even code, so every second boundary is inclusive.
BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
CHUNK_KEYS = 4096


def quantize_plainly(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 in the plain vectorized way, the whole tensor at a time."""
    blocks = values.float().view(values.shape[0], SCALES_PER_KEY, -1)
    amax = blocks.abs().amax(-1)
    scales = (amax / torch.full_like(amax, 6.0)).clamp(max=448.0).to(torch.float8_e4m3fn)
    decoded = scales.float()
    inverse = torch.where(decoded == 0, torch.zeros_like(decoded), 1.0 / decoded)
    scaled = (blocks * inverse.unsqueeze(-1)).view(values.shape)
    magnitudes = scaled.abs()
    codes = torch.zeros_like(magnitudes, dtype=torch.uint8)
    for code, boundary in enumerate(BOUNDARIES):
        codes += magnitudes >= boundary if code % 2 else magnitudes > boundary
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


def quantize_plainly_in_chunks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, 4,096 keys at a time."""
    codes = torch.empty((values.shape[0], PACKED_DIM), dtype=torch.uint8)
    scales = torch.empty((values.shape[0], SCALES_PER_KEY), dtype=torch.float8_e4m3fn)
    for start in range(0, values.shape[0], CHUNK_KEYS):
        part = slice(start, start + CHUNK_KEYS)
        codes[part], scales[part] = quantize_plainly(values[part])
    return codes, scales


def take_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each call, one call of each per round, one round not counted."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn:
                samples[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def measure(keys_wanted: int, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds by name, for quantization and for scoring."""
    pages = -(-keys_wanted // PAGE)
    keys = pages * PAGE
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(keys, DIM, generator=generator).bfloat16()
    codes, scales = quantize_nvfp4(values)
    for form in (quantize_plainly, quantize_plainly_in_chunks):
        other_codes, other_scales = form(values)
        assert torch.equal(codes, other_codes), f"{form.__name__} gives other codes"
        assert torch.equal(scales.view(torch.uint8), other_scales.view(torch.uint8))
        del other_codes, other_scales
    quantization = take_turns(
        {
            "plain, whole tensor": lambda: quantize_plainly(values),
            "plain, chunks of 4,096 keys": lambda: quantize_plainly_in_chunks(values),
            "sdsa_quant.quantize_nvfp4": lambda: quantize_nvfp4(values),
        },
        repeats,
    )

    records = torch.empty((pages, NVFP4_RECORD_BYTES), dtype=torch.uint8)
    key_cache, key_scales = page_views(records, "nvfp4")
    assert key_scales is not None
    order = torch.randperm(pages, generator=generator)
    key_cache[order] = codes.view(pages, PAGE, PACKED_DIM)
    key_scales.view(torch.uint8)[order] = scales.view(torch.uint8).view(pages, PAGE, -1)
    query = torch.randn(ROWS, DIM, generator=generator).bfloat16()
    query_codes, query_scales = quantize_nvfp4(query)
    scores = torch.empty((ROWS, keys))
    dense = dequantize_nvfp4(codes, scales)
    dense_query = dequantize_nvfp4(query_codes, query_scales)
    table = order.int().view(1, pages)
    length = torch.tensor([keys], dtype=torch.int32)
    request = torch.zeros(1, dtype=torch.int32)

    def score() -> None:
        indexer_scores(
            query_codes,
            key_cache,
            table,
            length,
            requests=request,
            scores=scores,
            query_scales=query_scales,
            key_scales=key_scales,
        )

    score()
    expected = (dense @ dense_query.T).T
    assert torch.allclose(scores, expected, rtol=1e-5, atol=1e-4), "the scores are wrong"
    scoring = take_turns(
        {
            "torch.matmul, dense FP32 keys": lambda: torch.matmul(dense, dense_query.T),
            "indexer_scores, paged NVFP4": score,
        },
        repeats,
    )
    return {"quantization": quantization, "scoring": scoring}


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes beside this one that take all the time they get."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5)  # until they run
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    """Measure, print the tables, and write the JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--busy", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.busy:
        # In a new process, which finds the loops when it chooses how to wait.
        rest = [*sys.argv[1:], "--busy", "0"]
        with busy_loops(arguments.busy):
            raise SystemExit(
                subprocess.run([sys.executable, __file__, *rest], check=False).returncode
            )
    results = measure(arguments.keys, arguments.repeats)
    console = Console()
    for name, figures in results.items():
        table = Table(title=f"{name}, {arguments.keys:,} keys, {torch.get_num_threads()} threads")
        table.add_column("form")
        table.add_column("median ms", justify="right")
        table.add_column("relative to ours", justify="right")
        ours = list(figures.values())[-1]
        for form, milliseconds in figures.items():
            table.add_row(form, f"{milliseconds:,.0f}", f"{milliseconds / ours:.2f}")
        console.print(table)
    if arguments.json:
        report = {
            "keys": arguments.keys,
            "repeats": arguments.repeats,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "median_ms": results,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
