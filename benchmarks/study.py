"""Time and memory of `sdsa study` at scale: 32 layers x 64 requests x 4,096 keys x 8 query rows.

    python benchmarks/study.py [--layers 32] [--requests 64] [--folder FOLDER]

Writes the keys (2.1 GB, made up: normal values around channel offsets, some channels far larger)
to a folder, one file for each layer, runs the command once and prints wall time, processor time and
the largest sum of resident memory of its processes, sampled four times a second. What is resident
of mapped input files counts, so that the figure is an upper bound.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

KEYS, ROWS = 4096, 8
SAMPLE_SECONDS = 0.25


def write_layer(folder: Path, layer: int, requests: int) -> None:
    """Keys and queries of one layer, reproducible."""
    generator = torch.Generator().manual_seed(layer)
    spread = torch.exp2(torch.randn(128, generator=generator))
    offsets = torch.randn(128, generator=generator) * spread
    keys = torch.randn(requests * KEYS, 128, generator=generator).mul_(spread).add_(offsets)
    queries = torch.randn(requests, ROWS, 128, generator=generator)
    tensors = {
        f"layers.{layer}.keys": keys.bfloat16(),
        f"layers.{layer}.queries": queries.bfloat16(),
        f"layers.{layer}.lengths": torch.full((requests,), KEYS, dtype=torch.int32),
    }
    save_file(tensors, folder / f"layer-{layer:02}.safetensors")


def resident_bytes(root: int) -> int:
    """Resident memory of a process and its descendants; those that end meanwhile count nothing."""
    children: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:
            continue  # it ended
        fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
        process = int(fields["Pid"][0])
        children.setdefault(int(fields["PPid"][0]), []).append(process)
        sizes[process] = int(fields["VmRSS"][0]) * 1024 if "VmRSS" in fields else 0
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        total += sizes.get(process, 0)
        waiting += children.get(process, [])
    return total


def run(command: list[str]) -> tuple[float, float, int]:
    """Wall seconds, processor seconds and peak bytes of a command that has to succeed."""
    started, peak = time.monotonic(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    seconds = time.monotonic() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, used.ru_utime + used.ru_stime, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--formats", default="nvfp4,fp8")
    parser.add_argument("--folder", type=Path, help="where to put keys and report")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        keys = folder / "keys"
        keys.mkdir(parents=True, exist_ok=True)
        for layer in range(arguments.layers):
            write_layer(keys, layer, arguments.requests)
        command = [sys.executable, "-m", "sdsa_cli", "study", str(keys), str(keys)]
        command += ["-o", str(folder / "report"), "--lengths", "*.lengths", "--force"]
        command += ["--formats", arguments.formats]
        seconds, cpu_seconds, peak = run(command)
    print(
        f"{arguments.layers} layers x {arguments.requests} requests x {KEYS:,} keys x {ROWS} rows, "
        f"{arguments.formats}: {seconds:.0f} s, {cpu_seconds:.0f} s of processor time, "
        f"{peak / 1e9:.2f} GB resident at most"
    )


if __name__ == "__main__":
    main()
