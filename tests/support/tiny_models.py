"""The smallest models with random weights of every class of indexer, and a tokenizer of bytes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

_COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_DSA = {
    **_COMMON,
    "intermediate_size": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": 32,
    "index_n_heads": 8,
}
# Module of transformers, configuration, model, and what differs.
_MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "DeepseekV32": (
        "deepseek_v32",
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        {**_DSA, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "Dots3NoteText": (
        "dots3_note",
        "Dots3NoteTextConfig",
        "Dots3NoteForCausalLM",
        {**_DSA, "shared_experts_intermediate_size": 32},
    ),
    "GlmMoeDsa": (
        "glm_moe_dsa",
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {**_DSA, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    ),
    "MistralLarge4Text": (
        "mistral_large4",
        "MistralLarge4TextConfig",
        "MistralLarge4TextModel",
        _DSA,
    ),
    "HYV4": ("hy_v4", "HYV4Config", "HYV4ForCausalLM", _DSA),
    "AXK2": ("axk2", "AXK2Config", "AXK2ForCausalLM", _DSA),
    "DeepseekV4": (
        "deepseek_v4",
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        {
            **_COMMON,
            "head_dim": 64,
            "q_lora_rank": 32,
            "n_routed_experts": 4,
            "index_n_heads": 8,
            "index_topk": 8,
            "o_groups": 2,
            "o_lora_rank": 16,
            "sliding_window": 16,
            "layer_types": ["compressed_sparse_attention"] * 2,
            "hc_mult": 2,
        },
    ),
    "Glm5NextText": (
        "glm5_next",
        "Glm5NextTextConfig",
        "Glm5NextTextModel",
        {
            **_DSA,
            "qk_rope_head_dim": 0,
            "index_topk": 64,
            "layer_types": ["indexed_attention"] * 2,
            "indexer_types": ["full", "full"],
            "linear_num_heads": 2,
            "hc_mult": 2,
        },
    ),
    "Qwen4ExpTextQSA": (
        "qwen4_exp",
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 32,
            "indexer_compress_ratio": 4,
            "layer_types": ["indexed_attention"] * 2,
            "hc_count": 2,
            "hc_lowrank": 8,
        },
    ),
    "MiniMaxM3VL": (
        "minimax_m3_vl",
        "MiniMaxM3VLTextConfig",
        "MiniMaxM3VLForCausalLM",
        {
            **{name: _COMMON[name] for name in _COMMON if name != "moe_intermediate_size"},
            "intermediate_size": 32,
            "dense_intermediate_size": 32,
            "shared_intermediate_size": 32,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "num_local_experts": 4,
            "index_block_size": 16,
            "index_topk_blocks": 3,
            "rotary_dim": 16,
            "layer_types": ["minimax_m3_sparse"] * 2,
        },
    ),
}
NAMES = tuple(_MODELS)


def _require_transformers() -> None:
    """Skip a test where transformers cannot be imported, as with a safetensors of before 0.8."""
    pytest.importorskip("transformers", exc_type=ImportError)


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with the indexer of that name, eager attention on the CPU."""
    _require_transformers()
    module, configuration, model, settings = _MODELS[name]
    package = f"transformers.models.{module}"
    found = importlib.import_module(f"{package}.configuration_{module}")
    config = getattr(found, configuration)(**{**settings, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(20261201)
    network = getattr(importlib.import_module(f"{package}.modeling_{module}"), model)(config)
    with torch.no_grad():
        for parameter in network.parameters():  # those that begin as zeros or ones too
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return network.eval().to(dtype)


def dense_model() -> Any:
    """A model without an indexer, with attention heads of 128 values in two groups."""
    _require_transformers()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(20261201)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def token_ids(batch: int, count: int) -> torch.Tensor:
    """int64 ``[batch, count]``, always the same."""
    drawn = torch.Generator().manual_seed(7)
    return torch.randint(3, 256, (batch, count), generator=drawn)


def save_model(network: Any, folder: Path) -> None:
    """Write a model and a tokenizer that makes a token of each byte."""
    _require_transformers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    network.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
