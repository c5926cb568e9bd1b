"""Where everything lies in the generic address space ("Generic Addressing", PTX ISA 6.4.1.1).

Global memory lies at the addresses of its regions, which are below all windows. Constant variables,
module variables and kernel parameters have places of the emulator's choice and the same address in
their own space; parameters lie below 4 GiB, as compilers hold their addresses in 32 bits. Shared
and local memory are windows: an address within the space is an offset.
"""

from __future__ import annotations

HIGHEST_GLOBAL = 1 << 56
MODULE_VARIABLES = 1 << 57
PARAMETERS, PARAMETER_BYTES = 1 << 16, 1 << 15
LOCAL_WINDOW = 1 << 59
SHARED_WINDOW = 1 << 60
WINDOW_BYTES = 1 << 32

# As on SM90, the first kilobyte of shared memory belongs to the system.
SHARED_BASE = 1024
