"""`print` of a record shows what it is, not every value of its tensors."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import pytest
import torch

import sdsa_kernels
import sdsa_quant
from sdsa_kernels.checks import check_scores_call
from sdsa_kernels.problem import ScoreCall
from sdsa_quant.formats.transforms import KeyTransform
from support.caches import write_cache
from support.problems import make_problem


def test_a_cache_in_one_line(tmp_path: Path) -> None:
    cache = write_cache(tmp_path / "c.safetensors", torch.ones(5000, 128).bfloat16(), [2500] * 2)
    shown = repr(cache)
    assert "int32 [2, 40]" in shown
    assert "c.safetensors" in shown
    assert "tensor(" not in shown
    assert len(shown) < 600
    assert "uint8 [80, 64, 64]" in repr(cache.paged_keys())


def test_a_problem_and_a_transform_in_one_line(generator: torch.Generator) -> None:
    problem = check_scores_call(ScoreCall(**vars(make_problem([130, 7], generator=generator))))
    for record in (problem, KeyTransform(mean=torch.zeros(128))):
        assert "tensor(" not in repr(record)
        assert len(repr(record)) < 800
    assert "float32 [128]" in repr(KeyTransform(mean=torch.zeros(128)))


@pytest.mark.parametrize("package", [sdsa_quant, sdsa_kernels])
def test_every_public_record_of_tensors_is_short(package: ModuleType) -> None:
    for name in package.__all__:
        record = getattr(package, name)
        if inspect.isclass(record) and hasattr(record, "__dataclass_fields__"):
            types = [str(field.type) for field in record.__dataclass_fields__.values()]
            if any("Tensor" in each for each in types):
                assert "short_repr" in inspect.getsource(record), name
