"""What engines get wrong is named, planted in models and caches; there is no alarm without it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdsa_quant import sdsa_capture
from sdsa_quant.engines.dump import open_engine_cache
from sdsa_quant.engines.verify import Verdict, verify_cache, verify_selection
from sdsa_quant.errors import InputError
from sdsa_quant.formats.fp8 import dequantize_fp8, quantize_fp8
from sdsa_quant.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from sdsa_quant.formats.scale_order import linear_to_128x4
from sdsa_quant.formats.transforms import hadamard
from support.tiny_models import tiny_model, token_ids

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers
TOKENS = 300
FIVE = ("DeepseekV32", "Dots3NoteText", "HYV4", "AXK2", "MiniMaxM3VL")


def model_of(name: str) -> Any:
    """A tiny model whose keys have lengths that differ, as those of real models do."""
    model = tiny_model(name)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(getattr(module, "k_norm", None), torch.nn.LayerNorm):
                module.k_norm.weight.mul_(torch.linspace(0.3, 2, 128))
                module.k_norm.bias.add_(torch.randn(128) * 0.2)
                module.wk.weight.mul_(torch.linspace(0.2, 2, 128)[:, None])
    return model


def capture(name: str, folder: Path) -> Path:
    model = model_of(name)
    with torch.no_grad(), sdsa_capture(model, folder):
        model(token_ids(1, TOKENS))
    return folder


@contextlib.contextmanager
def engine(name: str, folder: Path, plant: Callable[[Any, pytest.MonkeyPatch], None]) -> Iterator:
    """The selections of a model with something changed in it, as a dump."""
    model = model_of(name)
    chosen: dict[str, torch.Tensor] = {}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        plant(model, patch)
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.indexer.register_forward_hook(
                lambda module, inputs, output, number=number: chosen.update(
                    {f"layer_{number}_topk": output[0].int().contiguous()}
                )
            )
        model(token_ids(1, TOKENS))
    path = folder / "dump.safetensors"
    save_file({"layer_0_topk": chosen["layer_0_topk"]}, path)
    yield path


def modeling(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def rotate_keys(model: Any, patch: pytest.MonkeyPatch) -> None:
    from transformers import DynamicCache

    update = DynamicCache.update_indexer
    patch.setattr(
        DynamicCache, "update_indexer", lambda self, k, layer: hadamard(update(self, k, layer))
    )


def other_rope(model: Any, patch: pytest.MonkeyPatch) -> None:
    module = modeling(model)
    patch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb_interleave)


def rope_elsewhere(model: Any, patch: pytest.MonkeyPatch) -> None:
    split = torch.split

    def from_the_end(values: torch.Tensor, sizes: Any, dim: int = 0) -> Any:
        if isinstance(sizes, list) and sum(sizes) == 128 and values.shape[-1] == 128:
            passed, turned = split(values, sizes[::-1], dim)
            return turned, passed
        return split(values, sizes, dim)

    cat = torch.cat

    def back(parts: Any, dim: int = 0) -> torch.Tensor:
        if len(parts) == 2 and [each.shape[-1] for each in parts] == [32, 96]:
            parts = parts[::-1]
        return cat(parts, dim=dim)

    patch.setattr(torch, "split", from_the_end)
    patch.setattr(torch, "cat", back)


def no_rope(model: Any, patch: pytest.MonkeyPatch) -> None:
    module, plain = modeling(model), modeling(model).apply_rotary_pos_emb

    def leave(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return (q, k) if unsqueeze_dim == 2 else plain(q, k, cos, sin)

    patch.setattr(module, "apply_rotary_pos_emb", leave)


def no_norm(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.self_attn.indexer.k_norm = torch.nn.Identity()


def no_weights(model: Any, patch: pytest.MonkeyPatch) -> None:
    class Ones(torch.nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(super().forward(values))

    for layer in model.model.layers:
        layer.self_attn.indexer.weights_proj.__class__ = Ones


def no_relu(model: Any, patch: pytest.MonkeyPatch) -> None:
    module = modeling(model)
    functional = type("F", (), {**vars(module.F), "relu": staticmethod(lambda values: values)})
    patch.setattr(module, "F", functional)


def through(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """A model whose cache gives back keys that went through `change`."""

    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        from transformers import DynamicCache

        update = DynamicCache.update_indexer
        patch.setattr(
            DynamicCache,
            "update_indexer",
            lambda self, k, layer: change(update(self, k, layer)[0])[None],
        )

    return plant


def neighbours_scale(keys: torch.Tensor) -> torch.Tensor:
    codes, scales = quantize_fp8(keys)
    return dequantize_fp8(codes, torch.cat([scales[1:], scales[:1]]))


def neighbours_block_scales(keys: torch.Tensor) -> torch.Tensor:
    codes, scales = quantize_nvfp4(keys)
    return dequantize_nvfp4(codes, torch.cat([scales[-1:], scales[:-1]]))


def tiled_as_linear(keys: torch.Tensor) -> torch.Tensor:
    codes, scales = quantize_nvfp4(keys)
    padded = torch.zeros(384, 8, dtype=torch.uint8)
    padded[: len(keys)] = scales.view(torch.uint8)
    tiled = linear_to_128x4(padded).view(384, 8)
    return dequantize_nvfp4(codes, tiled[: len(keys)].view(torch.float8_e4m3fn))


def next_page(keys: torch.Tensor) -> torch.Tensor:
    return torch.cat([keys[64:], keys[:64]])


def rows_as_planes(keys: torch.Tensor) -> torch.Tensor:
    codes, scales = quantize_fp8(torch.cat([keys, torch.zeros(-len(keys) % 64, 128)]))
    rows = torch.cat([codes.view(torch.uint8), scales[:, None].view(torch.uint8)], 1)
    flat = rows.view(-1, 64 * 132)
    wrong = flat[:, : 64 * 128].reshape(-1, 128).contiguous().view(torch.float8_e4m3fn)
    factors = flat[:, 64 * 128 :].contiguous().view(torch.float32).reshape(-1)
    return dequantize_fp8(wrong, factors)[: len(keys)].nan_to_num(0, 0, 0)


PLANTED = {
    "hadamard-on-one-side": rotate_keys,
    "rope-pairs-swapped": other_rope,
    "rope-on-the-other-end": rope_elsewhere,
    "rope-missing": no_rope,
    "key-norm-missing": no_norm,
    "scales-of-neighbours": through(neighbours_scale),
    "scales-128x4-as-linear": through(tiled_as_linear),
    "pages-off-by-one": through(next_page),
    "wrong-page-layout": through(rows_as_planes),
    "weights-dropped": no_weights,
    "relu-missing": no_relu,
}


def judged(name: str, tmp_path: Path, plant: Callable[..., None]) -> Verdict:
    folder = capture(name, tmp_path / "captured")
    with engine(name, tmp_path, plant) as dump:
        # The model without a cache scores what it has just computed.
        (verdict,) = verify_selection(dump, folder)
    return verdict


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_named(mistake: str, tmp_path: Path) -> None:
    verdict = judged("DeepseekV32", tmp_path, PLANTED[mistake])
    assert not verdict.is_right
    assert verdict.mistake == mistake


def test_block_scales_of_neighbours_are_named_too(tmp_path: Path) -> None:
    verdict = judged("DeepseekV32", tmp_path, through(neighbours_block_scales))
    assert verdict.mistake == "scales-of-neighbours"
    assert verdict.text == "reads the block scales of the previous key"


def test_layers_that_are_mixed_up_are_named(tmp_path: Path) -> None:
    folder = capture("DeepseekV32", tmp_path / "captured")
    other = load_file(folder / "layers.1.safetensors")["layers.1.selected"]
    save_file({"layers.0.indices": other}, tmp_path / "dump.safetensors")
    (verdict,) = verify_selection(tmp_path / "dump.safetensors", folder)
    assert (verdict.mistake, verdict.share < 0.9) == ("layers-mixed-up", True)
    assert verdict.text == "selects for layers.0 what the model selects in layers.1"


FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exact": lambda keys: keys,
    "fp8": lambda keys: dequantize_fp8(*quantize_fp8(keys)),
    "nvfp4": lambda keys: dequantize_nvfp4(*quantize_nvfp4(keys)),
}


@pytest.mark.parametrize("held", FORMATS)
@pytest.mark.parametrize("name", FIVE)
def test_there_is_no_false_alarm(name: str, held: str, tmp_path: Path) -> None:
    folder = capture(name, tmp_path / "captured")
    if name == "MiniMaxM3VL":
        exact = load_file(folder / "layers.0.safetensors")["layers.0.selected"]
        save_file({"layers.0": exact}, tmp_path / "dump.safetensors")
        (verdict,) = verify_selection(tmp_path / "dump.safetensors", folder)
    else:
        with engine(name, tmp_path, through(FORMATS[held])) as dump:
            (verdict,) = verify_selection(dump, folder)
    assert verdict.is_right, verdict
    assert verdict.mistake is None
    assert verdict.share > (0.999 if held == "exact" else 0.8)


@pytest.mark.parametrize("mistake", [*PLANTED])
def test_a_mistake_is_named_in_an_engine_of_fp8_keys(mistake: str, tmp_path: Path) -> None:
    def both(model: Any, patch: pytest.MonkeyPatch) -> None:
        through(FORMATS["fp8"])(model, patch)
        PLANTED[mistake](model, patch)

    assert judged("DeepseekV32", tmp_path, both).mistake == mistake


def cache_dump(folder: Path, keys: torch.Tensor) -> Path:
    """Keys of one request as an engine holds them: FP8, a page's keys before their scales."""
    codes, scales = quantize_fp8(torch.cat([keys, torch.zeros(-len(keys) % 64, 128)]))
    parts = [codes.view(torch.uint8).view(-1, 64 * 128), scales.view(torch.uint8).view(-1, 256)]
    pages = torch.cat(parts, 1)
    tensors = {
        "pages": pages.view(-1, 64, 132),
        "block_table": torch.arange(len(pages), dtype=torch.int32)[None],
        "context_lengths": torch.tensor([len(keys)], dtype=torch.int32),
    }
    save_file(tensors, folder / "cache.safetensors")
    return folder / "cache.safetensors"


CACHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pages-off-by-one": next_page,
    "scales-of-neighbours": neighbours_scale,
    "scales-128x4-as-linear": tiled_as_linear,
}


def test_a_cache_is_compared_with_the_keys(tmp_path: Path) -> None:
    folder = capture("DeepseekV32", tmp_path / "captured")
    first, second = (
        load_file(folder / f"layers.{layer}.safetensors")[f"layers.{layer}.keys"].float()
        for layer in (0, 1)
    )
    for keys, mistake in (
        (first, None),
        (hadamard(first), None),
        (second, "layers-mixed-up"),
        *((change(first), name) for name, change in CACHES.items()),
        *((hadamard(change(first)), name) for name, change in CACHES.items()),
    ):
        cache = open_engine_cache(cache_dump(tmp_path, keys))
        verdict = verify_cache(cache, folder, "layers.0")
        assert (verdict.is_right, verdict.mistake) == (mistake is None, mistake)
    noise = torch.randn(TOKENS, 128)
    verdict = verify_cache(open_engine_cache(cache_dump(tmp_path, noise)), folder, "layers.0")
    assert (verdict.is_right, verdict.mistake) == (False, None)
    cache = open_engine_cache(cache_dump(tmp_path, first[:100]))
    with pytest.raises(InputError, match=r"must have the requests of layers\.0, \[300\] keys"):
        verify_cache(cache, folder, "layers.0")
    with pytest.raises(InputError, match=r"layer must be one of layers\.0, layers\.1, got None"):
        verify_cache(cache, folder)


