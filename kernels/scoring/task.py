"""What to score: query rows and a paged cache, on one device and in their formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sdsa_kernels.backends import AUTO, BACKENDS, choose_backend
from sdsa_kernels.checks import check_scores_call
from sdsa_kernels.measure.traffic import Traffic, score_traffic
from sdsa_kernels.problem import ScoreCall, ScoreProblem
from sdsa_kernels.scores import indexer_scores
from sdsa_quant.accuracy.query_loss import QueryLoss, query_loss
from sdsa_quant.errors import InputError
from sdsa_quant.formats.nvfp4 import AMAX_OVER_6, quantize_nvfp4
from sdsa_quant.formats.rule_weights import RuleWeights
from sdsa_quant.formats.transforms import KeyTransform
from sdsa_quant.layout import BF16, MAX_ROWS, NVFP4
from sdsa_quant.paging import PagedKeys
from sdsa_quant.short_repr import short_repr

PLAIN = KeyTransform()


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """Query rows and the keys to score them against; every tensor on one device."""

    query: torch.Tensor  # bf16 [rows, 128] or uint8 [rows, 64]
    query_scales: torch.Tensor | None  # float8_e4m3fn [rows, 8] with an NVFP4 query
    unquantized_query: torch.Tensor  # bf16 [rows, 128]
    paged: PagedKeys
    context_lengths: torch.Tensor  # int32 [groups]
    requests: torch.Tensor  # int32 [groups]
    group_lengths: tuple[int, ...]  # context_lengths, known to the host
    group_requests: tuple[int, ...]  # requests, known to the host
    gain: float  # that the stored keys were multiplied by
    score_shifts: torch.Tensor | None  # float32 [rows], what centering took from scores
    backend: str
    query_loss: QueryLoss | None  # what NVFP4 did to the query rows; None for a BF16 query

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def rows(self) -> int:
        return self.query.shape[0]

    @property
    def groups(self) -> int:
        return len(self.group_lengths)

    @property
    def rows_per_group(self) -> int:
        return self.rows // self.groups

    @property
    def max_context(self) -> int:
        """Longest context length, in keys: the width of the scores."""
        return max(self.group_lengths)

    @property
    def query_format(self) -> str:
        """``"nvfp4"`` or ``"bf16"``."""
        return NVFP4 if self.query.dtype == torch.uint8 else BF16

    @property
    def device(self) -> torch.device:
        """Device of every tensor."""
        return self.query.device

    def traffic(self) -> Traffic:
        """Bytes that one call over every group moves."""
        return score_traffic(
            self.group_lengths,
            rows_per_group=self.rows_per_group,
            max_context=self.max_context,
            query_format=self.query_format,
            key_format=self.paged.format,
        )

    def score_groups(self, first: int, stop: int, scores: torch.Tensor) -> None:
        """Score groups ``first`` to ``stop`` into float32 ``[their rows, max_context]``."""
        indexer_scores(**self._call(first, stop, scores)._asdict(), backend=self.backend)

    def restore_scores(self, first: int, stop: int, scores: torch.Tensor) -> None:
        """Bring scores of groups ``first`` to ``stop`` back to what plain keys would have.

        Gain and shift are the same for every key of a row, so that a ranking does not need them.
        """
        if self.gain != 1.0:
            scores.div_(self.gain)  # exact, a power of two
        if self.score_shifts is not None:
            rows = slice(first * self.rows_per_group, stop * self.rows_per_group)
            scores.add_(self.score_shifts[rows, None])

    def chosen_backend(self, scores: torch.Tensor) -> str:
        """Name of the backend that serves groups scored into such a buffer.

        Raises
        ------
        RuntimeError
            No backend, or not the one asked for, can serve them on this machine.
        """
        return choose_backend(self.problem(scores), self.backend).name

    def problem(self, scores: torch.Tensor, first: int = 0) -> ScoreProblem:
        """The call over as many groups from `first` on as `scores` has rows for, checked."""
        groups = scores.shape[0] // self.rows_per_group
        return check_scores_call(self._call(first, first + groups, scores))

    def _call(self, first: int, stop: int, scores: torch.Tensor) -> ScoreCall:
        """The call over some of the groups."""
        rows = slice(first * self.rows_per_group, stop * self.rows_per_group)
        return ScoreCall(
            query=self.query[rows],
            key_cache=self.paged.key_cache,
            block_table=self.paged.block_table,
            context_lengths=self.context_lengths[first:stop],
            requests=self.requests[first:stop],
            scores=scores,
            query_scales=None if self.query_scales is None else self.query_scales[rows],
            key_scales=self.paged.key_scales,
        )


def make_task(
    query: torch.Tensor,
    paged: PagedKeys,
    requests: Sequence[int],
    *,
    query_format: str,
    query_name: str = "query",
    transform: KeyTransform = PLAIN,
    rule: str = AMAX_OVER_6,
    weights: RuleWeights | None = None,
    device: torch.device | str = "cpu",
    backend: str = "auto",
) -> ScoreTask:
    """Bring query rows and cache to one device, and quantize the rows if they are to be NVFP4.

    Parameters
    ----------
    query : torch.Tensor
        bfloat16 ``[rows, 128]``.
    paged : PagedKeys
        The cache; a group sees every key of its request.
    requests : sequence of int
        Request of each group; ``rows / groups`` is 1 to 8.
    query_format : str
        ``"bf16"`` or ``"nvfp4"``; NVFP4 query rows go with NVFP4 keys only.
    query_name : str
        What to call the query rows in an error.
    transform : KeyTransform
        What was done to the cache's keys: rows are rotated alike, scores restored.
    rule : str
        How the codes and scales of NVFP4 query rows are chosen.
    weights : RuleWeights, optional
        What the rule ``"covariance"`` needs, and no other rule takes: from the covariance of keys.
    device, backend : str
        Where to score, and with what.

    Raises
    ------
    ValueError
        There are no groups, the rows do not make groups of 1 to 8, a request is not in the cache,
        NVFP4 query rows meet BF16 keys, or a query value is not finite.
    """
    rows, groups, in_cache = query.shape[0], len(requests), paged.context_lengths.shape[0]
    if groups == 0 or rows % groups or not 1 <= rows // groups <= MAX_ROWS:
        raise InputError(
            f"query rows must be 1 to {MAX_ROWS} for each group, the same number for every group, "
            f"got {rows} rows and {groups} groups"
        )
    for group, request in enumerate(requests):
        if not 0 <= request < in_cache:
            raise InputError(
                f"must be 0 to {in_cache - 1}, the requests of the cache, got {request} for group "
                f"{group}",
                argument="requests",
            )
    if query_format == NVFP4 and paged.format != NVFP4:
        raise InputError("NVFP4 query rows go with NVFP4 keys only, and the cache holds BF16 keys")
    if not bool(query.isfinite().all()):
        row = int((~query.isfinite()).any(dim=1).nonzero()[0])
        raise InputError(f"query rows must be finite, but row {row} is not", source=query_name)
    unquantized = query.to(device)
    transform = transform.to(device)
    transformed, query_scales, loss = transform.apply_query(unquantized), None, None
    if query_format == NVFP4:
        scored, query_scales = quantize_nvfp4(transformed, rule=rule, weights=weights)
        loss = query_loss(transformed, scored, query_scales)
    else:
        scored = transformed.to(torch.bfloat16)
    centered = transform.mean is not None
    requests_tensor = torch.tensor(requests, dtype=torch.int32, device="cpu")
    context_lengths = paged.context_lengths.cpu()[requests_tensor.long()]
    return ScoreTask(
        query=scored,
        query_scales=query_scales,
        unquantized_query=unquantized,
        paged=paged.to(device),
        context_lengths=context_lengths.to(device),
        requests=requests_tensor.to(device),
        group_lengths=tuple(context_lengths.tolist()),
        group_requests=tuple(requests),
        gain=transform.gain,
        score_shifts=transform.score_shifts(unquantized).float() if centered else None,
        backend=backend,
        query_loss=loss,
    )


def takes_tiled_scales(device: torch.device | str, query_format: str, backend: str) -> bool:
    """Whether scales in the 128x4 order can be scored on a device as they are."""
    asked = [each for each in BACKENDS if backend in (AUTO, each.name)]
    return any(each.takes_tiled_scales(torch.device(device), query_format) for each in asked)
