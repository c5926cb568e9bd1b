"""All probes, by family."""

from __future__ import annotations

from .barriers import barrier_probes
from .copies import copy_probes
from .elementwise import elementwise_probes
from .matrices import matrix_probes
from .probe import Probe
from .tensor_tiles import tile_probes
from .warps import warp_probes

FAMILIES = {
    "elementwise": elementwise_probes,
    "matrices": matrix_probes,
    "warps": warp_probes,
    "copies": copy_probes,
    "tiles": tile_probes,
    "barriers": barrier_probes,
}


def all_probes() -> list[Probe]:
    """Every probe of every family."""
    return [probe for family in FAMILIES.values() for probe in family()]
