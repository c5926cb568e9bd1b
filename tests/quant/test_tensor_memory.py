"""A tensor's bytes where they lie: read, written, and there as long as they are looked at."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from sdsa_quant.errors import InputError
from sdsa_quant.files.tensor_memory import tensor_memory


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_the_bytes_are_the_tensors(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).view(2, 3)
    memory = tensor_memory(tensor)
    assert bytes(memory) == bytes(tensor.view(torch.uint8).flatten().tolist())
    memory[:] = bytes(len(memory))
    assert not tensor.float().any()


def test_a_view_keeps_its_tensor() -> None:
    tensor = torch.arange(1000)
    alive, memory = weakref.ref(tensor), tensor_memory(tensor)[8:]
    del tensor
    gc.collect()
    assert alive() is not None
    assert memory[0] == 1
    del memory
    gc.collect()
    assert alive() is None


def test_of_nothing() -> None:
    assert tensor_memory(torch.empty(0, 4)).nbytes == 0


def test_what_is_not_dense_has_no_bytes_in_a_row() -> None:
    with pytest.raises(InputError, match=r"contiguous and on the CPU, got strides \(1, 4\)"):
        tensor_memory(torch.zeros(4, 4).T)
