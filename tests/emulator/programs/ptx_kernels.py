"""Small PTX kernels for tests: what is the same in all of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from emulator.machine.launch import Report, run_kernel
from emulator.machine.memory import Region

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
REGISTERS = """
    .reg .pred %p<10>; .reg .b16 %h<10>; .reg .b32 %r<200>; .reg .b32 %f<200>; .reg .b64 %rd<40>;
"""
# %r0 is the thread, %p0 whether it is thread 0, %r1 its warp; %rd0, %rd1, ... are the parameters.
PROLOGUE = """
    mov.u32 %r0, %tid.x;
    setp.eq.u32 %p0, %r0, 0;
    shr.u32 %r1, %r0, 5;
"""
SEEDS = range(8)  # one of each policy


def kernel(body: str, pointers: int, shared: int = 8192, maps: int = 0) -> str:
    """A module with one kernel, `k`.

    Parameters
    ----------
    body : str
        Its instructions after the prologue; without the last `ret`.
    pointers : int
        Parameters of 64 bits, loaded to %rd0, %rd1, ...
    shared : int
        Bytes of the shared array `smem`, aligned to 1024; mbarriers `full` and `empty` and the word
        `slot` are beside it.
    maps : int
        Tensor maps, parameters `map0`, `map1`, ... behind the pointers.
    """
    names = [f".param .b64 p{i}" for i in range(pointers)]
    names += [f".param .align 64 .b8 map{i}[128]" for i in range(maps)]
    loads = "\n".join(f"    ld.param.b64 %rd{i}, [p{i}];" for i in range(pointers))
    return f"""{HEADER}
.visible .entry k({", ".join(names)})
{{
    {REGISTERS}
    .shared .align 1024 .b8 smem[{shared}];
    .shared .align 8 .b64 full;
    .shared .align 8 .b64 empty;
    .shared .align 4 .b32 slot;
{loads}
{PROLOGUE}
{body}
    ret;
}}
"""


def initialize(*barriers: str) -> str:
    """Thread 0 makes mbarriers of one arrival; everybody waits for it."""
    inits = "\n".join(f"    @%p0 mbarrier.init.shared::cta.b64 [{name}], 1;" for name in barriers)
    return f"""{inits}
    @%p0 fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""


def expect(barrier: str, size: int) -> str:
    """Thread 0 arrives and expects `size` bytes."""
    return f"    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {size};\n"


def wait(barrier: str, parity: int, label: str) -> str:
    """Everybody waits for a phase of an mbarrier."""
    return f"""
{label}:
    mbarrier.try_wait.parity.shared::cta.b64 %p9, [{barrier}], {parity};
    @!%p9 bra {label};
"""


def run(
    ptx: str,
    memory: Sequence[Region],
    *,
    seed: int = 0,
    block: int = 32,
    maps: Sequence[bytes] = (),
    pointers: Sequence[int] | None = None,
    strict: bool = True,
) -> Report:
    """Run `k` with one CTA; its parameters are the regions' addresses, then tensor maps."""
    given = [region.base for region in memory] if pointers is None else pointers
    parameters = struct.pack(f"<{len(given)}Q", *given)
    if maps:
        parameters = parameters.ljust(-(-len(parameters) // 64) * 64, b"\0") + b"".join(maps)
    return run_kernel(ptx, "k", 1, block, parameters, memory, seed=seed, strict=strict)
