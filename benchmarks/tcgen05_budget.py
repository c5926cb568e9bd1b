"""What a tile costs the tensor-core kernels on an SM, from their machine code; needs no GPU.

Prints, as Markdown, the instructions of each role's loop over tiles, and what a tile keeps busy of
an SM next to the time that its bytes take to arrive at the read roof:

    python benchmarks/tcgen05_budget.py > benchmarks/results/tcgen05-budget.md
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

from sdsa_kernels.cute.compile import compile_variant
from sdsa_kernels.cute.tcgen05.rings import STORE_WARPS
from sdsa_kernels.cute.tcgen05.tiles import FORMATS, TILE_KEYS, TileFormat
from sdsa_kernels.testing.machine_code import (
    MachineInstruction,
    disassemble,
    find_disassembler,
    innermost_loop,
)
from sdsa_quant.layout import MAX_ROWS

ARCHITECTURE = "sm_100a"

# A B200, as its data sheet has it; the clock is an assumption, a higher one leaves more slots.
ROOF_BYTES_PER_SECOND = 8e12
SMS = 148
CLOCK_HZ = 1.85e9
SCHEDULERS = 4  # each issues one instruction of a warp a cycle
SHARED_BYTES_PER_CYCLE = 128
TENSOR_MEMORY_BYTES_PER_CYCLE = 4 * 128  # a quarter of the lanes for each of 4 warps
LATENCY_SECONDS = 1e-6  # of a read from DRAM under load

ROLES = {"copies": "UTMALDG.3D", "MMAs": "UTC", "scores": "LDTM"}
MMA_OPCODES = ("UTCOMMA", "UTCHMMA")


@dataclass(frozen=True)
class Use:
    """What a tile takes of one resource of an SM, in cycles."""

    resource: str
    cycles: float
    how: str


def kind_of(opcode: str) -> str:
    """Which part of the SM an instruction is for, roughly."""
    name = opcode.split(".")[0]
    if name.startswith(("UTMA", "UTC", "LDTM", "UBLKCP")):
        return "tensor"
    if name in ("LDGSTS", "LDG", "STG", "LDS", "STS", "SYNCS", "ARRIVES", "FENCE", "MEMBAR"):
        return "memory, barriers"
    if name in ("BRA", "BSSY", "BSYNC", "ELECT", "NOP", "WARPSYNC", "DEPBAR"):
        return "control"
    return "uniform" if name.startswith(("U", "R2UR", "S2UR", "VOTEU")) else "arithmetic"


def role_loops(variant: str) -> dict[str, list[MachineInstruction]]:
    """The loop over tiles of each role."""
    disassembler = find_disassembler()
    if disassembler is None:
        sys.exit("needs cuobjdump, on the path or in Triton's package")
    code = disassemble(disassembler, compile_variant(ARCHITECTURE, variant).image)
    mma = next(each.opcode for each in code if each.opcode.startswith(MMA_OPCODES))
    return {
        role: innermost_loop(code, mma if role == "MMAs" else opcode)
        for role, opcode in ROLES.items()
    }


def tile_bytes(tile: TileFormat, rows: int) -> int:
    """Bytes that a tile moves between the SM and memory."""
    return tile.stage_bytes + rows * TILE_KEYS * 4


def roof_cycles(size: int) -> float:
    """Cycles in which an SM's part of the roof moves some bytes."""
    return size * SMS * CLOCK_HZ / ROOF_BYTES_PER_SECOND


