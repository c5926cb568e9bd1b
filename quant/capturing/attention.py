"""Captures of attention heads: the keys and query rows after RoPE of models without an indexer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sdsa_quant.errors import InputError, UnsupportedError
from sdsa_quant.layout import DIM

from .capture import Capture, _refusing_padding, _writing
from .indexers import IndexerCall
from .layer import CapturedLayer

_BACKEND = "sdpa"  # of attention in transformers, which the capture stands in for


@contextlib.contextmanager
def attention_capture(
    model: Any,
    output: str | Path,
    heads: Sequence[int],
    *,
    every: int = 1,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
) -> Iterator[Capture]:
    """Capture the keys and query rows of attention heads, as they are multiplied.

    A layer of the capture is one query head of one layer of the model, with the keys of its group:
    ``layers.3.heads.5``. Attention selects nothing, so that there is no selection to compare with.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model whose attention goes through transformers' interface, on any device.
    output : str or Path
        Folder for one safetensors file a layer and head.
    heads : sequence of int
        Query heads to capture, the same in every layer.
    every, metadata, force
        As `sdsa_capture`.

    Yields
    ------
    Capture
        As `sdsa_capture`.

    Raises
    ------
    ValueError
        There is no such head, heads do not have 128 values, or as `sdsa_capture`.
    UnsupportedError
        transformers is not installed, or the model's attention has no interface.
    """
    if every < 1:
        raise InputError(f"must be at least 1, got {every}", argument="every")
    registry = attention_functions()
    if not getattr(model, "_supports_sdpa", False):
        raise UnsupportedError(f"{type(model).__name__} does not attend through an interface")
    text = model.config.get_text_config()
    _check_heads(heads, text)
    folder = Path(output)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    layers = {
        f"layers.{number}.heads.{head}": CapturedLayer(
            f"layers.{number}.heads.{head}", None, folder
        )
        for number, kind in enumerate(kinds)
        if "linear" not in kind
        for head in heads
    }
    capture = Capture(folder, layers, every, dict(metadata or {}))
    capture.metadata.setdefault("class", type(model).__name__)
    capture.metadata.setdefault("score", "rows")
    attend = registry[_BACKEND]

    def capturing(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        number = getattr(module, "layer_idx", None)
        group = query.shape[1] // key.shape[1]
        for head in heads:
            layer = layers.get(f"layers.{number}.heads.{head}")
            if layer is not None:
                _add(capture, layer, query[:, head], key[:, head // group])
        return attend(module, query, key, *args, **kwargs)

    before = model.config._attn_implementation
    with _writing(capture, force=force), _refusing_padding(model):
        model.set_attn_implementation(_BACKEND)
        registry[_BACKEND] = capturing
        try:
            yield capture
        finally:
            del registry[_BACKEND]  # what stood in for the function of that name
            model.set_attn_implementation(before)


def attention_functions() -> Any:
    """The attention functions of transformers by name.

    Raises
    ------
    UnsupportedError
        transformers is not installed.
    """
    require_transformers()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS


def require_transformers() -> None:
    """Refuse to go on without transformers.

    Raises
    ------
    UnsupportedError
        It is not installed.
    """
    import importlib.util

    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedError(
            "captures need transformers, which is not installed: pip install 'transformers==5.24.0'"
        )


def _add(capture: Capture, layer: CapturedLayer, query: torch.Tensor, key: torch.Tensor) -> None:
    first = key.shape[1] - query.shape[1]
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    call = IndexerCall(first, query.float()[:, :, None], key.float(), None, nothing)
    layer.add(call, capture.every, capture.offset)


def _check_heads(heads: Sequence[int], text: Any) -> None:
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size != DIM:
        raise InputError(f"attention heads must have {DIM} values, got {size}")
    for head in heads:
        if not 0 <= head < text.num_attention_heads:
            raise InputError(
                f"must be heads from 0 to {text.num_attention_heads - 1}, got {head}",
                argument="attention",
            )
    if not heads:
        raise InputError("must name heads, got none", argument="attention")
