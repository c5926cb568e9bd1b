"""Record what a GPU makes of every probe: ``python tests/emulator/probes/record.py OUT``.

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
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from emulator.probes.encodings import accepted_maps, refused_maps
from emulator.probes.families import FAMILIES
from emulator.probes.gpu import DriverError, Gpu

_FAMILY_TIMEOUT_SECONDS = 60
_NOTES = "notes"  # of a part: JSON in a tensor, which survives until the parts are joined

Part = tuple[dict[str, np.ndarray], dict[str, object]]


def _record_family(family: str) -> Part:
    gpu = Gpu()
    outputs, digests, failures = {}, {}, {}
    for probe in FAMILIES[family]():
        try:
            outputs[f"probe/{probe.name}"] = gpu.run(probe)
            digests[probe.name] = probe.digest()
        except DriverError as error:
            failures[probe.name] = str(error)
            gpu.reopen()
        except TimeoutError as error:
            failures[probe.name] = f"{error}; every later probe of {family} was left out"
            break
    return outputs, {"digests": digests, "failures": failures, **gpu.describe()}


def _record_maps() -> Part:
    gpu = Gpu()
    forms = [np.frombuffer(gpu.encode(each), dtype=np.uint8) for each in accepted_maps()]
    taken = [gpu.takes(each) for each in refused_maps()]
    outputs = {"maps/accepted": np.stack(forms), "maps/taken": np.array(taken, dtype=np.uint8)}
    return outputs, {"failures": {}}


def _record_scores() -> Part:
    import torch

    from emulator.probes.score_calls import CALLS, digest, make_call

    outputs, digests = {}, {}
    for call in CALLS:
        problem = make_call(call)
        digests[f"scores/{call.name}"] = digest(problem)
        there = problem.to("cuda")
        there.run("cute")
        torch.cuda.synchronize()
        outputs[f"scores/{call.name}"] = there.scores.cpu().view(torch.int32).numpy()
    return outputs, {"digests": digests, "failures": {}}


def _record_part(part: str, target: Path) -> None:
    recorders = {"maps": _record_maps, "scores": _record_scores}
    outputs, notes = recorders[part]() if part in recorders else _record_family(part)
    text = np.frombuffer(json.dumps(notes).encode(), dtype=np.uint8)
    save_file({**outputs, _NOTES: text}, target)


def _record_all(target: Path) -> None:
    outputs: dict[str, np.ndarray] = {}
    notes: dict[str, object] = {"recorded": datetime.date.today().isoformat()}
    digests: dict[str, str] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in (*FAMILIES, "maps", "scores"):
            file = Path(folder) / f"{part}.safetensors"
            command = [sys.executable, __file__, str(file), "--part", part]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=_FAMILY_TIMEOUT_SECONDS
                )
            except subprocess.TimeoutExpired:
                failures[part] = f"not done after {_FAMILY_TIMEOUT_SECONDS} s"
                continue
            if not file.exists():
                failures[part] = done.stderr[-2000:]
                continue
            found = load_file(file)
            given = json.loads(found.pop(_NOTES).tobytes())
            outputs.update(found)
            digests.update(given.pop("digests", {}))
            failures.update(given.pop("failures"))
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
    parser.add_argument("--part", choices=[*FAMILIES, "maps", "scores"])
    arguments = parser.parse_args()
    if arguments.part:
        _record_part(arguments.part, arguments.target)
    else:
        _record_all(arguments.target)


if __name__ == "__main__":
    main()
