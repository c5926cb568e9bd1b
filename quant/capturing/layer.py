"""One layer of a capture: its spools, its own check, and the file that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from sdsa_quant.errors import InputError
from sdsa_quant.layout import DIM

from .check import Agreement, compare_selection
from .indexers import IndexerCall
from .rule import SelectionRule
from .spool import SpooledFile, TensorSpool

_CHECKED_ROWS = 256  # at a time: bounds what is read back of query rows with many heads


@dataclass
class CapturedLayer:
    """What one layer scored and selected, in files without names until it is written.

    Its tensors, for `rows` query rows that were kept and requests one after another:

        keys       [keys, 128], what the rows are scored against
        queries    [rows, heads, 128], or [rows, 128] for one head
        weights    [rows, heads], where the model has them
        selected   [rows, k] or [rows, heads, k] int32, ascending, then -1
        positions  [rows] int32, of the row's token in its request, from 0
        requests   [rows] int32
        lengths    [requests] int32, keys of each
        norms      [keys, 2] float32, mean and deviation of each key before its layer norm
        norm       [256] float32, weight and bias of that norm
        rope       [n] float32, frequencies of RoPE in radians a position
    """

    name: str
    """Such as ``layers.3``."""
    rule: SelectionRule | None
    """How it selects; None for attention, which selects nothing."""
    folder: Path
    lengths: list[int] = field(default_factory=list)
    """Keys of each request."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of each request."""
    _spools: dict[str, TensorSpool] = field(default_factory=dict)
    facts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors besides, of one dimension."""
    fields: dict[str, str] = field(default_factory=dict)
    """Header fields besides."""
    rows_of: list[int] = field(default_factory=list)
    """Query rows of each request that were kept."""

    @property
    def rows(self) -> int:
        """Query rows that were kept."""
        return sum(self.rows_of)

    def add(self, call: IndexerCall, every: int, offset: int) -> None:
        """Add what one call scored: keys that are new, and every n-th row from `offset` on.

        Raises
        ------
        ValueError
            The call does not go on where the last one ended, or its values have another dtype.
        """
        batch, rows = call.query.shape[:2]
        if call.first == 0:
            self.lengths += [0] * batch
            self.tokens += [0] * batch
            self.rows_of += [0] * batch
        first_request = len(self.tokens) - batch
        if first_request < 0 or any(n != call.first for n in self.tokens[first_request:]):
            raise InputError(
                f"a forward pass must begin a text or go on where the last one ended, got position "
                f"{call.first} in layer {self.name}"
            )
        kept = torch.arange(rows, dtype=torch.int64, device="cpu")
        kept = kept[(call.first + kept) % every == offset]
        for index in range(batch):
            request = first_request + index
            new = call.keys[index, self.lengths[request] :]
            if new.shape[0]:
                self._spool("keys").append(self._stored("keys", new), request)
                if call.norms is not None:
                    self._spool("norms").append(call.norms[index].cpu(), request)
            if len(kept):
                query = call.query[index, kept.to(call.query.device)]
                self._spool("queries").append(self._stored("queries", query), request)
            if (weights := call.weights) is not None:
                of_heads = weights[index, kept.to(weights.device)].float().cpu()
                self._spool("weights").append(of_heads, request)
            positions = call.first + kept
            if self.rule is not None:
                chosen = self._tidy(call.selected[index, kept.to(call.selected.device)], positions)
                self._spool("selected").append(chosen, request)
            self._spool("positions").append(positions.int(), request)
            owner = torch.full_like(positions, request, dtype=torch.int32)
            self._spool("requests").append(owner, request)
            self.rows_of[request] += len(kept)
            self.lengths[request] += new.shape[0]
            self.tokens[request] += rows

    def _tidy(self, selected: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int32 ``[rows, k]`` or ``[rows, heads, k]``: what a row sees, ascending, then -1."""
        assert self.rule is not None
        chosen = selected.long().cpu()
        seen = (positions + 1) // self.rule.pool
        seen = -(-seen // self.rule.block)
        seen = seen.view(-1, *[1] * (chosen.dim() - 1))
        beyond = torch.iinfo(torch.int32).max
        chosen = chosen.masked_fill((chosen < 0) | (chosen >= seen), beyond).sort(-1).values
        tidy = torch.full((*chosen.shape[:-1], self.rule.k), -1, dtype=torch.int64, device="cpu")
        width = min(self.rule.k, chosen.shape[-1])
        # What a model repeats, such as the fill of a short row, is one choice.
        tidy[..., :width] = chosen[..., :width].masked_fill(chosen[..., :width] == beyond, -1)
        return tidy.int()

    def _spool(self, name: str) -> TensorSpool:
        if name not in self._spools:
            self._spools[name] = TensorSpool(self.folder)
        return self._spools[name]

    def _stored(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Values in the narrowest dtype that holds those of the first call, on the CPU.

        Models score in float32 what they computed in their own dtype, which is found again here.
        """
        dtype = self._spool(name).dtype
        values = values.detach().cpu()
        if dtype is None:
            narrow = (torch.bfloat16, torch.float16)
            exact = [each for each in narrow if torch.equal(values.to(each).float(), values)]
            dtype = exact[0] if exact else torch.float32
        stored = values.to(dtype)
        if not torch.equal(stored.float(), values):
            raise InputError(
                f"{name} of layer {self.name} are no longer exact in {dtype}, as those of the "
                f"first call were"
            )
        return stored.contiguous()

    def check(self) -> Agreement:
        """Whether the rows select from what was captured as the model did."""
        assert self.rule is not None
        total = Agreement(0, 0, 0)
        for request, length in enumerate(self.lengths):
            if not length:
                continue
            keys = self._spools["keys"].read(request, 0, length)
            for start in range(0, self.rows_of[request], _CHECKED_ROWS):
                span = (request, start, min(start + _CHECKED_ROWS, self.rows_of[request]))
                weights = self._spools.get("weights")
                total += compare_selection(
                    self.rule,
                    self._spools["queries"].read(*span),
                    keys,
                    None if weights is None else weights.read(*span),
                    self._spools["selected"].read(*span),
                    self.rule.visible(self._spools["positions"].read(*span)),
                )
        return total

    def write(self, path: Path, metadata: dict[str, str], *, force: bool) -> None:
        """Write the layer's file.

        Raises
        ------
        ValueError
            The file exists and `force` is false, or it cannot be written.
        """
        if "keys" not in self._spools:  # every text is shorter than a pool
            self._spool("keys").append(torch.empty(0, DIM, dtype=torch.float32, device="cpu"))
        self._spool("lengths").append(torch.tensor(self.lengths, dtype=torch.int32, device="cpu"))
        for name, values in self.facts.items():
            self._spool(name).append(values)
        metadata = {**metadata, **self.fields}
        spools = {f"{self.name}.{name}": spool for name, spool in self._spools.items()}
        with SpooledFile(path, spools, metadata, force=force) as file:
            file.write()

    def close(self) -> None:
        """Let go of the files without names."""
        for spool in self._spools.values():
            spool.close()
