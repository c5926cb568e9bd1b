"""Whether every backend of a machine selects right keys: hard rows against Python's own sort."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sdsa_kernels.selection.checks import check_select_call
from sdsa_kernels.selection.problem import SelectProblem
from sdsa_kernels.selection.select import BACKENDS, SelectBackend
from sdsa_quant.errors import DeviceLostError

from .selection import hard_rows, reference_top_k

# Long enough that the kernels of GPUs sample a row (from 8,193 scores on), and no whole tile.
_LENGTH = 8_300
_TOP_K = (1, 700)
_SEED = 20261201
_UNWRITTEN = -7  # no key, and not the -1 of a row that has no more
_ALL = "all"  # instead of a backend's name, where none could be asked


@dataclass(frozen=True, slots=True)
class SelectionTest:
    """What one backend selected from hard rows."""

    device: str
    backend: str
    top_k: int
    rows: int
    wrong_rows: int | None  # None where it selected nothing
    failure: str | None  # None where all is well


def selection_tests(device: str) -> Iterator[SelectionTest]:
    """Let every backend that can run on a device select from hard rows, for a few k.

    Whatever goes wrong is a failure in what is yielded. Nothing is asked after a kernel that hangs.
    """
    names, scores, lengths = _rows()
    for top_k in _TOP_K:
        result = functools.partial(SelectionTest, device)
        try:
            problem = _problem(scores, lengths, top_k, device)
            backends = [each for each in BACKENDS if each.reason_unsupported(problem) is None]
            expected = _expected(top_k)
        except Exception as error:  # such as of a driver: what a report has to show
            yield result(_ALL, top_k, len(names), None, f"{type(error).__name__}: {error}")
            continue
        for backend in backends:
            try:
                wrong, failure = _run(problem, backend, expected, names)
            except DeviceLostError as error:
                yield result(backend.name, top_k, len(names), None, str(error))
                return
            yield result(backend.name, top_k, len(names), wrong, failure)


@functools.cache
def _rows() -> tuple[tuple[str, ...], torch.Tensor, tuple[int, ...]]:
    """Names, scores and lengths of the rows: every hard one, and one of each length that is."""
    hard = hard_rows(_LENGTH, max(_TOP_K), torch.Generator().manual_seed(_SEED))
    k = max(_TOP_K)
    short = (0, 1, k - 1, k, k + 1, 4_096)
    names = (*hard, *(f"{length} normal" for length in short))
    scores = torch.stack([*hard.values(), *(hard["normal"] for _ in short)])
    return names, scores, (*(_LENGTH for _ in hard), *short)


@functools.cache
def _expected(top_k: int) -> torch.Tensor:
    _, scores, lengths = _rows()
    return reference_top_k(scores, lengths, top_k)


def _problem(
    scores: torch.Tensor, lengths: tuple[int, ...], top_k: int, device: str
) -> SelectProblem:
    there = torch.device(device)
    keys = torch.empty((len(lengths), top_k), dtype=torch.int32, device=there)
    of_rows = torch.tensor(lengths, dtype=torch.int32, device=there)
    return check_select_call(scores.to(there), of_rows, keys, None, None, None, slots=False)


def _run(
    problem: SelectProblem, backend: SelectBackend, expected: torch.Tensor, names: tuple[str, ...]
) -> tuple[int | None, str | None]:
    """How many rows are wrong, and the failure of one backend.

    Raises
    ------
    DeviceLostError
        A kernel hangs.
    """
    problem = replace(problem, top_keys=torch.full_like(problem.top_keys, _UNWRITTEN))
    try:
        backend.launch(problem)
        found = problem.top_keys.cpu()
    except DeviceLostError:
        raise
    except Exception as error:  # such as of a compiler that is missing
        return None, f"{type(error).__name__}: {error}"
    wrong = (found != expected).any(dim=1).nonzero().flatten().tolist()
    if not wrong:
        return 0, None
    row = wrong[0]
    entry = int((found[row] != expected[row]).nonzero()[0])
    return len(wrong), (
        f"k = {problem.top_k}: wrong keys in {len(wrong)} of {len(names)} rows; the first is "
        f"{names[row]}, entry {entry}: {int(found[row, entry])} where {int(expected[row, entry])} "
        f"is right"
    )
