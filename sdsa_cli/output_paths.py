"""Where the outputs of a command go: one file, or one for each of several tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sdsa_quant.errors import InputError

PLACEHOLDER = "{name}"
SUFFIX = ".safetensors"


def names_folder(output: str) -> bool:
    """Whether ``-o`` means a file for each tensor: a folder, or a path with ``{name}``."""
    return PLACEHOLDER in output or output.endswith(os.sep) or Path(output).is_dir()


def output_paths(output: str, names: Sequence[str]) -> list[Path]:
    """One file for each name.

    ``{name}`` in `output` stands for the name; an existing folder, or a path that ends in a slash,
    means ``{name}.safetensors`` in it; any other path is a file, and good for one name only.

    Raises
    ------
    InputError
        Several names and one file, or two names that give the same file.
    """
    if not names_folder(output):
        if len(names) > 1:
            raise InputError(
                f"-o {output}: {len(names)} key tensors need a folder (with a / at its end) or "
                f"a path with {PLACEHOLDER}, got one file"
            )
        return [Path(output)]
    pattern = output if PLACEHOLDER in output else os.path.join(output, PLACEHOLDER + SUFFIX)
    paths: dict[Path, str] = {}
    for name in names:
        path = Path(pattern.replace(PLACEHOLDER, name.replace(os.sep, "_")))
        if path in paths:
            raise InputError(
                f"-o {output}: tensors {paths[path]} and {name} would both be written to {path}"
            )
        paths[path] = name
    return list(paths)


def prepare_outputs(
    output: str, paths: Sequence[Path], inputs: Sequence[Path], *, force: bool
) -> None:
    """Check the outputs before any work, and make the folder that ``-o`` names.

    Raises
    ------
    InputError
        As `check_outputs`.
    """
    check_outputs(paths, inputs, force=force)
    if names_folder(output):
        for path in paths:
            path.parent.mkdir(exist_ok=True)


def check_outputs(paths: Sequence[Path], inputs: Sequence[Path], *, force: bool) -> None:
    """Refuse, before any work, outputs that exist or are inputs.

    Raises
    ------
    InputError
        An output exists and `force` is false, or it is one of the inputs.
    """
    for path in paths:
        if not path.exists():
            continue
        if any(path.samefile(source) for source in inputs):
            raise InputError(f"{path}: is the input, it cannot be the output too")
        if not force:
            raise InputError(f"{path}: exists already; give --force to replace it")
