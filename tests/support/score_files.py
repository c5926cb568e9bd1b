"""Files for `sdsa score`, and runs of it on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.caches import write_cache
from support.command_line import Outcome, Run
from support.problems import gaussian_values

LENGTHS = [100, 70, 249]


class Files:
    """Keys, queries and a cache of three requests in one folder, and runs of `sdsa score` on it."""

    def __init__(self, sdsa: Run, folder: Path, generator: torch.Generator) -> None:
        self.sdsa = sdsa
        self.folder = folder
        self.keys = folder / "keys.safetensors"
        self.queries = folder / "queries.safetensors"
        self.cache = folder / "cache.safetensors"
        self.key_values = gaussian_values((sum(LENGTHS), 128), generator)
        self.query_values = gaussian_values((6, 128), generator)
        save_file({"keys": self.key_values}, self.keys)
        self.save_queries(self.query_values)
        write_cache(self.cache, self.key_values, LENGTHS)

    def save_queries(self, values: torch.Tensor, **tensors: torch.Tensor) -> None:
        """Replace the query rows, in groups of two."""
        save_file({"queries": values, **tensors}, self.queries, {"rows_per_group": "2"})

    def score(self, *options: object) -> Outcome:
        """``sdsa score`` of the cache, on the CPU."""
        arguments = ("score", self.cache, "--queries", self.queries, "--device", "cpu")
        return self.sdsa(*arguments, *map(str, options))

    def report(self, *options: object) -> dict[str, Any]:
        """The report of a run that has to succeed."""
        outcome = self.score(*options, "--json")
        outcome.is_clean()
        return outcome.document

    def accuracy_of(self, keys: torch.Tensor, *options: object) -> dict[str, Any]:
        """The report on one request of other keys, quantized, and two query rows of ones."""
        save_file({"keys": keys}, self.keys)
        write_cache(self.cache, keys, [keys.shape[0]])
        self.save_queries(torch.ones(2, 128))
        return self.report("--baseline", self.keys, *options)
