"""The calls as operators of torch, for `torch.compile` and FakeTensor: ``torch.ops.sdsa.*``.

Importing this module registers them. Each does what the function of its name does, writes into the
same arguments and returns nothing, so that one graph of ``torch.compile(fullgraph=True)`` can hold
it. Their fake implementations do nothing: no tensor is made, and what is written keeps its shape.
A first call compiles its kernels, which no capture allows: make one before.
"""

import torch
from torch.library import custom_op

from sdsa_quant.formats.nvfp4 import AMAX_OVER_6

from .quantize_write import quantize_write_nvfp4
from .scores import indexer_scores
from .selection.indexer import indexer_top_k
from .selection.rescore import rescore_top_k
from .selection.select import select_top_k


def _nothing(*_: object, **__: object) -> None:
    """What a fake implementation makes of a call that returns nothing."""


@custom_op("sdsa::indexer_scores", mutates_args=("scores",))
def _indexer_scores(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lengths: torch.Tensor,
    requests: torch.Tensor,
    scores: torch.Tensor,
    query_scales: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    indexer_scores(
        query,
        key_cache,
        block_table,
        context_lengths,
        requests=requests,
        scores=scores,
        query_scales=query_scales,
        key_scales=key_scales,
        backend=backend,
    )


_indexer_scores.register_fake(_nothing)


@custom_op("sdsa::indexer_top_k", mutates_args=("top_keys", "top_scores"))
def _indexer_top_k(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lengths: torch.Tensor,
    requests: torch.Tensor,
    top_keys: torch.Tensor,
    top_scores: torch.Tensor | None = None,
    query_scales: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    slots: bool = False,
    backend: str | None = None,
) -> None:
    indexer_top_k(
        query,
        key_cache,
        block_table,
        context_lengths,
        requests=requests,
        top_keys=top_keys,
        top_scores=top_scores,
        query_scales=query_scales,
        key_scales=key_scales,
        slots=slots,
        backend=backend,
    )


_indexer_top_k.register_fake(_nothing)


@custom_op("sdsa::select_top_k", mutates_args=("top_keys", "top_scores"))
def _select_top_k(
    scores: torch.Tensor,
    context_lengths: torch.Tensor,
    top_keys: torch.Tensor,
    top_scores: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    requests: torch.Tensor | None = None,
    slots: bool = False,
    backend: str | None = None,
) -> None:
    select_top_k(
        scores,
        context_lengths,
        top_keys=top_keys,
        top_scores=top_scores,
        block_table=block_table,
        requests=requests,
        slots=slots,
        backend=backend,
    )


_select_top_k.register_fake(_nothing)


@custom_op("sdsa::rescore_top_k", mutates_args=("top_keys", "top_scores"))
def _rescore_top_k(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    candidates: torch.Tensor,
    requests: torch.Tensor,
    top_keys: torch.Tensor,
    top_scores: torch.Tensor | None = None,
    slots: bool = False,
    backend: str | None = None,
) -> None:
    rescore_top_k(
        query,
        key_cache,
        block_table,
        candidates,
        requests=requests,
        top_keys=top_keys,
        top_scores=top_scores,
        slots=slots,
        backend=backend,
    )


_rescore_top_k.register_fake(_nothing)


@custom_op(
    "sdsa::quantize_write_nvfp4",
    mutates_args=("key_cache", "key_scales", "packed_query", "query_scales"),
)
def _quantize_write_nvfp4(
    key: torch.Tensor,
    slots: torch.Tensor,
    query: torch.Tensor | None,
    query_rows: torch.Tensor | None,
    key_cache: torch.Tensor,
    key_scales: torch.Tensor,
    packed_query: torch.Tensor | None = None,
    query_scales: torch.Tensor | None = None,
    rule: str = AMAX_OVER_6,
) -> None:
    quantize_write_nvfp4(
        key,
        slots,
        query,
        query_rows,
        key_cache=key_cache,
        key_scales=key_scales,
        packed_query=packed_query,
        query_scales=query_scales,
        rule=rule,
    )


_quantize_write_nvfp4.register_fake(_nothing)
