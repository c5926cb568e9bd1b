"""What a recorded launch consists of: plain data that travels between processes."""

from __future__ import annotations

from dataclasses import dataclass

from .kernel_image import KernelFacts


@dataclass(frozen=True)
class MemoryRegion:
    """Bytes of device memory at a launch, at the address that the kernel sees."""

    name: str
    address: int
    content: bytes

    def __contains__(self, address: int) -> bool:
        return self.address <= address < self.address + len(self.content)


@dataclass(frozen=True)
class Launch:
    """One kernel launch, as the driver got it.

    Attributes
    ----------
    kernel : str
        The kernel's symbol.
    image : bytes
        What it was loaded from: an ELF binary or PTX.
    ptx : str or None
        PTX of the kernel: the image itself, or what the compiler kept beside it.
    facts : KernelFacts
        Parameters, registers and static shared memory, from the image.
    grid, block, cluster : tuple of int
        In CTAs, threads and CTAs; x, y, z.
    shared_bytes : int
        Dynamic shared memory of a CTA.
    parameters : bytes
        The parameter buffer; gaps between parameters are zero.
    kernel_attributes, launch_attributes : dict
        By CUfunction_attribute and CUlaunchAttributeID; launch attributes as their raw bytes.
    memory : tuple of MemoryRegion
        Every region of device memory, as it was at the launch.
    """

    kernel: str
    image: bytes
    ptx: str | None
    facts: KernelFacts
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameters: bytes
    kernel_attributes: dict[int, int]
    launch_attributes: dict[int, bytes]
    memory: tuple[MemoryRegion, ...]

    def parameter(self, index: int) -> bytes:
        """Bytes of one parameter."""
        where = self.facts.parameters[index]
        return self.parameters[where.offset : where.offset + where.size]

    def region(self, name: str) -> MemoryRegion:
        """The region of a name."""
        return next(each for each in self.memory if each.name == name)


@dataclass(frozen=True)
class Device:
    """The device that a host path is to see.

    Attributes
    ----------
    capability : tuple of int
        Compute capability.
    multiprocessors : int
    shared_bytes : int
        Most dynamic shared memory that a CTA can ask for.
    driver_version : int
        As cuDriverGetVersion gives it.
    """

    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    shared_bytes: int = 232_448
    driver_version: int = 13_000
