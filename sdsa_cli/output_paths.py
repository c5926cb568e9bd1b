"""Files that options name for a command to write."""

from __future__ import annotations

import os
from pathlib import Path

from sdsa_quant.errors import InputError
from sdsa_quant.files.outputs import STDOUT


def file_output(option: str, text: str) -> Path:
    """The file that an option names, to be written.

    Raises
    ------
    InputError
        It names stdout, or a folder by a slash at its end.
    """
    require_name(option, text)
    if text.endswith(os.sep):
        raise InputError(f"{option} {text}: must name a file, not a folder")
    return Path(text)


def require_name(option: str, text: str) -> None:
    """Refuse ``-``, where a file has to be named, and no name at all.

    Raises
    ------
    InputError
        It is ``-`` or empty.
    """
    if not text:
        raise InputError(f"{option} must name a file, got no name")
    if text == STDOUT:
        raise InputError(f"{option} -: cannot be written to stdout; give it a name")
