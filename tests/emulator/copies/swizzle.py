"""How shared-memory addresses are swizzled by tensor copies and by matrix descriptors.

Source: PTX ISA, "Swizzling Modes" (patterns as tables of 16-byte cells, one row per 128-byte line
of shared memory) and "Shared memory descriptor". All patterns are an XOR of some bits of the byte
address within its 128-byte line with the low bits of the number of that line:

| mode            | address bits changed | by line bits | repeats every |
| --------------- | -------------------- | ------------ | ------------- |
| 32B             | 4                    | 7            | 256 bytes     |
| 64B             | 4-5                  | 7-8          | 512 bytes     |
| 128B            | 4-6                  | 7-9          | 1024 bytes    |
| 128B, atom 32B  | 5-6                  | 7-8          | 512 bytes     |
| 128B, atom 64B  | 6                    | 7            | 256 bytes     |

The pattern is fixed to absolute shared-memory addresses: a buffer that does not start on a boundary
of the last column begins somewhere inside the pattern.
"""

from dataclasses import dataclass

import numpy as np

LINE_BITS = 7  # a line is 128 bytes


@dataclass(frozen=True)
class Swizzle:
    """One swizzling mode.

    Attributes
    ----------
    name : str
        For messages.
    span : int
        Bytes of a row within which cells move (the "swizzle size"); 0 without swizzling.
    bits : int
        Number of address bits that change.
    lowest : int
        The lowest of these bits: cells of `2**lowest` bytes stay whole.
    """

    name: str
    span: int
    bits: int
    lowest: int

    @property
    def period(self) -> int:
        """Bytes after which the pattern repeats."""
        return 1 << (LINE_BITS + self.bits)

    def apply(self, addresses: np.ndarray, first_line: int = 0) -> np.ndarray:
        """Physical addresses of bytes whose addresses without swizzling are `addresses`.

        Parameters
        ----------
        addresses : np.ndarray
            Shared-memory byte addresses, int64, any shape.
        first_line : int
            Number of the 128-byte line where the pattern begins (the "matrix base offset").

        Returns
        -------
        np.ndarray
            int64, same shape. The mapping is its own inverse.
        """
        if self.bits == 0:
            return addresses
        lines = (addresses >> LINE_BITS) - first_line
        return addresses ^ ((lines & ((1 << self.bits) - 1)) << self.lowest)


NONE = Swizzle("none", 0, 0, 4)
B32 = Swizzle("32B", 32, 1, 4)
B64 = Swizzle("64B", 64, 2, 4)
B128 = Swizzle("128B", 128, 3, 4)
B128_ATOM_32B = Swizzle("128B with 32B atoms", 128, 2, 5)
B128_ATOM_64B = Swizzle("128B with 64B atoms", 128, 1, 6)
