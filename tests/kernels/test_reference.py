"""The reference itself, on a case done by hand."""

from __future__ import annotations

import torch

from sdsa_kernels.problem import ScoreCall
from sdsa_kernels.testing.reference import reference_scores


def test_reference_on_a_case_done_by_hand() -> None:
    key_cache = torch.zeros(1, 64, 64, dtype=torch.uint8)
    key_cache[0, 0, 0] = 0x2A  # values -1 (low nibble 10) and 1 (high nibble 2)
    key_cache[0, 1, 8] = 0x07  # value 16 is 6
    scales = torch.full((1, 64, 8), 0x38, dtype=torch.uint8)  # 1.0
    scales[0, 1, 1] = 0x44  # 3.0
    query = torch.zeros(1, 128).bfloat16()
    query[0, 0], query[0, 1], query[0, 16] = 2.0, 5.0, 0.5
    table = torch.zeros(1, 1, dtype=torch.int32)
    lengths = torch.tensor([3], dtype=torch.int32)
    requests = torch.zeros(1, dtype=torch.int32)
    call = ScoreCall(
        query, key_cache, table, lengths, requests, torch.empty(1, 4), key_scales=scales
    )
    scores = reference_scores(call)
    assert scores[0, :3].tolist() == [3.0, 9.0, 0.0]
    assert scores[0, 3].isnan()
