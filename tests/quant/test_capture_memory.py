"""A capture of a million tokens takes memory of its own that does not grow with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Chunks as an indexer with eight heads would give them, which pass through the whole of a capture:
# added, checked against the selection, written. Rows are of the last chunk alone, since the float64
# scores of one row take 8 MB.
PROGRAM = """
import json, resource, sys
from pathlib import Path
import torch
from sdsa_quant.capturing.capture import Capture, write_layers
from sdsa_quant.capturing.check import selection_scores
from sdsa_quant.capturing.indexers import IndexerCall
from sdsa_quant.capturing.layer import CapturedLayer
from sdsa_quant.capturing.rule import SelectionRule

tokens, chunk, rule = int(sys.argv[1]), 16384, SelectionRule("relu-sum", 8, 2048)
drawn = torch.Generator().manual_seed(1)
layer = CapturedLayer("layers.0", rule, Path(sys.argv[2]))

class Keys:
    # What a model has in its cache is not the capture's: only what is asked for is made.
    def __init__(self, first):
        self.first = first
    def __getitem__(self, where):
        return torch.randn(chunk, 128, generator=drawn).bfloat16().float()

def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.randn(64, 64) @ torch.randn(64, 64)
before = used()
for first in range(0, tokens, chunk):
    query = torch.randn(1, chunk, 8, 128, generator=drawn).bfloat16().float()
    last = first + chunk == tokens
    every = chunk // 8 if last else 4 * tokens
    call = IndexerCall(
        first, query, Keys(first), torch.ones(1, chunk, 8), torch.zeros(1, chunk, 1).long()
    )
    layer.add(call, every, every - 1)
# The selection of the model that was not there: the best of the scores themselves.
lengths = rule.visible(layer._spools["positions"].read(0, 0, 8))
keys = layer._spools["keys"].read(0, 0, tokens)
query = layer._spools["queries"].read(0, 0, 8)
scores = selection_scores(rule, query, keys, None, lengths)[:, 0]
best = scores.topk(2048).indices.sort(-1).values.int()
layer._spools["selected"].close()
del layer._spools["selected"], keys, query, scores
layer._spool("selected").append(best, 0)
capture = Capture(Path(sys.argv[2]), {"layers.0": layer}, 1, {})
write_layers(capture, force=False)
agreement = capture.agreements["layers.0"]
print(json.dumps({
    "bytes": used() - before, "rows": agreement.rows, "same": agreement.same,
    "file_bytes": capture.paths["layers.0"].stat().st_size,
}))
"""


@pytest.mark.slow
def test_a_million_tokens_take_less_than_a_gigabyte(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(1 << 20), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["rows"] == figures["same"] == 8
    assert figures["file_bytes"] > (1 << 20) * 256
    assert figures["bytes"] < 1e9, figures
