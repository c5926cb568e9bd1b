"""What stops an emulated kernel, one class per kind of fault."""

from __future__ import annotations


class EmulationError(Exception):
    """A fault of the emulated kernel.

    Raised with what is known where it is found; `located` adds the kernel, the line of PTX, the
    warp and the lanes on the way out.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.located_at: str | None = None

    def locate(self, place: str) -> None:
        """Say where it happened; the innermost place stands."""
        if self.located_at is None:
            self.located_at = place

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.located_at is None else f"{message} [{self.located_at}]"


# What a test may expect.
Faults = type[EmulationError] | tuple[type[EmulationError], ...]


class UnsupportedInstruction(EmulationError):
    """An instruction, modifier, special register or field that the emulator does not implement."""


class PtxSyntaxError(EmulationError):
    """Text that is not PTX as the emulator knows it."""


class UnwrittenRead(EmulationError):
    """Bytes were read that nothing has written."""


class InFlightRead(EmulationError):
    """Bytes were read that an asynchronous operation may still be writing."""


class InFlightWrite(EmulationError):
    """Bytes were written that an asynchronous operation may still be reading or writing."""


class MissingProxyFence(EmulationError):
    """The async proxy touches bytes of the generic proxy with no proxy fence between."""


class DataRace(EmulationError):
    """Two warps touch the same bytes, at least one of them writing, and nothing orders them."""


class OutOfBounds(EmulationError):
    """An access outside every region."""


class Misaligned(EmulationError):
    """An address that is no multiple of the access's width."""


class PhaseError(EmulationError):
    """Misuse of a barrier: its counts, its phases, or its lifetime."""


class TensorMemoryLeak(EmulationError):
    """Tensor memory still allocated when its CTA ends."""


class TensorMemoryMisuse(EmulationError):
    """An access to tensor memory that its allocation or its rules do not allow."""


class UnfinishedAsync(EmulationError):
    """Asynchronous work on shared memory that nobody waited for when the CTA ended."""


class DivergentExecution(EmulationError):
    """An instruction that lanes must execute together was executed by some of them."""


class Deadlock(EmulationError):
    """Nothing can run any more."""


class Trapped(EmulationError):
    """The kernel executed `trap`."""
