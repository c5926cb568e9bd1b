"""What the bytes of a device image (an ELF binary or PTX text) say of the kernels in it.

A binary is a 64-bit little-endian ELF file. Its sections ``.nv.info`` and ``.nv.info.<kernel>`` are
lists of attributes: one byte of format, one of attribute, then a 16-bit value or, in format 4, a
16-bit size and as many bytes. Attribute 0x17 describes a parameter: 32 bits of index, 16 of
ordinal, 16 of offset, 32 of which the upper 14 are the size in bytes. Attribute 0x2f holds a symbol
and the registers of its threads. ``cuobjdump -elf`` prints them as EIATTR_KPARAM_INFO and
EIATTR_REGCOUNT; the tests compare what is read here with the PTX of the same kernel.

A fat binary starts with 16 bytes: magic, 16 bits of version and of header size, 64 of content size.
Each entry has 16 bits of kind (1 PTX, 2 ELF) and of version, 32 of header size, 64 of content size
and 32 of compressed size, zero where it is not compressed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

ELF_MAGIC = b"\x7fELF"
ELF_HEADER_BYTES = 64
FAT_MAGIC = bytes.fromhex("50ed55ba")
FAT_HEADER_BYTES = 16
RESERVED_SHARED_BYTES = 1024
_SECTION_BYTES = 64
_SEGMENT_BYTES = 56
_NO_BITS = 8  # kind of a section without bytes in the file
_SIZED_FORMAT = 4
_PARAMETER_INFO = 0x17
_REGISTER_COUNT = 0x2F
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(
    r"\.entry\s+(?P<name>[\w$]+)\s*(?:\((?P<parameters>.*?)\))?\s*(?=[.{;])", re.DOTALL
)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.[a-z]+(?P<bits>8|16|32|64)\b"
    r"(?:\s+\.ptr\b.*?)?\s+[\w$%]+\s*(?:\[(?P<count>\d+)\])?\s*$",
    re.DOTALL,
)


@dataclass(frozen=True)
class Parameter:
    """Where a kernel parameter lies in the parameter buffer, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True)
class KernelFacts:
    """What the host must know of a kernel."""

    parameters: tuple[Parameter, ...]
    registers: int | None = None  # of a thread; None in PTX
    shared_bytes: int = 0  # static, of a CTA

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameter buffer."""
        return max((each.offset + each.size for each in self.parameters), default=0)


def fat_size(header: bytes) -> int:
    """Bytes of a fat binary, from its header."""
    _, header_size, content_size = struct.unpack_from("<HHQ", header, 4)
    return header_size + content_size


def fat_content(fat: bytes) -> bytes:
    """The one image in a fat binary.

    Raises
    ------
    ValueError
        There is not exactly one image, or it is compressed.
    """
    (at,) = struct.unpack_from("<H", fat, 6)
    images = []
    while at < len(fat):
        _, _, header_size, size, compressed = struct.unpack_from("<HHIQI", fat, at)
        if compressed:
            raise ValueError("a fat binary holds a compressed image: that is not supported")
        images.append(fat[at + header_size : at + header_size + size])
        at += header_size + size
    if len(images) != 1:
        raise ValueError(f"a fat binary must hold one image, this one holds {len(images)}")
    return images[0]


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int


def elf_extent(header: bytes) -> int:
    """Bytes up to the end of both tables of an ELF file, from its header."""
    (segments, sections) = struct.unpack_from("<QQ", header, 0x20)
    segment_count, _, section_count = struct.unpack_from("<HHH", header, 0x38)
    return max(segments + segment_count * _SEGMENT_BYTES, sections + section_count * _SECTION_BYTES)


def _sections(image: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", image, 0x28)
    count, names_index = struct.unpack_from("<HH", image, 0x3C)
    rows = [struct.unpack_from("<IIQQQQ", image, table + _SECTION_BYTES * i) for i in range(count)]
    names = rows[names_index][4]

    def text(start: int) -> str:
        return image[start : image.index(b"\0", start)].decode()

    return [_Section(text(names + row[0]), row[1], row[4], row[5]) for row in rows]


def elf_size(image: bytes) -> int:
    """Bytes of the ELF file that `image` starts with; `image` holds at least `elf_extent`."""
    ends = (each.offset + each.size for each in _sections(image) if each.kind != _NO_BITS)
    return max(elf_extent(image), *ends)


def _architecture(image: bytes) -> int:
    """Such as 90: in the flags, where depends on the version of the ABI."""
    (flags,) = struct.unpack_from("<I", image, 0x30)
    return flags & 0xFF if image[8] < 8 else flags >> 8 & 0xFF


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        size = value if form == _SIZED_FORMAT else 0
        yield attribute, info[at + 4 : at + 4 + size]
        at += 4 + size


def _symbol_names(image: bytes, sections: dict[str, _Section]) -> list[str]:
    table, strings = sections[".symtab"], sections[".strtab"]
    names = []
    for at in range(table.offset, table.offset + table.size, 24):
        start = strings.offset + struct.unpack_from("<I", image, at)[0]
        names.append(image[start : image.index(b"\0", start)].decode())
    return names


def elf_kernels(image: bytes) -> dict[str, KernelFacts]:
    """The kernels of a binary by name."""
    sections = {each.name: each for each in _sections(image)}

    def content(name: str) -> bytes:
        section = sections[name]
        return image[section.offset : section.offset + section.size]

    symbols = _symbol_names(image, sections)
    registers = {
        symbols[symbol]: count
        for attribute, value in _attributes(content(".nv.info"))
        if attribute == _REGISTER_COUNT
        for symbol, count in [struct.unpack("<II", value)]
    }
    kernels = {}
    prefix = ".nv.info."
    for name in sections:
        if not name.startswith(prefix):
            continue
        kernel = name.removeprefix(prefix)
        if f".text.{kernel}" not in sections:
            continue
        found = {}
        for attribute, value in _attributes(content(name)):
            if attribute == _PARAMETER_INFO:
                _, ordinal, offset, size = struct.unpack("<IHHI", value)
                found[ordinal] = Parameter(offset, size >> 18)
        shared = sections.get(f".nv.shared.{kernel}")
        # From SM90 on a kernel's section starts with what the system reserves of every CTA.
        reserved = RESERVED_SHARED_BYTES if _architecture(image) >= 90 else 0
        kernels[kernel] = KernelFacts(
            tuple(found[ordinal] for ordinal in sorted(found)),
            registers.get(kernel),
            shared.size - reserved if shared else 0,
        )
    return kernels


def _ptx_parameters(text: str) -> tuple[Parameter, ...]:
    parameters: list[Parameter] = []
    end = 0
    for declaration in filter(None, (part.strip() for part in text.split(","))):
        match = _PARAMETER.match(declaration)
        if match is None:
            raise ValueError(f"not a parameter that is understood: {declaration!r}")
        element = int(match["bits"]) // 8
        alignment = int(match["align"] or element)
        offset = -(-end // alignment) * alignment
        parameters.append(Parameter(offset, element * int(match["count"] or 1)))
        end = offset + parameters[-1].size
    return tuple(parameters)


def ptx_kernels(ptx: str) -> dict[str, KernelFacts]:
    """The kernels of a PTX module by name.

    Parameters are laid out in their order, each at the next multiple of its alignment (PTX ISA,
    "Kernel Function Parameters"); an array's is ``.align``, by default that of its elements.
    """
    code = _COMMENT.sub(" ", ptx)
    return {
        match["name"]: KernelFacts(_ptx_parameters(match["parameters"] or ""))
        for match in _ENTRY.finditer(code)
    }