def uses(tile: TileFormat, loops: dict[str, list[MachineInstruction]]) -> list[Use]:
    """What a tile takes of an SM, whatever the number of rows."""
    warps = {"copies": 1, "MMAs": 1, "scores": STORE_WARPS}
    slots = sum(len(loop) * warps[role] for role, loop in loops.items())
    scale_stores = sum(each.opcode.startswith("LDGSTS") for each in loops["copies"])
    operand_bytes = tile.key_bytes + tile.query_bytes + tile.scale_bytes
    store_cycles = tile.key_bytes / SHARED_BYTES_PER_CYCLE + 4 * scale_stores
    boxes = tile.key_bytes // tile.row_bytes
    return [
        Use("issue slots", slots / SCHEDULERS, f"{slots} instructions of warps, 4 a cycle"),
        Use(
            "shared memory",
            store_cycles + operand_bytes / SHARED_BYTES_PER_CYCLE,
            f"{tile.key_bytes:,} bytes of keys and {operand_bytes:,} of operands at 128 a cycle"
            + (f", {scale_stores} copies of words at 4 cycles" if scale_stores else ""),
        ),
        Use(
            "copy engine",
            boxes,
            f"{boxes} rows of {tile.row_bytes} bytes, assumed to take a cycle each",
        ),
        Use(
            "tensor memory",
            TILE_KEYS * MAX_ROWS * 4 / TENSOR_MEMORY_BYTES_PER_CYCLE,
            f"{TILE_KEYS * MAX_ROWS * 4:,} bytes of scores at 512 a cycle",
        ),
    ]


def print_budget(variant: str) -> None:
    tile, loops = FORMATS[variant], role_loops(variant)
    print(f"## {variant}\n")
    kinds = sorted({kind_of(each.opcode) for loop in loops.values() for each in loop})
    print(f"| instructions of a warp for a tile | {' | '.join(kinds)} | all |")
    print(f"| --- |{' ---: |' * (len(kinds) + 1)}")
    for role, loop in loops.items():
        counts = Counter(kind_of(each.opcode) for each in loop)
        cells = [str(counts[kind]) for kind in kinds]
        label = f"{role}, each of {STORE_WARPS} warps" if role == "scores" else role
        print(f"| {label} | {' | '.join(cells)} | {len(loop)} |")
    one, eight = (roof_cycles(tile_bytes(tile, rows)) for rows in (1, MAX_ROWS))
    print(
        f"\nAt the roof a tile takes {one:.0f} cycles with 1 row ({tile_bytes(tile, 1):,} bytes) "
        f"and {eight:.0f} with 8 ({tile_bytes(tile, MAX_ROWS):,}).\n"
    )
    print("| of an SM | cycles | share, 1 row | share, 8 rows | how |")
    print("| --- | ---: | ---: | ---: | --- |")
    for use in uses(tile, loops):
        print(
            f"| {use.resource} | {use.cycles:.0f} | {use.cycles / one:.0%} | "
            f"{use.cycles / eight:.0%} | {use.how} |"
        )
    ring = f"{tile.ctas_per_sm} CTAs of {tile.stages} stages"
    flying = tile.stages * tile.stage_bytes * tile.ctas_per_sm
    needed = ROOF_BYTES_PER_SECOND * LATENCY_SECONDS / SMS
    print(
        f"\nUnder way on an SM: {flying:,} bytes ({ring}); the roof times "
        f"{LATENCY_SECONDS * 1e6:.0f} us of latency is {needed:,.0f}.\n"
    )
    for role, loop in loops.items():
        print(f"<details><summary>{role}: {len(loop)} instructions</summary>\n")
        print("\n".join(f"    {each}" for each in loop))
        print("\n</details>\n")


def main() -> None:
    print("# The budget of a tile\n")
    print(
        f"Made by `benchmarks/tcgen05_budget.py` from the machine code for `{ARCHITECTURE}`; "
        f"[tcgen05.md](../../docs/explanation/tcgen05.md) says what follows.\n"
        f"A B200 is taken to have {SMS} SMs at {CLOCK_HZ / 1e9} GHz and "
        f"{ROOF_BYTES_PER_SECOND / 1e12:.0f} TB/s. None of this was measured on one.\n"
    )
    for variant in FORMATS:
        print_budget(variant)


if __name__ == "__main__":
    main()
