"""Host time of a warm `indexer_scores` call: what Python adds before the driver takes a launch.

Prints the median, in microseconds, for each backend and format pair that can run on the GPU. The
device is kept busy meanwhile, so that it never holds up the host:

    python benchmarks/host_time.py [BACKEND ...]
"""

from __future__ import annotations

import sys

import torch

from sdsa_kernels import backend_names
from sdsa_kernels.backends import choose_backend
from sdsa_kernels.measure.measurement import scoring_call
from sdsa_kernels.measure.timing import host_overhead_us
from sdsa_kernels.testing.problems import Shape, synthetic_problems
from sdsa_quant.errors import UnsupportedError
from sdsa_quant.layout import FORMAT_PAIRS

SHAPE = Shape(lengths=(4096,) * 4, rows_per_group=1, max_context=4096)
CALLS = 500
ROUNDS = 7


def measure(backend: str, format_pair: str, device: torch.device) -> float | None:
    """Least of several medians in microseconds; None where the backend cannot run."""
    problem, *_ = synthetic_problems(SHAPE, format_pair, device, rotations=1, seed=1)
    try:
        choose_backend(problem, backend)
    except UnsupportedError:
        return None
    call = scoring_call(problem, backend)
    return min(host_overhead_us(call, repeats=CALLS) for _ in range(ROUNDS))


def main() -> None:
    """Print a table of the backends named on the command line, or of all but torch."""
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    backends = sys.argv[1:] or [name for name in backend_names() if name != "torch"]
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name(device)}, {ROUNDS} rounds of {CALLS} calls")
    print("| backend | format pair | host us a call |")
    print("| --- | --- | ---: |")
    for backend in backends:
        for format_pair in FORMAT_PAIRS:
            microseconds = measure(backend, format_pair, device)
            found = "cannot run here" if microseconds is None else f"{microseconds:.2f}"
            print(f"| {backend} | {format_pair} | {found} |")


if __name__ == "__main__":
    main()
