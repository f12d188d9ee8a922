"""Tiny models with random weights and recurrent layers, of three kinds, beside one layer of attention."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.conftest import sharpen, write_tokenizer

VOCAB_SIZE, LAYERS = 64, 4
KEPT = ("A_log", "dt_bias", "norm", "conv")
"""Weights that are not made larger, for sharper distributions."""
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
}  # fmt: skip


def gated_delta_net(path: Path) -> None:
    """Qwen3-Next."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **SIZES, head_dim=64, linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=2,
        linear_num_value_heads=4, full_attention_interval=LAYERS, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=64, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    _save(Qwen3NextForCausalLM, config, path)


def mamba2(path: Path) -> None:
    """Granite 4."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **SIZES, layer_types=["mamba", "mamba", "attention", "mamba"], mamba_n_heads=8, mamba_d_head=32,
        mamba_n_groups=1, mamba_d_state=32, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=64,
        shared_intermediate_size=128, num_local_experts=0,
    )  # fmt: skip
    _save(GraniteMoeHybridForCausalLM, config, path)


def short_convolution(path: Path) -> None:
    """LFM 2, of which vLLM knows only models with tied embeddings."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **{**SIZES, "tie_word_embeddings": True}, conv_L_cache=3, block_auto_adjust_ff_dim=False, block_dim=128,
        conv_dim=128, layer_types=["conv", "conv", "full_attention", "conv"],
    )  # fmt: skip
    _save(Lfm2ForCausalLM, config, path)


MODELS = {"gated_delta_net": gated_delta_net, "mamba2": mamba2, "short_convolution": short_convolution}


def _save(model_class: type, config: object, path: Path) -> None:
    torch.manual_seed(0)
    model = model_class(config)
    sharpen(model, KEPT)
    model.save_pretrained(path)
    write_tokenizer(path, VOCAB_SIZE)
