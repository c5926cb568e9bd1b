"""The stand-in for the CUDA driver: compiling it, loading it, and answering for it.

`StandIn` belongs into a process of its own (see `launch_recorder`): once it is loaded, everything
in the process that asks for ``libcuda.so.1`` gets the stand-in.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from emulator.copies.tensor_map import MAX_RANK, TensorMap
from emulator.copies.tensor_map_form import pack
from emulator.copies.tensor_map_rules import reason_refused

from .kernel_image import (
    ELF_HEADER_BYTES,
    ELF_MAGIC,
    FAT_HEADER_BYTES,
    FAT_MAGIC,
    RESERVED_SHARED_BYTES,
    KernelFacts,
    elf_extent,
    elf_kernels,
    elf_size,
    fat_content,
    fat_size,
    ptx_kernels,
)
from .recorded_launch import Device, Launch, MemoryRegion

DRIVER = "libcuda.so.1"
CUTE_RUNTIME = "libcute_dsl_runtime.so"
ALLOCATION_ALIGNMENT = 512
TOTAL_MEMORY_BYTES = 1 << 36

# CUresult
_SUCCESS = 0
_INVALID_VALUE = 1
_INVALID_IMAGE = 200
_NOT_FOUND = 500
_NOT_SUPPORTED = 801
_UNKNOWN = 999

# CUfunction_attribute
_SHARED_SIZE_BYTES = 1
_REGISTERS = 4
_MAX_DYNAMIC_SHARED = 8

# CUlaunchAttributeID
_CLUSTER_DIMENSION = 4
_LAUNCH_ATTRIBUTE_BYTES = 72  # identifier, padding, value
_LAUNCH_VALUE_BYTES = 64

_END_OF_PARAMETERS = 0
_PARAMETER_BUFFER = 1
_PARAMETER_BUFFER_SIZE = 2

THREADS_OF_SM = 2048
CTAS_OF_SM = 32
REGISTERS_OF_SM = 65_536
DEFAULT_SHARED_BYTES = 49_152  # of a CTA, unless an attribute raises it


def find_cuda_header() -> Path | None:
    """The folder of a cuda.h: Triton brings one."""
    triton = importlib.util.find_spec("triton")
    for location in triton.submodule_search_locations or [] if triton else []:
        folder = Path(location) / "backends" / "nvidia" / "include"
        if (folder / "cuda.h").exists():
            return folder
    return None


def reason_unavailable() -> str | None:
    """Why the stand-in cannot be built here, None where it can."""
    if shutil.which("cc") is None:
        return "needs a C compiler, there is no cc"
    if find_cuda_header() is None:
        return "needs cuda.h, which Triton brings and is not installed"
    return None


def build(folder: Path) -> None:
    """Compile the stand-ins for the driver and for CuTe DSL's runtime library into `folder`.

    Raises
    ------
    RuntimeError
        There is no compiler or no header, or the compiler fails.
    """
    reason = reason_unavailable()
    if reason:
        raise RuntimeError(f"the stand-in for the CUDA driver {reason}")
    _compile("driver_standin.c", folder / DRIVER)
    _compile("runtime_standin.c", folder / CUTE_RUNTIME, f"-L{folder}", f"-l:{DRIVER}")


def _compile(source: str, target: Path, *libraries: str) -> None:
    options = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
    options += [f"-Wl,-soname,{target.name}", f"-I{find_cuda_header()}"]
    path = Path(__file__).with_name(source)
    command = ["cc", *options, str(path), "-o", str(target), *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source} does not compile:\n{done.stderr}")


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_char * _LAUNCH_VALUE_BYTES),
    ]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


_size = ctypes.c_size_t
_int = ctypes.c_int
_sizes = ctypes.POINTER(ctypes.c_size_t)
_ints = ctypes.POINTER(ctypes.c_int)
_long_integers = ctypes.POINTER(ctypes.c_uint64)
_integers = ctypes.POINTER(ctypes.c_uint32)
_pointers = ctypes.POINTER(ctypes.c_void_p)

# The C source's `struct answers`, in its order: each is a method of StandIn.
_ANSWERS = {
    "load_image": (_int, ctypes.c_void_p, _sizes),
    "find_kernel": (_int, _size, ctypes.c_char_p, _sizes),
    "kernel_attribute": (_int, _size, _int, _ints),
    "set_kernel_attribute": (_int, _size, _int, _int),
    "parameter": (_int, _size, _size, _sizes, _sizes),
    "occupancy": (_int, _size, _int, _size, _ints),
    "launch": (_int, _size, ctypes.POINTER(_LaunchConfig), _pointers, _pointers),
    "encode_tiled": (
        _int, ctypes.c_void_p, _int, ctypes.c_uint32, _size, _long_integers, _long_integers,
        _integers, _integers, _int, _int, _int, _int,
    ),
    "device_attribute": (_int, _int, _ints),
    "allocate": (_int, _size, _sizes),
    "release": (_int, _size),
    "unanswered": (None, ctypes.c_char_p),
}  # fmt: skip


class _Answers(ctypes.Structure):
    _fields_ = [(name, ctypes.CFUNCTYPE(*types)) for name, types in _ANSWERS.items()]


def _device_attributes(device: Device) -> dict[int, int]:
    """By CUdevice_attribute; what is not here is not answered."""
    major, minor = device.capability
    return {
        1: 1024,  # MAX_THREADS_PER_BLOCK
        2: 1024,  # MAX_BLOCK_DIM_X, Y, Z
        3: 1024,
        4: 64,
        5: 2**31 - 1,  # MAX_GRID_DIM_X, Y, Z
        6: 65_535,
        7: 65_535,
        8: DEFAULT_SHARED_BYTES,  # MAX_SHARED_MEMORY_PER_BLOCK
        10: 32,  # WARP_SIZE
        12: REGISTERS_OF_SM,  # MAX_REGISTERS_PER_BLOCK
        16: device.multiprocessors,  # MULTIPROCESSOR_COUNT
        39: THREADS_OF_SM,  # MAX_THREADS_PER_MULTIPROCESSOR
        41: 1,  # UNIFIED_ADDRESSING
        75: major,  # COMPUTE_CAPABILITY_MAJOR
        76: minor,  # COMPUTE_CAPABILITY_MINOR
        81: device.shared_bytes + RESERVED_SHARED_BYTES,  # MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        82: REGISTERS_OF_SM,  # MAX_REGISTERS_PER_MULTIPROCESSOR
        97: device.shared_bytes,  # MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        106: CTAS_OF_SM,  # MAX_BLOCKS_PER_MULTIPROCESSOR
        111: RESERVED_SHARED_BYTES,  # RESERVED_SHARED_MEMORY_PER_BLOCK
        120: 1,  # CLUSTER_LAUNCH
        127: 1,  # TENSOR_MAP_ACCESS_SUPPORTED
    }


@dataclass
class _Kernel:
    name: str
    image: bytes
    facts: KernelFacts
    attributes: dict[int, int] = field(default_factory=dict)


class StandIn:
    """The stand-in, loaded into this process, and what it recorded.

    Parameters
    ----------
    folder : Path
        With the libraries that `build` made.
    device : Device
        The device that it pretends to be.

    Attributes
    ----------
    launches : list of Launch
        In their order.
    ptx : dict
        PTX of binaries, by the binary: several may hold kernels of one name.
    """

    def __init__(self, folder: Path, device: Device) -> None:
        self.device = device
        self.launches: list[Launch] = []
        self.ptx: dict[bytes, str] = {}
        self._modules: list[tuple[bytes, dict[str, KernelFacts]]] = []
        self._kernels: list[_Kernel] = []
        self._regions: dict[int, tuple[str, int]] = {}
        self._allocations: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._device_attributes = _device_attributes(device)
        self._error: BaseException | None = None
        answers = (
            ctypes.CFUNCTYPE(*types)(self._guarded(name, types[0] is None))
            for name, types in _ANSWERS.items()
        )
        self._answers = _Answers(*answers)
        self._library = ctypes.CDLL(str(folder / DRIVER), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        self._library.standin_set_answers(
            ctypes.byref(self._answers), device.driver_version, _size(TOTAL_MEMORY_BYTES)
        )

    def _guarded(self, name: str, answers_nothing: bool) -> Callable[..., int | None]:
        """An answer whose exception is kept for `check`: it cannot pass through C code."""
        answer = getattr(self, f"_{name}")

        def guarded(*arguments: object) -> int | None:
            try:
                return answer(*arguments)
            except BaseException as error:
                self._error = self._error or error
                return None if answers_nothing else _UNKNOWN

        return guarded

    def check(self, consequence: Exception | None = None) -> None:
        """Raise what went wrong in an answer since the last check, naming what followed from it."""
        error, self._error = self._error, None
        if error is not None:
            raise error from consequence

    def forget(self) -> None:
        """Start over, but for loaded modules and their PTX: no launches, no regions."""
        self.launches = []
        self._regions.clear()
        self._allocations.clear()
        self._error = None

    def add_region(self, name: str, address: int, size: int) -> None:
        """Declare host memory to be device memory: it is recorded with every launch from now on."""
        self._regions.setdefault(address, (name, size))

    def _refuse(self, code: int, why: str) -> int:
        """An error code for the caller, with a reason for whoever checks."""
        self._error = self._error or RuntimeError(f"the stand-in for the CUDA driver: {why}")
        return code

    # Images and kernels; handles are positions in the lists, from 1.

    def _load_image(self, image: int, module: ctypes._Pointer[ctypes.c_size_t]) -> int:
        content = _read_image(image)
        if content is None:
            start = ctypes.string_at(image, 8).hex()
            return self._refuse(
                _INVALID_IMAGE, f"an image starts with {start}: no ELF, fat binary, PTX"
            )
        kernels = (
            elf_kernels(content) if content.startswith(ELF_MAGIC) else ptx_kernels(content.decode())
        )
        self._modules.append((content, kernels))
        module[0] = len(self._modules)
        return _SUCCESS

    def _find_kernel(
        self, module: int, name: bytes, kernel: ctypes._Pointer[ctypes.c_size_t]
    ) -> int:
        image, kernels = self._modules[module - 1]
        facts = kernels.get(name.decode())
        if facts is None:
            return _NOT_FOUND
        self._kernels.append(_Kernel(name.decode(), image, facts))
        kernel[0] = len(self._kernels)
        return _SUCCESS

    def _kernel_attribute(
        self, kernel: int, attribute: int, value: ctypes._Pointer[ctypes.c_int]
    ) -> int:
        found = self._kernels[kernel - 1]
        known: dict[int, int | None] = {
            _SHARED_SIZE_BYTES: found.facts.shared_bytes,
            _REGISTERS: found.facts.registers,
            _MAX_DYNAMIC_SHARED: DEFAULT_SHARED_BYTES - found.facts.shared_bytes,
            **found.attributes,
        }
        answer = known.get(attribute)
        if answer is None:
            return self._refuse(
                _NOT_SUPPORTED, f"attribute {attribute} of a kernel is not answered"
            )
        value[0] = answer
        return _SUCCESS

    def _set_kernel_attribute(self, kernel: int, attribute: int, value: int) -> int:
        if attribute == _MAX_DYNAMIC_SHARED and value > self.device.shared_bytes:
            return _INVALID_VALUE
        self._kernels[kernel - 1].attributes[attribute] = value
        return _SUCCESS

    def _parameter(
        self,
        kernel: int,
        index: int,
        offset: ctypes._Pointer[ctypes.c_size_t],
        size: ctypes._Pointer[ctypes.c_size_t],
    ) -> int:
        parameters = self._kernels[kernel - 1].facts.parameters
        if index >= len(parameters):
            return _INVALID_VALUE
        offset[0] = parameters[index].offset
        if size:
            size[0] = parameters[index].size
        return _SUCCESS

    def _occupancy(
        self, kernel: int, threads: int, shared_bytes: int, blocks: ctypes._Pointer[ctypes.c_int]
    ) -> int:
        facts = self._kernels[kernel - 1].facts
        if facts.registers is None:
            return self._refuse(_NOT_SUPPORTED, "occupancy needs a binary, this kernel is PTX")
        # Registers are handed out per warp, in units of 256; shared memory in units of 128 bytes,
        # and some of it is the system's.
        warps = -(-threads // 32)
        warp_registers = -(-facts.registers * 32 // 256) * 256
        used = -(-(facts.shared_bytes + shared_bytes) // 128) * 128 + RESERVED_SHARED_BYTES
        blocks[0] = min(
            CTAS_OF_SM,
            THREADS_OF_SM // (32 * warps),
            REGISTERS_OF_SM // (warps * warp_registers),
            (self.device.shared_bytes + RESERVED_SHARED_BYTES) // used,
        )
        return _SUCCESS

    # Launches

    def _launch(
        self,
        kernel: int,
        config: ctypes._Pointer[_LaunchConfig],
        parameters: ctypes._Pointer[ctypes.c_void_p],
        extra: ctypes._Pointer[ctypes.c_void_p],
    ) -> int:
        found, given = self._kernels[kernel - 1], config[0]
        attributes = {
            each.id: ctypes.string_at(ctypes.addressof(each) + 8, _LAUNCH_VALUE_BYTES)
            for each in given.attributes[: given.attribute_count]
        }
        limit = found.attributes.get(_MAX_DYNAMIC_SHARED, DEFAULT_SHARED_BYTES)
        if given.shared_bytes > limit:
            why = f"{given.shared_bytes} bytes of shared memory, the kernel's attribute allows"
            return self._refuse(_INVALID_VALUE, f"{why} {limit}")
        ptx = self._ptx_of(found)
        facts = found.facts if ptx is None else _with_layout_of(ptx, found)
        self.launches.append(
            Launch(
                kernel=found.name,
                image=found.image,
                ptx=ptx,
                facts=facts,
                grid=tuple(given.grid),
                block=tuple(given.block),
                cluster=_cluster_of(attributes),
                shared_bytes=given.shared_bytes,
                parameters=_parameter_buffer(facts, parameters, extra),
                kernel_attributes=dict(found.attributes),
                launch_attributes=attributes,
                memory=tuple(self._snapshot()),
            )
        )
        return _SUCCESS

    def _ptx_of(self, kernel: _Kernel) -> str | None:
        if not kernel.image.startswith(ELF_MAGIC):
            return kernel.image.decode()
        return self.ptx.get(kernel.image)

    def _snapshot(self) -> list[MemoryRegion]:
        return [
            MemoryRegion(name, address, ctypes.string_at(address, size))
            for address, (name, size) in sorted(self._regions.items())
        ]

    def _encode_tiled(
        self,
        target: int,
        data_type: int,
        rank: int,
        address: int,
        sizes: ctypes._Pointer[ctypes.c_uint64],
        strides: ctypes._Pointer[ctypes.c_uint64],
        box: ctypes._Pointer[ctypes.c_uint32],
        steps: ctypes._Pointer[ctypes.c_uint32],
        interleave: int,
        swizzle: int,
        promotion: int,
        fill: int,
    ) -> int:
        if not 1 <= rank <= MAX_RANK:
            return self._refuse(_INVALID_VALUE, f"a tensor map of rank {rank}")
        tensor_map = TensorMap(
            data_type,
            address,
            tuple(sizes[:rank]),
            tuple(strides[: rank - 1]),
            tuple(box[:rank]),
            tuple(steps[:rank]),
            interleave,
            swizzle,
            promotion,
            fill,
        )
        reason = reason_refused(tensor_map, self.device.capability)
        if reason:
            return self._refuse(_INVALID_VALUE, f"a tensor map is refused: {reason}")
        form = pack(tensor_map)
        ctypes.memmove(target, form, len(form))
        return _SUCCESS

    # Device

    def _device_attribute(self, attribute: int, value: ctypes._Pointer[ctypes.c_int]) -> int:
        answer = self._device_attributes.get(attribute)
        if answer is None:
            return self._refuse(_NOT_SUPPORTED, f"device attribute {attribute} is not answered")
        value[0] = answer
        return _SUCCESS

    def _allocate(self, size: int, address: ctypes._Pointer[ctypes.c_size_t]) -> int:
        if size == 0:
            return _INVALID_VALUE
        buffer = ctypes.create_string_buffer(size + ALLOCATION_ALIGNMENT)
        start = -(-ctypes.addressof(buffer) // ALLOCATION_ALIGNMENT) * ALLOCATION_ALIGNMENT
        self._allocations[start] = buffer
        self.add_region(f"allocation {len(self._allocations)}", start, size)
        address[0] = start
        return _SUCCESS

    def _release(self, address: int) -> int:
        if address not in self._allocations:
            return _INVALID_VALUE
        del self._allocations[address], self._regions[address]
        return _SUCCESS

    def _unanswered(self, name: bytes) -> None:
        raise NotImplementedError(
            f"the stand-in for the CUDA driver does not answer {name.decode()}"
        )


def _read_image(address: int) -> bytes | None:
    """The ELF file or PTX text at an address, out of its fat binary; None where it is neither."""
    start = ctypes.string_at(address, 4)
    if start == FAT_MAGIC:
        size = fat_size(ctypes.string_at(address, FAT_HEADER_BYTES))
        return fat_content(ctypes.string_at(address, size))
    if start == ELF_MAGIC:
        extent = elf_extent(ctypes.string_at(address, ELF_HEADER_BYTES))
        return ctypes.string_at(address, elf_size(ctypes.string_at(address, extent)))
    text = ctypes.string_at(address)
    return text if b".version" in text else None


def _with_layout_of(ptx: str, kernel: _Kernel) -> KernelFacts:
    """A kernel's facts, its parameters where its PTX has them.

    A binary's offsets count from where its parameters start in constant memory, which only some
    alignments can see; the parameters themselves must be the same.
    """
    parameters = ptx_kernels(ptx)[kernel.name].parameters
    in_ptx, in_binary = (
        [each.size for each in given] for given in (parameters, kernel.facts.parameters)
    )
    if in_ptx != in_binary:
        raise ValueError(f"{kernel.name}: parameters of {in_binary} bytes, its PTX has {in_ptx}")
    return replace(kernel.facts, parameters=parameters)


def _cluster_of(attributes: dict[int, bytes]) -> tuple[int, int, int]:
    value = attributes.get(_CLUSTER_DIMENSION)
    if value is None:
        return (1, 1, 1)
    x, y, z = (int.from_bytes(value[at : at + 4], "little") for at in (0, 4, 8))
    return (x, y, z)


def _parameter_buffer(
    facts: KernelFacts,
    parameters: ctypes._Pointer[ctypes.c_void_p],
    extra: ctypes._Pointer[ctypes.c_void_p],
) -> bytes:
    """The parameter buffer, from pointers to each parameter or from a packed one in `extra`."""
    if extra:
        given = {}
        at = 0
        while extra[at] not in (None, _END_OF_PARAMETERS):
            given[extra[at]] = extra[at + 1]
            at += 2
        size = ctypes.c_size_t.from_address(given[_PARAMETER_BUFFER_SIZE]).value
        if size < facts.parameter_bytes:
            raise ValueError(
                f"{size} bytes of parameters, the kernel takes {facts.parameter_bytes}"
            )
        return ctypes.string_at(given[_PARAMETER_BUFFER], facts.parameter_bytes)
    buffer = bytearray(facts.parameter_bytes)
    for index, each in enumerate(facts.parameters):
        buffer[each.offset : each.offset + each.size] = ctypes.string_at(
            parameters[index], each.size
        )
    return bytes(buffer)
