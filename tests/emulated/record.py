"""Record what a GPU makes of every probe: ``python tests/emulated/record.py OUT``.

Each family runs in a process of its own, so that a kernel that breaks or never ends costs no more
than that. OUT becomes one safetensors file: outputs as ``probe/<name>``, the driver's tensor maps
as ``maps/accepted``, whether it takes those that it should refuse as ``maps/taken``, and
``scores/<call>`` of the SM90 kernels where their binaries are at hand. What could not be recorded
is listed in its metadata.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from emulator.probes.encodings import accepted_maps, refused_maps
from emulator.probes.families import FAMILIES
from emulator.probes.gpu import DriverError, Gpu
from emulator.probes.probe import MAP_BYTES

_TIMEOUT_SECONDS = 60
_NOTES = "notes"  # of a part: JSON in a tensor, which survives until the parts are joined

Part = tuple[dict[str, np.ndarray], dict[str, object]]


def _record_family(family: str, start: int) -> Part:
    """From probe `start` on, up to one that breaks the process's context or does not end."""
    gpu = Gpu()
    notes: dict[str, object] = {**gpu.describe()}
    outputs: dict[str, np.ndarray] = {}
    digests: dict[str, str] = {}
    failures: dict[str, str] = {}
    for index, probe in enumerate(FAMILIES[family]()):
        if index < start:
            continue
        try:
            outputs[f"probe/{probe.name}"] = gpu.run(probe)
            digests[probe.name] = probe.digest()
        except (DriverError, TimeoutError) as error:
            failures[probe.name] = str(error)
            notes["next"] = index + 1
            break
    return outputs, {"digests": digests, "failures": failures, **notes}


def _record_maps() -> Part:
    gpu = Gpu()
    forms = [
        np.frombuffer(gpu.encode(each) if gpu.takes(each) else bytes(MAP_BYTES), dtype=np.uint8)
        for each in accepted_maps()
    ]
    taken = [gpu.takes(each) for each in refused_maps()]
    outputs = {"maps/accepted": np.stack(forms), "maps/taken": np.array(taken, dtype=np.uint8)}
    return outputs, {"failures": {}}


def _record_scores() -> Part:
    import torch

    from emulated.score_calls import CALLS, digest, make_call

    outputs, digests = {}, {}
    for call in CALLS:
        problem = make_call(call)
        digests[f"scores/{call.name}"] = digest(problem)
        there = problem.to("cuda")
        there.run("cute")
        torch.cuda.synchronize()
        outputs[f"scores/{call.name}"] = there.scores.cpu().view(torch.int32).numpy()
    return outputs, {"digests": digests, "failures": {}}


def _record_part(part: str, start: int, target: Path) -> None:
    recorders = {"maps": _record_maps, "scores": _record_scores}
    outputs, notes = recorders[part]() if part in recorders else _record_family(part, start)
    text = np.frombuffer(json.dumps(notes).encode(), dtype=np.uint8)
    save_file({**outputs, _NOTES: text}, target)
    # Not through the interpreter's end, which would wait for a kernel that does not end.
    sys.stdout.flush()
    os._exit(0)


def _run_part(part: str, start: int, file: Path) -> str | None:
    """Record a part in a process of its own; why there is no file, None where there is."""
    command = [sys.executable, __file__, str(file), "--part", part, "--start", str(start)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not done after {_TIMEOUT_SECONDS} s"
    return None if file.exists() else done.stderr[-2000:]


def _record_all(target: Path, parts: list[str]) -> None:
    outputs: dict[str, np.ndarray] = {}
    notes: dict[str, object] = {"recorded": datetime.date.today().isoformat()}
    digests: dict[str, str] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            start: int | None = 0
            while start is not None:
                file = Path(folder) / f"{part}-{start}.safetensors"
                reason = _run_part(part, start, file)
                if reason is not None:
                    failures[part] = reason
                    break
                found = load_file(file)
                given = json.loads(found.pop(_NOTES).tobytes())
                outputs.update(found)
                digests.update(given.pop("digests", {}))
                failures.update(given.pop("failures"))
                start = given.pop("next", None)
                notes.update(given)
                print(f"{part}: {len(found)} outputs", flush=True)
    for name, reason in failures.items():
        print(f"not recorded: {name}: {reason}")
    notes.update(digests=digests, failures=failures)
    save_file(outputs, target, {"record": json.dumps(notes)})


def main() -> None:
    """Record everything, or one part into a file of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parts = [*FAMILIES, "maps", "scores"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--part", choices=parts, help="one, in this process")
    parser.add_argument("--start", type=int, default=0, help="index of its first probe")
    arguments = parser.parse_args()
    if arguments.part:
        _record_part(arguments.part, arguments.start, arguments.target)
    else:
        _record_all(arguments.target, arguments.parts)


if __name__ == "__main__":
    main()
