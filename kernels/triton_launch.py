"""What every Triton launch needs to know of the process: the interpreter, Gluon, options."""

from __future__ import annotations

import functools
import os

from .availability import package_version

_GLUON_SINCE = (3, 6)

# Said at every launch, because Triton 3.9 warns where it is left to a default that will change.
# Where a product is to be fused with a sum, the kernels say `fma`.
COMPILE_OPTIONS = {"enable_fp_fusion": False}


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def has_gluon() -> bool:
    """Whether the installed Triton has the Gluon features that `triton_gluon` uses."""
    version = package_version("triton")
    if version is None:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= _GLUON_SINCE
