"""Special registers ("Special Registers", PTX ISA 10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .execution import Warp

_LANES = np.arange(32, dtype=np.uint64)
_ONE = np.uint64(1)


def _axis(index: int, of: Callable[[Warp], tuple[int, int, int]]) -> Callable[[Warp], int]:
    return lambda warp: of(warp)[index]


def _thread(index: int) -> Callable[[Warp], np.ndarray]:
    return lambda warp: warp.thread_indices[index]


def _zero(warp: Warp) -> int:
    return 0


def _one(warp: Warp) -> int:
    return 1


# Those that stay the same while a warp runs, as functions of the warp.
SPECIAL_REGISTERS: dict[str, Callable[[Warp], Any]] = {
    "%laneid": lambda warp: _LANES,
    "%warpid": lambda warp: warp.index,
    "%nwarpid": lambda warp: len(warp.cta.warps),
    "%smid": lambda warp: warp.cta.processor,
    "%nsmid": lambda warp: warp.cta.launch.processors,
    "%gridid": _zero,
    "%is_explicit_cluster": _zero,
    "%cluster_ctarank": _zero,
    "%cluster_nctarank": _one,
    "%lanemask_eq": lambda warp: _ONE << _LANES,
    "%lanemask_lt": lambda warp: (_ONE << _LANES) - _ONE,
    "%lanemask_le": lambda warp: (_ONE << (_LANES + _ONE)) - _ONE,
    "%lanemask_gt": lambda warp: (_ONE << np.uint64(32)) - (_ONE << (_LANES + _ONE)),
    "%lanemask_ge": lambda warp: (_ONE << np.uint64(32)) - (_ONE << _LANES),
    "%dynamic_smem_size": lambda warp: warp.cta.launch.dynamic_shared_bytes,
    "%total_smem_size": lambda warp: warp.cta.shared.size,
    "%aggr_smem_size": lambda warp: warp.cta.shared.size,
}
for _index, _name in enumerate("xyz"):
    SPECIAL_REGISTERS |= {
        f"%tid.{_name}": _thread(_index),
        f"%ntid.{_name}": _axis(_index, lambda warp: warp.cta.launch.block),
        f"%ctaid.{_name}": _axis(_index, lambda warp: warp.cta.index),
        f"%nctaid.{_name}": _axis(_index, lambda warp: warp.cta.launch.grid),
        # Clusters of one CTA.
        f"%clusterid.{_name}": _axis(_index, lambda warp: warp.cta.index),
        f"%nclusterid.{_name}": _axis(_index, lambda warp: warp.cta.launch.grid),
        f"%cluster_ctaid.{_name}": _zero,
        f"%cluster_nctaid.{_name}": _one,
    }

# Those that change, as functions of the warp at the time they are read.
CHANGING_REGISTERS: dict[str, Callable[[Warp], int]] = {
    "%clock": lambda warp: warp.cta.launch.clock() & 0xFFFFFFFF,
    "%clock_hi": lambda warp: warp.cta.launch.clock() >> 32,
    "%clock64": lambda warp: warp.cta.launch.clock(),
    "%globaltimer": lambda warp: warp.cta.launch.clock(),
    "%globaltimer_lo": lambda warp: warp.cta.launch.clock() & 0xFFFFFFFF,
    "%globaltimer_hi": lambda warp: warp.cta.launch.clock() >> 32,
}
