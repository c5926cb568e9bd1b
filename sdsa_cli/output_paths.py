"""Where the outputs of a command go: one file, or one for each of several tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sdsa_quant.errors import InputError

PLACEHOLDER = "{name}"
SUFFIX = ".safetensors"


def output_paths(output: str, names: Sequence[str]) -> list[Path]:
    """One file for each name.

    ``{name}`` in `output` stands for the name; an existing folder, or a path that ends in a slash,
    means ``{name}.safetensors`` in it; any other path is a file, and good for one name only.

    Raises
    ------
    InputError
        Several names and one file, or two names that give the same file.
    """
    if PLACEHOLDER not in output:
        if not output.endswith(os.sep) and not Path(output).is_dir():
            if len(names) > 1:
                raise InputError(
                    f"-o {output}: {len(names)} key tensors need a folder (with a / at its end) or "
                    f"a path with {PLACEHOLDER}, got one file"
                )
            return [Path(output)]
        output = os.path.join(output, PLACEHOLDER + SUFFIX)
    paths: dict[Path, str] = {}
    for name in names:
        path = Path(output.replace(PLACEHOLDER, name.replace(os.sep, "_")))
        if path in paths:
            raise InputError(
                f"-o: tensors {paths[path]} and {name} would both be written to {path}"
            )
        paths[path] = name
    return list(paths)


def prepare_outputs(paths: Sequence[Path], inputs: Sequence[Path], *, force: bool) -> None:
    """Refuse, before any work, outputs that exist or are inputs; make their folders.

    Raises
    ------
    InputError
        An output exists and `force` is false, or it is one of the inputs.
    """
    for path in paths:
        for source in inputs:
            if path.exists() and path.samefile(source):
                raise InputError(f"{path}: is the input, it cannot be the output too")
        if path.exists() and not force:
            raise InputError(f"{path}: exists already; give --force to replace it")
