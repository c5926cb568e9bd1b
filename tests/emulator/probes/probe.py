"""What a probe is, and the frame of PTX around its instructions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass, replace

import numpy as np

from emulator.copies.tensor_map import TensorMap

UNWRITTEN_BYTE = 0xA5  # what outputs hold before a launch
MAP_BYTES = 128


@dataclass(frozen=True)
class Probe:
    """One small kernel, its inputs and its launch.

    Attributes
    ----------
    name : str
        Unique; the instruction or what is tried.
    ptx : str
        A module whose one entry, ``probe``, takes the address of every input, of the output, and
        then the tensor maps.
    inputs : tuple of np.ndarray
        One region of memory each; a kernel may write them.
    output_bytes : int
        Size of the output region, which starts as `UNWRITTEN_BYTE`.
    grid, block : int
        CTAs and threads, in one dimension.
    shared_bytes : int
        Dynamic shared memory.
    maps : tuple of (int, TensorMap)
        The input that a map is of (-1: the output), and the map, its address relative to that.
    """

    name: str
    ptx: str
    inputs: tuple[np.ndarray, ...]
    output_bytes: int
    block: int = 32
    grid: int = 1
    shared_bytes: int = 0
    maps: tuple[tuple[int, TensorMap], ...] = ()

    def digest(self) -> str:
        """Of everything that the recorded output depends on."""
        parts = [self.ptx.encode(), repr((self.output_bytes, self.grid, self.block)).encode()]
        maps = [(region, astuple(tensor_map)) for region, tensor_map in self.maps]
        parts.append(json.dumps([self.shared_bytes, maps]).encode())
        parts += [each.tobytes() for each in self.inputs]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]

    def placed_maps(self, addresses: list[int]) -> list[TensorMap]:
        """The tensor maps, given the addresses of the inputs and, last, of the output."""
        return [
            replace(tensor_map, address=addresses[region] + tensor_map.address)
            for region, tensor_map in self.maps
        ]


def raw_bytes(name: str, count: int) -> np.ndarray:
    """`count` random bytes that depend on `name` alone.

    Drawn from the raw stream of PCG64, which NumPy keeps the same in all versions.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    words = np.random.PCG64(seed).random_raw(-(-count // 8))
    return np.asarray(words, dtype="<u8").view(np.uint8)[:count].copy()


def random_integers(name: str, count: int, low: int, high: int) -> np.ndarray:
    """`count` int64 values from `low` up to, not including, `high`."""
    return low + (raw_bytes(name, 8 * count).view("<u8") % np.uint64(high - low)).astype(np.int64)


def module(inputs: int, body: str, declarations: str = "", maps: int = 0) -> str:
    """A PTX module around the body of a probe.

    The body finds addresses in ``in0``, ``in1``, ... and ``out``, the thread in ``tid``, and the
    generic addresses of tensor maps in ``map0``, ...; ``shared`` is dynamic shared memory.
    """
    names = [f"in{index}" for index in range(inputs)] + ["out"]
    map_names = [f"map{index}" for index in range(maps)]
    parameters = [f".param .u64 {name}_param" for name in names]
    parameters += [f".param .align 64 .b8 {name}_param[{MAP_BYTES}]" for name in map_names]
    loads = [
        f"ld.param.u64 {name}, [{name}_param];\n    cvta.to.global.u64 {name}, {name};"
        for name in names
    ]
    loads += [
        f"mov.b64 {name}, {name}_param;\n    cvta.param.u64 {name}, {name};" for name in map_names
    ]
    newline = "\n    "
    return f"""\
.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 shared[];
{declarations}
.visible .entry probe({", ".join(parameters)})
{{
    .reg .b64 {", ".join(names + map_names)};
    .reg .b32 tid;
    {newline.join(loads)}
    mov.u32 tid, %tid.x;
{_indented(body)}
    ret;
}}
"""


def _indented(body: str) -> str:
    lines = (line.strip() for line in body.strip().splitlines())
    return "\n".join(f"    {line}" if line else "" for line in lines)
