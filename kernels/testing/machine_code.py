"""The machine code of compiled kernels, as text: for tests and budgets, never for a launch."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
_TARGET = re.compile(r"0x([0-9a-f]+)$")


@dataclass(frozen=True)
class MachineInstruction:
    """One instruction of a kernel."""

    address: int
    predicate: str  # "" where there is none
    opcode: str  # with its modifiers
    operands: str

    @property
    def target(self) -> int | None:
        """Where a branch goes, None for anything else."""
        found = _TARGET.search(self.operands)
        return int(found[1], 16) if self.opcode.startswith("BRA") and found else None

    def __str__(self) -> str:
        return " ".join(part for part in (self.predicate, self.opcode, self.operands) if part)


def find_disassembler() -> str | None:
    """``cuobjdump`` on the path, else the one that Triton carries."""
    found = shutil.which("cuobjdump")
    if found is None:
        try:
            from triton.backends.nvidia import __file__ as backend
        except ImportError:
            return None
        carried = Path(backend).parent / "bin" / "cuobjdump"
        found = str(carried) if carried.exists() else None
    return found


def disassemble(disassembler: str, image: bytes) -> list[MachineInstruction]:
    """The instructions of a device binary with one kernel."""
    listing = _dump(disassembler, "-sass", image)
    return [
        MachineInstruction(int(address, 16), predicate, opcode, operands)
        for address, predicate, opcode, operands in _INSTRUCTION.findall(listing)
    ]


def resource_usage(disassembler: str, image: bytes) -> dict[str, int]:
    """Such as ``REG`` and ``STACK``, of a device binary with one kernel."""
    found = re.findall(r"(\w+):(\d+)", _dump(disassembler, "-res-usage", image))
    return {name: int(number) for name, number in found}


def _dump(disassembler: str, option: str, image: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(image)
        binary.flush()
        command = [disassembler, option, binary.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def innermost_loop(instructions: list[MachineInstruction], opcode: str) -> list[MachineInstruction]:
    """The shortest loop around an instruction whose opcode starts with `opcode`.

    Raises
    ------
    LookupError
        No loop contains such an instruction.
    """
    inside = [each.address for each in instructions if each.opcode.startswith(opcode)]
    loops = [
        (each.target, each.address)
        for each in instructions
        if each.target is not None
        and any(each.target <= address <= each.address for address in inside)
    ]
    if not loops:
        raise LookupError(f"no loop around {opcode}")
    first, last = min(loops, key=lambda loop: loop[1] - loop[0])
    return [each for each in instructions if first <= each.address <= last]
