"""What an H200 made of the probes: the fixture that ``probes/record.py`` wrote there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from safetensors import safe_open

FIXTURE = Path(__file__).parents[3] / "fixtures" / "h200-probes.safetensors"


@dataclass(frozen=True)
class Record:
    """Outputs by name, and what they depend on.

    Attributes
    ----------
    outputs : dict
        ``probe/<name>`` uint8, ``scores/<name>`` int32 (the bits of float32), ``maps/accepted``
        uint8 ``[maps, 128]``, ``maps/taken`` uint8.
    digests : dict
        Of the inputs and the kernel, by the name of a probe or ``scores/<name>``.
    failures : dict
        Why something is not there.
    """

    outputs: dict[str, np.ndarray]
    digests: dict[str, str]
    failures: dict[str, str]


@cache
def h200_record() -> Record:
    """The record, read once."""
    with safe_open(FIXTURE, "np") as file:
        notes = json.loads(file.metadata()["record"])
        outputs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return Record(outputs, notes["digests"], notes["failures"])
