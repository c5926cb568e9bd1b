"""Where outputs go: one file, or one for each of several tensors, and never over an input.

This module imports nothing heavy, so that the command line can check outputs at no cost.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from sdsa_quant.errors import InputError

from .atomic_file import OVERWRITE

PLACEHOLDER = "{name}"
SUFFIX = ".safetensors"
STDOUT = "-"


def names_folder(output: str) -> bool:
    """Whether an output means a file for each tensor: a folder, or a path with ``{name}``."""
    return PLACEHOLDER in output or output.endswith(os.sep) or Path(output).is_dir()


def output_paths(output: str, names: Sequence[str]) -> list[Path]:
    """One file for each name.

    ``{name}`` in `output` stands for the name; an existing folder, or a path that ends in a slash,
    means ``{name}.safetensors`` in it; any other path is a file, and good for one name only.

    Raises
    ------
    InputError
        Several names and one file, two names that give the same file or none, or stdout.
    """
    if not output:
        raise InputError("must name a file, got no name", argument="output")
    if output == STDOUT:
        raise InputError(
            f"{STDOUT}: cannot be written to stdout; give it a name", argument="output"
        )
    if not names_folder(output):
        if len(names) > 1:
            raise InputError(
                f"{output}: {len(names)} key tensors need a folder (with a / at its end) or a path "
                f"with {PLACEHOLDER}, got one file",
                argument="output",
            )
        return [Path(output)]
    pattern = output if PLACEHOLDER in output else os.path.join(output, PLACEHOLDER + SUFFIX)
    paths: dict[Path, str] = {}
    for name in names:
        if "\0" in name:
            raise InputError(
                f"tensor {name!r}: has a NUL in its name, which no file can be named by"
            )
        path = Path(pattern.replace(PLACEHOLDER, name.replace(os.sep, "_")))
        if path in paths:
            raise InputError(
                f"{output}: tensors {paths[path]} and {name} would both be written to {path}",
                argument="output",
            )
        paths[path] = name
    return list(paths)


def check_outputs(paths: Sequence[Path], inputs: Sequence[Path], *, force: bool) -> None:
    """Refuse, before any work, outputs that exist, are inputs, or cannot be written where they are.

    A folder that does not exist is not a fault: `folders_made` makes it.

    Parameters
    ----------
    paths : sequence of Path
        The outputs.
    inputs : sequence of Path
        The inputs as the user named them, whether they exist or not; folders and indices stand for
        all files that are read through them.
    force : bool
        Whether outputs may exist.

    Raises
    ------
    InputError
        An output exists and `force` is false, it is one of the inputs, it is a folder, it is named
        twice, or what is to be its folder is a file or cannot be written.
    """
    sources = _files_of(inputs)
    targets = [os.path.realpath(path) for path in paths]
    for index, path in enumerate(paths):
        if targets[index] in targets[:index]:
            raise InputError(f"{path}: two outputs cannot go to the same file")
        if path.is_dir():
            raise InputError(f"{path}: must be a file to write, but is a folder")
        if not path.exists():
            _check_folder(path)
            continue
        _refuse_inputs(path, sources)
        if not force:
            raise InputError("exists already", source=path, hint=OVERWRITE)


def refuse_inputs(paths: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Refuse outputs that are inputs, for a command that replaces outputs unasked.

    Raises
    ------
    InputError
        An output is a file that is read through one of the inputs.
    """
    sources = _files_of(inputs)
    for path in paths:
        if path.exists():
            _refuse_inputs(path, sources)


def _refuse_inputs(path: Path, sources: Sequence[Path]) -> None:
    if any(path.samefile(source) for source in sources):
        raise InputError(f"{path}: is the input and cannot be the output too")


def _files_of(inputs: Sequence[Path]) -> list[Path]:
    """The files that exist of those that are read through the inputs."""
    from .tensor_source import source_files  # which needs torch

    files = [file for path in inputs for file in source_files(path)]
    return [file for file in files if file.exists()]


@contextlib.contextmanager
def folders_made(paths: Sequence[Path]) -> Iterator[None]:
    """Make the folders that outputs go to; a body that fails leaves no new folder that is empty."""
    made: list[Path] = []
    try:
        for path in paths:
            made += _make_folder(path.parent)
        yield
    except BaseException:
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # it is not empty, or another run removed it
                folder.rmdir()
        raise


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and those above it; returns those that did not exist, from the top."""
    new = [each for each in (folder, *folder.parents) if not each.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return new


def _check_folder(path: Path) -> None:
    """Check that the folder of a new output can be written, or made."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"{path}: cannot be written, {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path}: cannot be written, folder {folder} does not permit it")
