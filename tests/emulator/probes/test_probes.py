"""Every probe gives the same bits in the emulator as on an H200, or stops as it did there."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.errors import EmulationError

from .emulated_probes import emulate
from .families import all_probes
from .h200_record import h200_record
from .probe import Probe

PROBES = {probe.name: probe for probe in all_probes()}
STOPPED = h200_record().failures
SEEDS = (0, 1)  # of the schedule

# What an H200 stopped with: illegal instruction, illegal address.
_STOPS = ("failed with 715", "failed with 700")


def _differences(got: np.ndarray, expected: np.ndarray) -> str:
    words = [np.resize(each, -(-each.size // 4) * 4).view("<u4") for each in (got, expected)]
    places = np.flatnonzero(words[0] != words[1])
    shown = (f"word {at}: {words[0][at]:08x}, H200 {words[1][at]:08x}" for at in places[:6])
    return f"{len(places)} of {len(words[0])} words differ: " + "; ".join(shown)


def test_the_record_is_complete() -> None:
    outputs = {name.removeprefix("probe/") for name in h200_record().outputs}
    assert set(PROBES) <= outputs | set(STOPPED)
    assert all(reason.endswith(_STOPS) for reason in STOPPED.values())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [name for name in PROBES if name not in STOPPED])
def test_a_probe_gives_the_bits_of_an_h200(name: str, seed: int) -> None:
    record, probe = h200_record(), PROBES[name]
    assert probe.digest() == record.digests[name], "the probe is not the one that was recorded"
    got, expected = emulate(probe, seed), record.outputs[f"probe/{name}"]
    assert np.array_equal(got, expected), _differences(got, expected)


@pytest.mark.parametrize("probe", [PROBES[name] for name in STOPPED], ids=list(STOPPED))
def test_what_stops_an_h200_stops_the_emulator(probe: Probe) -> None:
    with pytest.raises(EmulationError):
        emulate(probe, 0)
