"""The torch device that a caller names, refused where there is none."""

from __future__ import annotations

import torch

from .errors import InputError, UnsupportedError


def known_device(device: torch.device | str) -> torch.device:
    """The device of that name: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises
    ------
    InputError
        It is none of these.
    UnsupportedError
        This process has no such device.
    """
    try:
        known = torch.device(device)
    except RuntimeError:
        known = None
    if known is None or known.type not in ("cpu", "cuda"):
        raise InputError(f"must be cpu, cuda or cuda:N, got {str(device)!r}", argument="device")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if known.type == "cuda" and (known.index or 0) >= found:
        raise UnsupportedError(
            f"{device}: this process sees {found} CUDA devices", argument="device"
        )
    return known
