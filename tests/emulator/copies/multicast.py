"""`.multicast::cluster` in a cluster of one CTA: its mask can only name that CTA.

Source: PTX ISA, `cp.async.bulk`, `cp.async.bulk.tensor`, `tcgen05.commit`: bit `i` of the 16-bit
operand `ctaMask` stands for the CTA whose `%cluster_ctarank` is `i`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import OutOfBounds

if TYPE_CHECKING:
    from emulator.instructions.registry import Decoder
    from emulator.machine.execution import Warp

_ONLY_CTA = 1


@dataclass(frozen=True)
class Multicast:
    """The mask operand of an instruction; None where it has none."""

    slot: int | None

    def check(self, warp: Warp, lane: int) -> None:
        """Refuse a lane's mask that does not name this CTA alone.

        Raises
        ------
        OutOfBounds
            It names others, or none.
        """
        if self.slot is None:
            return
        mask = int(warp.slots[self.slot][lane])
        if mask != _ONLY_CTA:
            raise OutOfBounds(f"a CTA mask of {mask:#06x} in a cluster of one CTA")


def take_multicast(op: Decoder, operand: int) -> Multicast:
    """Take `.multicast::cluster` and, with it, the mask, which is the given operand."""
    if not op.flag("multicast::cluster"):
        return Multicast(None)
    if len(op.operands) <= operand:
        raise op.unsupported("a CTA mask is needed")
    return Multicast(op.source(operand, np.uint16))
