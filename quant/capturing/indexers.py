"""The indexers of public models: what they score with, and how they say what they select.

Facts of transformers 5.24. An indexer is known by the name of its class, so that nothing here
imports a model's code. While its ``forward`` runs, the products of `torch.matmul` are seen: the
first takes query heads ``[B, S, H, 128]`` and the keys, after normalization, RoPE and pooling, and
what follows takes the weights of the heads.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sdsa_quant.errors import InputError, UnsupportedError
from sdsa_quant.layout import DIM

from .rule import BLOCK_MAX, RELU_SUM, SelectionRule

_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


@dataclass(frozen=True, slots=True)
class IndexerCall:
    """What one call of an indexer scored and selected."""

    first: int  # position of the first row's token, from 0
    query: torch.Tensor  # float32 [batch, rows, heads, 128]; zeros where a row sees no key
    keys: torch.Tensor  # float32 [batch, keys, 128]: all from the first token on
    weights: torch.Tensor | None  # float32 [batch, rows, heads]
    selected: torch.Tensor
    """int64 ``[batch, rows, k]``, or ``[batch, rows, heads, k]``: indices of keys or blocks in any
    order, -1 or beyond what a row sees where there is no choice."""
    norms: torch.Tensor | None = None
    """float32 ``[batch, rows, 2]``: mean and deviation of each new key before its layer norm."""


Arguments = Mapping[str, Any]


# What stands in for query heads [..., 128] and keys [..., 128] where they are multiplied.
Replacement = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class _Products(TorchFunctionMode):
    """Keeps the operands of every product that `wanted` takes, and multiplies others instead."""

    def __init__(
        self,
        wanted: Callable[[int, torch.Tensor, torch.Tensor], Any],
        scores: Callable[[int], bool],
        replacement: Replacement | None,
    ) -> None:
        super().__init__()
        self._wanted, self._count = wanted, 0
        self._scores, self._replacement = scores, replacement

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _MATMULS and len(args) == 2:
            self._wanted(self._count, args[0].detach(), args[1].detach())
            if self._replacement is not None and self._scores(self._count) and args[1].numel():
                query, keys = self._replacement(args[0], args[1].transpose(-1, -2))
                args = query, keys.transpose(-1, -2)
            self._count += 1
        return function(*args, **(kwargs or {}))


class Indexer:
    """One indexer of a model: the scored tensors of a call, and its rule.

    Parameters
    ----------
    module : torch.nn.Module
        The indexer.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module: Any = module
        self._signature = inspect.signature(module.forward)
        self._frequencies: torch.Tensor | None = None  # of RoPE, from the angles at position 1
        self._norms: torch.Tensor | None = None
        self.replacement: Replacement | None = None

    def _scores(self, number: int) -> bool:
        """Whether a product of a call is one of query heads and keys."""
        return number == 0

    def facts(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What tells an engine's mistakes: tensors and header fields, as far as they are known.

        ``rope`` are RoPE's frequencies in radians a position, and the field says which values are
        turned together. ``norm`` are the weight and the bias of the keys' layer norm.
        """
        tensors, fields = {}, {}
        if self._frequencies is not None:
            style, at_end = _ROPE[type(self.module).__name__]
            turned = 2 * self._frequencies.numel()
            tensors["rope"] = self._frequencies
            fields["rope"] = f"{style}:{DIM - turned if at_end else 0}"
        norm = getattr(self.module, "k_norm", None)
        if self._norms is not None and norm is not None:
            tensors["norm"] = torch.cat([norm.weight, norm.bias]).detach().float().cpu()
        return tensors, fields

    def _note_rope(self, arguments: Arguments, first: int) -> None:
        """Take RoPE's frequencies from the angles of the second position of a text."""
        given, kind = arguments.get("position_embeddings"), type(self.module).__name__
        at = 1 - first
        if self._frequencies is not None or given is None or kind not in _ROPE:
            return
        cos, sin = (each[0, :, :DIM].detach().float().cpu() for each in given)
        if 0 <= at < cos.shape[0] and getattr(self.module, "use_rope", True):
            half = cos.shape[-1] // 2
            self._frequencies = torch.atan2(sin[at, :half], cos[at, :half])

    def rule(self) -> SelectionRule:
        """How it selects."""
        module = self.module
        scale = float(getattr(module, "softmax_scale", 1.0)) if self._scales_products() else 1.0
        return SelectionRule(RELU_SUM, module.n_heads, module.index_topk, scale=scale)

    def _scales_products(self) -> bool:
        return type(self.module).__name__ not in ("HYV4Indexer", "HYV4VLIndexer")

    def run(self, forward: Any, args: Any, kwargs: Any) -> tuple[Any, IndexerCall]:
        """Call `forward`, and say what it scored and selected.

        Raises
        ------
        UnsupportedError
            It did not score as the class is known to.
        """
        arguments = self._signature.bind(*args, **kwargs).arguments
        self._begin(arguments)
        with self._watched_norm(), _Products(self._see, self._scores, self.replacement):
            output = forward(*args, **kwargs)
        try:
            call = self._call(arguments, output)
            self._note_rope(arguments, call.first)
            if self._norms is not None and type(self) is Indexer:
                call = replace(call, norms=self._norms)
            return output, call
        except InputError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UnsupportedError(
                f"{type(self.module).__name__} does not score as it does in transformers 5.24: "
                f"{error}"
            ) from error

    @contextlib.contextmanager
    def _watched_norm(self) -> Iterator[None]:
        """See what goes into the layer norm of the keys."""
        norm = getattr(self.module, "k_norm", None)
        if not isinstance(norm, torch.nn.LayerNorm):
            yield
            return

        def keep(module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            values = inputs[0].detach().float()
            deviation = (values.var(-1, unbiased=False) + module.eps).sqrt()
            self._norms = torch.stack([values.mean(-1), deviation], -1)

        handle = norm.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def _begin(self, arguments: Arguments) -> None:
        self._scored: tuple[torch.Tensor, torch.Tensor] | None = None
        self._heads: torch.Tensor | None = None

    def _see(self, number: int, left: torch.Tensor, right: torch.Tensor) -> None:
        # Only what is needed is kept: the scores of all heads are the right side of the second.
        if number == 0:
            self._scored = left, right
        elif number == 1:
            self._heads = left

    def _query_and_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B, S, H, 128]`` and ``[B, keys, 128]`` of the first product."""
        if self._scored is None:
            raise ValueError("it takes no product of query heads and keys")
        query, keys = self._scored[0], self._scored[1][:, 0].transpose(-1, -2)
        _require_dim(query, keys)
        return query, keys

    def _call(self, arguments: Arguments, output: Any) -> IndexerCall:
        query, keys = self._query_and_keys()
        if self._heads is None:
            raise ValueError("it takes no product with the weights of the heads")
        weights = self._heads.squeeze(-2)
        first = _first_position(arguments, keys.shape[1] - query.shape[1])
        return IndexerCall(first, query, keys[:, : first + query.shape[1]], weights, output.long())


class _CompressedIndexer(Indexer):
    """DeepSeek-V4: keys compressed 4:1, weights multiplied in by a scorer of its own."""

    def rule(self) -> SelectionRule:
        module = self.module
        return SelectionRule(
            RELU_SUM,
            module.num_heads,
            module.index_topk,
            pool=module.compress_rate,
            scale=float(module.scorer.softmax_scale),
        )

    def run(self, forward: Any, args: Any, kwargs: Any) -> tuple[Any, IndexerCall]:
        scorer = self.module.scorer

        def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
            self._weights = output.detach().float() * scorer.weights_scaling

        hook = scorer.weights_proj.register_forward_hook(keep)
        try:
            return super().run(forward, args, kwargs)
        finally:
            hook.remove()

    def _call(self, arguments: Arguments, output: Any) -> IndexerCall:
        query, keys = self._query_and_keys()
        first = _first_position(arguments, None)
        seen = (first + query.shape[1]) // self.module.compress_rate
        return IndexerCall(first, query, keys[:, :seen], self._weights, output)


class _PoolIndexer(Indexer):
    """GLM-5-Next: keys pooled by a learned average; tokens of the chosen pools and the tail."""

    def rule(self) -> SelectionRule:
        module = self.module
        return SelectionRule(
            RELU_SUM,
            module.n_heads,
            module.index_topk // module.index_kpool,
            pool=module.index_kpool,
            scale=float(module.softmax_scale),
        )

    def _call(self, arguments: Arguments, output: Any) -> IndexerCall:
        query, keys = self._query_and_keys()
        if self._heads is None:
            raise ValueError("it takes no product with the weights of the heads")
        cache, rows = arguments.get("cache"), query.shape[1]
        seen = rows if cache is None else int(cache.layers[self.module.layer_idx].get_seq_length())
        pool = self.module.index_kpool
        # Pools come first in what is returned, token by token; then the tail.
        chosen = output[..., : self.rule().k * pool : pool].long()
        pools = torch.where(chosen < 0, chosen, chosen // pool)
        first = seen - rows
        return IndexerCall(first, query, keys[:, : seen // pool], self._heads.squeeze(-2), pools)


class _MeanPoolIndexer(Indexer):
    """Qwen4-Exp: keys mean-pooled by 4, normalized and turned; one product for each row."""

    def rule(self) -> SelectionRule:
        module = self.module
        return SelectionRule(
            RELU_SUM,
            module.index_n_heads,
            module.block_topk,
            pool=module.compress_ratio,
            scale=float(module.index_head_dim) ** -0.5,
        )

    def _begin(self, arguments: Arguments) -> None:
        self._queries: list[torch.Tensor] = []
        self._keys: list[torch.Tensor] = []  # all of each request's, as its last row sees them
        mask, rows = arguments["attention_mask"], arguments["hidden_states"].shape[1]
        open_keys = mask if mask.dtype == torch.bool else mask == 0
        self._first = int(open_keys[0, 0, 0].sum()) - 1
        seen = (
            self._first + 1 + torch.arange(rows, dtype=torch.int64, device="cpu")
        ) // self.module.compress_ratio
        self._scored_rows = int((seen > 0).sum())  # a row that sees no pool is not scored

    def _scores(self, number: int) -> bool:
        return True

    def _see(self, number: int, left: torch.Tensor, right: torch.Tensor) -> None:
        self._queries.append(left)
        if len(self._queries) % self._scored_rows == 0:
            self._keys.append(right.transpose(-1, -2))

    def _call(self, arguments: Arguments, output: Any) -> IndexerCall:
        hidden, pool = arguments["hidden_states"], self.module.compress_ratio
        (batch, rows), scored = hidden.shape[:2], self._scored_rows
        query = torch.zeros(
            batch, rows, self.module.index_n_heads, DIM, device=hidden.device, dtype=torch.float32
        )
        keys = torch.zeros(batch, 0, DIM, device=hidden.device, dtype=torch.float32)
        if scored:
            heads = torch.stack(self._queries).unflatten(0, (batch, scored))
            keys = torch.stack(self._keys)
            _require_dim(heads, keys)
            query[:, rows - scored :] = heads
        # A pool is chosen where its first token is; the last ones of a row may be its open tail.
        chosen = output[:, 0, :, : keys.shape[1] * pool : pool]
        index = torch.arange(chosen.shape[-1], device=chosen.device, dtype=torch.int64)
        return IndexerCall(self._first, query, keys, None, torch.where(chosen, index, -1))


class _BlockIndexer(Indexer):
    """MiniMax-M3: blocks of keys by the maximum of each head, the local ones always among them."""

    def rule(self) -> SelectionRule:
        module = self.module
        return SelectionRule(
            BLOCK_MAX,
            module.num_heads,
            module.topk_blocks,
            block=module.block_size,
            local=module.local_blocks,
        )

    def _call(self, arguments: Arguments, output: Any) -> IndexerCall:
        if self._scored is None:
            raise ValueError("it takes no product of query heads and keys")
        query = self._scored[0].transpose(1, 2)
        keys = self._scored[1][:, 0].transpose(-1, -2)
        _require_dim(query, keys)
        first = _first_position(arguments, None)
        seen = first + query.shape[1]
        return IndexerCall(first, query, keys[:, :seen], None, output.transpose(1, 2))


_CLASSES: Mapping[str, type[Indexer]] = {
    "DeepseekV32Indexer": Indexer,
    "Dots3NoteTextIndexer": Indexer,
    "GlmMoeDsaIndexer": Indexer,
    "MistralLarge4TextIndexer": Indexer,
    "HYV4Indexer": Indexer,
    "HYV4VLIndexer": Indexer,
    "AXK2Indexer": Indexer,
    "DeepseekV4Indexer": _CompressedIndexer,
    "Glm5NextTextIndexer": _PoolIndexer,
    "Qwen4ExpTextQSAIndexer": _MeanPoolIndexer,
    "MiniMaxM3VLIndexer": _BlockIndexer,
}
KNOWN_CLASSES = tuple(_CLASSES)
# Which values RoPE turns together, and whether they are the last of a key rather than the first:
# halves are values i and i + n/2; gathered ones are 2i and 2i + 1, written to i and i + n/2.
HALVES, GATHERED = "halves", "gathered"
_ROPE: Mapping[str, tuple[str, bool]] = {
    "DeepseekV32Indexer": (HALVES, False),
    "AXK2Indexer": (HALVES, False),
    "HYV4Indexer": (HALVES, True),
    "HYV4VLIndexer": (HALVES, True),
    "Dots3NoteTextIndexer": (GATHERED, False),
    "GlmMoeDsaIndexer": (GATHERED, False),
    "MistralLarge4TextIndexer": (GATHERED, False),
    "MiniMaxM3VLIndexer": (HALVES, False),
}


def find_indexers(model: torch.nn.Module) -> dict[str, Indexer]:
    """The indexers of a model by the names of their modules, in the model's order.

    Raises
    ------
    UnsupportedError
        A module is named as an indexer and is of a class that is not known.
    """
    found = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in _CLASSES:
            found[name] = _CLASSES[kind](module)
        elif kind.endswith("Indexer"):
            raise UnsupportedError(
                f"{name} is a {kind}, an indexer that is not known; known are "
                f"{', '.join(KNOWN_CLASSES)}"
            )
    return found


def _first_position(arguments: Arguments, otherwise: int | None) -> int:
    """Position of the first row, which must be that of every request of the batch."""
    positions = arguments.get("position_ids")
    if positions is None:
        if otherwise is None:
            raise ValueError("it is not given positions")
        return otherwise
    flat = positions if positions.dim() == 2 else positions.reshape(-1, positions.shape[-1])
    first = int(flat[0, 0])
    expected = torch.arange(first, first + flat.shape[1], device=flat.device, dtype=torch.int64)
    if not bool((flat == expected).all()):
        raise InputError("positions must follow on from each other, alike in every request")
    return first


def _require_dim(query: torch.Tensor, keys: torch.Tensor) -> None:
    if query.shape[-1] != DIM or keys.shape[-1] != DIM:
        raise InputError(f"indexer heads must have {DIM} values, got {query.shape[-1]}")
