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


def prepare_outputs(paths: Sequence[Path], inputs: Sequence[Path], *, force: bool) -> None:
    """Check the outputs before any work, and make the folders that they go to.

    Raises
    ------
    InputError
        As `check_outputs`.
    """
    check_outputs(paths, inputs, force=force)
    make_folders(paths)


def check_outputs(paths: Sequence[Path], inputs: Sequence[Path], *, force: bool) -> None:
    """Refuse, before any work, outputs that exist, are inputs, or cannot be written where they are.

    A folder that does not exist is no fault: `make_folders` makes it.

    Raises
    ------
    InputError
        An output exists and `force` is false, it is one of the inputs, it is a folder, it is named
        twice, or what is to be its folder is a file or cannot be written.
    """
    for place, path in enumerate(paths):
        if path in paths[:place]:
            raise InputError(f"{path}: two outputs cannot go to the same file")
        if path.is_dir():
            raise InputError(f"{path}: must be a file to write, it is a folder")
        if not path.exists():
            _check_folder(path)
            continue
        if any(path.samefile(source) for source in inputs):
            raise InputError(f"{path}: is the input, it cannot be the output too")
        if not force:
            raise InputError(f"{path}: exists already; give --force to replace it")


def make_folders(paths: Sequence[Path]) -> None:
    """Make the folders that outputs go to, where they do not exist."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)


def _check_folder(path: Path) -> None:
    """Check that the folder of a new output can be written, or made."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"{path}: cannot be written, {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path}: cannot be written, folder {folder} does not permit it")