def test_dumps_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = capture("AXK2", tmp_path / "captured")
    selected = load_file(folder / "layers.0.safetensors")["layers.0.selected"]
    dump = tmp_path / "dump.safetensors"
    for tensors, match in (
        ({"layers.0": selected[:7].clone()}, r"must have 300 rows, those of layers\.0, or one for"),
        ({"layers.0": selected[None].clone()}, "must have 2 dimensions"),
        ({"layers.5": selected.clone()}, r"no tensor of integers .* has the numbers of a layer"),
        (
            {"a.0": selected.clone(), "b.0": selected.clone()},
            r"a\.0 and b\.0 both have the numbers",
        ),
    ):
        save_file(tensors, dump)
        with pytest.raises(InputError, match=match):
            verify_selection(dump, folder)
    save_file({"keys": torch.ones(4, 128)}, tmp_path / "keys.safetensors")
    with pytest.raises(InputError, match="has no layers with a selection"):
        verify_selection(dump, tmp_path / "keys.safetensors")
    model = tiny_model("AXK2")
    with torch.no_grad(), sdsa_capture(model, tmp_path / "short"):
        model(token_ids(1, 20))
    save_file({"layers.0": selected[:20].clone()}, dump)
    with pytest.raises(InputError, match=r"no row of layers\.0 sees more than the 32"):
        verify_selection(dump, tmp_path / "short")
