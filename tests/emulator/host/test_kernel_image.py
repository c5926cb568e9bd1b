"""What is read of device images: parameters in PTX, and images in fat binaries."""

from __future__ import annotations

import struct

import pytest

from .kernel_image import (
    FAT_MAGIC,
    KernelFacts,
    Parameter,
    elf_kernels,
    fat_content,
    fat_size,
    ptx_kernels,
)

PTX = """
.version 8.6
.target sm_90a
.address_size 64
// .entry commented(.param .u64 a) {}
.visible .func helper(.param .b32 x) { ret; }
.entry nothing { ret; }
.visible .entry mixed(
    .param .u8 flag,
    .param .u64 .ptr .global .align 16 keys, /* .param .u32 no, */
    .param .b32 count,
    .param .align 64 .b8 map[128],
    .param .f32 scale
)
.maxntid 128, 1, 1
.minnctapersm 2
{ ret; }
.entry array(.param .b16 values[5], .param .u16 last) { ret; }
"""


def _fat(*images: bytes, compressed: int = 0) -> bytes:
    entries = b"".join(
        struct.pack("<HHIQI", 2, 257, 24, len(image), compressed) + bytes(4) + image
        for image in images
    )
    return FAT_MAGIC + struct.pack("<HHQ", 1, 16, len(entries)) + entries


def test_parameters_of_ptx_lie_at_their_alignment() -> None:
    kernels = ptx_kernels(PTX)
    assert list(kernels) == ["nothing", "mixed", "array"]
    assert kernels["nothing"] == KernelFacts(())
    places = [(0, 1), (8, 8), (16, 4), (64, 128), (192, 4)]
    assert kernels["mixed"].parameters == tuple(Parameter(*place) for place in places)
    assert kernels["mixed"].parameter_bytes == 196
    assert kernels["array"].parameters == (Parameter(0, 10), Parameter(10, 2))


def test_a_parameter_that_is_not_understood_is_named() -> None:
    with pytest.raises(ValueError, match=r"not a parameter .*\.param \.texref image"):
        ptx_kernels(".entry kernel(.param .texref image) { ret; }")


def test_the_image_of_a_fat_binary() -> None:
    fat = _fat(b"an image")
    assert fat_size(fat[:16]) == len(fat)
    assert fat_content(fat) == b"an image"


def test_fat_binaries_that_are_not_understood_are_refused() -> None:
    with pytest.raises(ValueError, match="must hold one image, this one holds 2"):
        fat_content(_fat(b"one", b"two"))
    with pytest.raises(ValueError, match="compressed"):
        fat_content(_fat(b"image", compressed=3))


def test_a_binary_without_kernels() -> None:
    # A header, and sections: nothing, names, symbols, their strings, attributes.
    names = b"\0.shstrtab\0.symtab\0.strtab\0.nv.info\0"
    starts = [0, 1, 11, 19, 27]
    sizes = [0, len(names), 0, 0, 0]
    sections = b"".join(
        struct.pack("<IIQQQQIIQQ", start, 1, 0, 0, 64, size, 0, 0, 0, 0)
        for start, size in zip(starts, sizes, strict=True)
    )
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, 64 + len(names))
    struct.pack_into("<HH", header, 0x3C, 5, 1)
    assert elf_kernels(bytes(header) + names + sections) == {}
