"""Switches in the environment: what counts as on, what as off, and that nothing else passes."""

from __future__ import annotations

import os
import sys

from sdsa_quant.errors import InputError

CHECK = "SDSA_CHECK"
TCGEN05 = "SDSA_TCGEN05"
_INTERPRET = "TRITON_INTERPRET"

_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")


def is_on(name: str, *, default: bool) -> bool:
    """Whether a switch is on: 1, true, yes or on, in any case, for yes; 0, false, no or off for no.

    Parameters
    ----------
    name : str
        Variable of the environment.
    default : bool
        What a variable that is not set means.

    Raises
    ------
    ValueError
        The variable holds anything else: a mistyped switch is not a silent no.
    """
    value = os.environ.get(name)
    if value is None:
        return default
    word = value.strip().lower()
    if word in _ON:
        return True
    if word in _OFF:
        return False
    raise InputError(
        f"{name} in the environment must be one of {', '.join(_ON + _OFF)}, got {value!r}"
    )


def checked_mode() -> bool:
    """Whether every call reads its device values and validates them (``SDSA_CHECK``)."""
    # The test first: a call that is not checked asks for nothing else.
    return CHECK in os.environ and is_on(CHECK, default=False)


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors; Triton's own answer."""
    if _INTERPRET not in os.environ and "triton" not in sys.modules:
        return False
    try:
        from triton import knobs
    except ImportError:  # no Triton, or one from before 3.4, which takes this one spelling
        return os.environ.get(_INTERPRET, "0") == "1"
    return bool(knobs.runtime.interpret)
