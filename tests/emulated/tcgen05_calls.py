"""Calls of the tensor-core kernels: recorded in another process, then run in the emulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from emulator.host.emulated_launch import emulate_launch
from emulator.host.launch_recorder import LaunchRecorder, Session
from emulator.host.recorded_launch import Launch
from emulator.machine.launch import Report
from emulator.machine.memory import Region
from support.problems import Problem

if TYPE_CHECKING:
    from sdsa_kernels.problem import ScoreProblem

VARIANTS = ("tcgen05_bf16", "tcgen05_nvfp4", "tcgen05_nvfp4_128x4")
PAGE = 64
CTAS = 6


def launch_tensor_core(session: Session, problem: Problem, ctas: int | None) -> None:
    """Launch a call of `indexer_scores` on backend `cute` as if its tensor cores were trusted.

    Runs in a recorder's process. `ctas` (or `CTAS`) replaces the first wave of CTAs that fills the
    device, so that few CTAs do all the work.
    """
    from sdsa_kernels.cute import backend as cute_scores

    _declare(session, problem)
    cute_scores.launch(_prepared(session, problem, ctas))


def launch_planned(session: Session, problem: Problem, other: Problem) -> None:
    """Launch a call with the plan of another one, which has everything but the addresses.

    What the other one's tensors hold is not device memory.
    """
    from sdsa_kernels.cute import backend as cute_scores
    from sdsa_kernels.plans import addresses_of

    plan = cute_scores.make_plan(_prepared(session, other, None))
    assert plan is not None
    _declare(session, problem)
    plan(*addresses_of(_prepared(session, problem, None)))


def _declare(session: Session, problem: Problem) -> None:
    """Say that a problem's tensors are device memory."""
    for name, tensor in vars(problem).items():
        if tensor is not None:
            session.add_tensor(name, tensor)


def _prepared(session: Session, problem: Problem, ctas: int | None) -> ScoreProblem:
    """A checked call whose kernel is loaded."""
    from sdsa_kernels.checks import check_scores_call
    from sdsa_kernels.cute import plans as cute_plans
    from sdsa_kernels.cute import trust as cute_self_check
    from sdsa_kernels.cute.variants import ARCHITECTURES, tensor_core_variant
    from sdsa_kernels.problem import ScoreCall

    for each in VARIANTS:
        cute_self_check._verdicts[0, each] = None
    checked = check_scores_call(ScoreCall(**vars(problem)))
    variant = tensor_core_variant(checked, ARCHITECTURES[session.device.capability])
    assert variant is not None
    kernel = cute_plans.loaded_kernel(0, variant)
    kernel._config = replace(kernel._config, ctas_per_sm=1)
    kernel._sms = ctas or CTAS
    return checked


@dataclass(frozen=True)
class RecordedCall:
    """A call and its launch: what the kernel may read is marked byte by byte."""

    problem: Problem
    launch: Launch

    def run(self, seed: int, ptx: str | None = None) -> tuple[Problem, Report]:
        """The problem as it is after the kernel (or another with its parameters) has run.

        Raises
        ------
        EmulationError
            A fault of the kernel.
        """
        readable = _readable_bytes(self.problem)
        memory = {
            region.name: Region(
                region.name, region.address, region.content, readable.get(region.name)
            )
            for region in self.launch.memory
        }
        launch = self.launch if ptx is None else replace(self.launch, ptx=ptx)
        report = emulate_launch(launch, memory, seed, strict=True)
        return _problem_in(memory, self.problem), report


def _problem_in(memory: dict[str, Region], problem: Problem) -> Problem:
    """A problem whose tensors are what memory holds now; those that share storage still do."""
    storages: dict[int, torch.Tensor] = {}
    found = {}
    for name, tensor in vars(problem).items():
        if tensor is None or not tensor.untyped_storage().nbytes():
            continue
        address = tensor.untyped_storage().data_ptr()
        if address not in storages:
            storages[address] = torch.from_numpy(memory[name].data.copy())
        here = storages[address].view(tensor.dtype)
        found[name] = here.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return problem.replace(**found)


def _readable_bytes(problem: Problem) -> dict[str, np.ndarray]:
    """By region, which bytes a kernel may read; of other regions every byte.

    Of the block table the entries of pages below a length, of the cache the pages that they name
    (with poison in place of keys past a length, which nothing may come of).
    """
    table = torch.zeros_like(problem.block_table, dtype=torch.bool)
    pages: set[int] = set()
    width = problem.scores.shape[1]
    for group, length in enumerate(problem.context_lengths.tolist()):
        request = int(problem.requests[group])
        blocks = -(-min(length, width) // PAGE)
        if blocks > 0:
            table[request, :blocks] = True
            pages.update(problem.block_table[request, :blocks].tolist())
    readable = {"block_table": _storage_mask(problem.block_table, table)}
    used = torch.zeros(problem.key_cache.shape[0], dtype=torch.bool)
    used[list(pages)] = True
    keys = _storage_mask(problem.key_cache, used[:, None, None].expand(problem.key_cache.shape))
    scales = problem.key_scales
    if scales is not None and scales.dim() == 3:
        of_scales = _storage_mask(scales, used[:, None, None].expand(scales.shape))
        if scales.untyped_storage().data_ptr() == problem.key_cache.untyped_storage().data_ptr():
            keys |= of_scales
        else:
            readable["key_scales"] = of_scales
    return {**readable, "key_cache": keys}


def _storage_mask(tensor: torch.Tensor, elements: torch.Tensor) -> np.ndarray:
    """Bytes of a tensor's storage that belong to some of its elements."""
    size = tensor.element_size()
    flat = torch.zeros(tensor.untyped_storage().nbytes() // size, dtype=torch.bool)
    flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())[elements] = True
    return flat.repeat_interleave(size).numpy()


def record_call(
    recorder: LaunchRecorder, problem: Problem, ctas: int | None = None
) -> RecordedCall:
    """Record the one launch that a problem takes on the tensor cores."""
    (launch,) = recorder.record(launch_tensor_core, problem, ctas)
    return RecordedCall(problem, launch)
