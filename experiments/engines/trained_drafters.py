"""Small draft models for a Llama policy: a separate model and an MTP layer, trained on its traces.

Both learn the policy's distribution of the next token (cross entropy with its probabilities) on the texts of the demo's
warm start, and are saved as vLLM reads them: `method="draft_model"` and `"mtp"`.

An MTP layer is one decoder layer. At position t it sees the embedding of token t + 1 and the hidden state from which
the policy's lm_head computes the logits of token t + 1, and gives a hidden state from which the same lm_head computes
the logits of token t + 2. vLLM hands it what its target's `forward` returns: a MiMo's states before the final norm,
which it applies in `compute_logits` (`vllm/model_executor/models/mimo.py`). To draft further tokens the layer sees its
own hidden state in place of the policy's, one position on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from examples.demo.policy import IGNORED_LABEL, learning_rate_factor, trace_batches

Method = Literal["draft_model", "mtp"]
Batches = Iterator[tuple[Tensor, Tensor]]
"""(input_ids, labels), both int64 [B, L], as `trace_batches` yields them."""

SEED, BATCH_SIZE, PEAK_LEARNING_RATE = 1, 16, 4e-3
TRAINED_DEPTH = 3
"""Tokens in a row that an MTP layer learns to draft."""


class TargetOutput(NamedTuple):
    """What a policy says of texts: hidden states before the final norm [B, L, H], and logits [B, L, V]."""

    hidden_states: Tensor
    logits: Tensor


@torch.no_grad()
def run_target(target: LlamaForCausalLM, input_ids: Tensor) -> TargetOutput:
    """One forward pass. input_ids: int64 [B, L]."""
    seen: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        logits = target(input_ids=input_ids, use_cache=False).logits
    finally:
        hook.remove()
    return TargetOutput(seen[0], logits)


# -- the layer ---------------------------------------------------------------------------------------------------------


class MtpLayer(nn.Module):
    """An MTP layer (MiMo's) for a Llama policy, with the same computation as vLLM's."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        for name in ("token", "hidden", "final"):
            self.add_module(f"{name}_layernorm", LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.layer, self.rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)

    def forward(self, embeddings: Tensor, hidden_states: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One more drafted token for a draft that starts at each position.

        The draft that starts at s is at t = s + d in pass d: it sees pass 0 up to s, then pass i at s + i.

        Args:
            embeddings: [B, T, H], at t of token t + 1.
            hidden_states: [B, T, H]: the policy's in the first pass, then this layer's, one position on.
            cache: Keys and values [B, heads, T, head_dim] of the earlier passes. This pass's are appended.

        Returns:
            [B, T, H].
        """

        def update(keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, ...]:
            """Append this pass's to the cache. Returns those of all passes."""
            cache.append((keys, values))
            return tuple(torch.cat(parts, 2) for parts in zip(*cache, strict=True))

        embeddings = torch.cat((torch.zeros_like(embeddings[:, :1]), embeddings[:, 1:]), 1)  # as vLLM's mimo_mtp
        x = self.input_proj(torch.cat((self.hidden_layernorm(hidden_states), self.token_layernorm(embeddings)), -1))
        depth, position = len(cache), torch.arange(x.shape[1])
        back = position[:, None] - position
        seen = torch.cat([back >= depth, *(back == depth - i for i in range(1, depth + 1))], 1)
        x = self.layer(
            x, attention_mask=seen[None, None], position_embeddings=self.rotary(x, position[None]),
            past_key_values=SimpleNamespace(update=update),
        )  # fmt: skip
        return self.final_layernorm(x)


def layer_hidden_states(
    layer: MtpLayer, embed: nn.Module, input_ids: Tensor, hidden_states: Tensor, depth: int
) -> list[Tensor]:
    """What the layer says at every position of texts, for drafts whose earlier tokens are the text's.

    Args:
        input_ids: int64 [B, L].
        hidden_states: The policy's [B, L, H].
        depth: Number of tokens in a row.

    Returns:
        For each d of `depth`, [B, L - 1, H]: at t, the state for token t + 2, the (d + 1)-th token of its draft.
    """
    embeddings, hidden = embed(input_ids[:, 1:]), hidden_states[:, :-1]
    cache: list[tuple[Tensor, Tensor]] = []
    out = []
    for _ in range(depth):
        out.append(layer(embeddings, hidden, cache))
        hidden = torch.cat((hidden_states[:, :1], out[-1][:, :-1]), 1)
    return out


# -- training --------------------------------------------------------------------------------------------------------


def soft_cross_entropy(logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy with the target's probabilities where there is a label. logits [B, L, V], labels [B, L]."""
    use = labels != IGNORED_LABEL
    return -(target_logits[use].softmax(-1) * logits[use].log_softmax(-1)).sum(-1).mean()


def layer_loss(layer: MtpLayer, target: LlamaForCausalLM, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Mean over `TRAINED_DEPTH` drafted tokens in a row."""
    seen = run_target(target, input_ids)
    states = layer_hidden_states(layer, target.model.embed_tokens, input_ids, seen.hidden_states, TRAINED_DEPTH)
    losses = [
        soft_cross_entropy(target.lm_head(state[:, :-1]), seen.logits[:, 1:-1], labels[:, 2:]) for state in states
    ]
    return torch.stack(losses).mean()


def draft_model_loss(model: LlamaForCausalLM, target: LlamaForCausalLM, input_ids: Tensor, labels: Tensor) -> Tensor:
    """The separate model's."""
    logits = model(input_ids=input_ids, use_cache=False).logits
    return soft_cross_entropy(logits[:, :-1], run_target(target, input_ids).logits[:, :-1], labels[:, 1:])


def without_prompts(batches: Batches, prompts: Sequence[Sequence[int]]) -> Batches:
    """Leave out texts that begin with one of these prompts, all of one length."""
    held_out = {tuple(prompt) for prompt in prompts}
    length = len(next(iter(held_out), ()))
    for input_ids, labels in batches:
        keep = torch.tensor([tuple(row[:length].tolist()) not in held_out for row in input_ids])
        if keep.any():
            yield input_ids[keep], labels[keep]


def build(target: LlamaForCausalLM, method: Method) -> nn.Module:
    """An untrained draft model. The separate one has one layer, half of the policy's width."""
    config = target.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        if method == "mtp":
            return MtpLayer(config)
        size = config.hidden_size // 2
        small = {
            "hidden_size": size, "intermediate_size": config.intermediate_size // 2, "num_hidden_layers": 1,
            "num_attention_heads": size // config.head_dim, "num_key_value_heads": size // config.head_dim,
        }  # fmt: skip
        return LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), **small}))


def train(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, method: Method, *, steps: int,
    held_out: Sequence[Sequence[int]],
) -> tuple[nn.Module, list[float]]:  # fmt: skip
    """Train a draft model for a policy on the warm start's texts, without those of the prompts `held_out`.

    With AdamW, a linear warm-up and a cosine decay.

    Returns:
        The model, and each step's loss in nats per token.
    """
    target.requires_grad_(False)
    model = build(target, method).train()
    loss_of = draft_model_loss if method == "draft_model" else layer_loss
    batches = without_prompts(trace_batches(tokenizer, random.Random(f"{SEED}/{method}"), BATCH_SIZE), held_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    losses = []
    for _ in range(steps):
        loss = loss_of(model, target, *next(batches))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return model.eval(), losses


# -- checkpoints -----------------------------------------------------------------------------------------------------


def save(model: nn.Module, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write what vLLM loads. For "mtp" that is the policy itself with the layer in it, a Llama as a MiMo model.

    A Qwen2 model, and so a MiMo, is a Llama whose query, key and value projections have biases: zeros.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    if isinstance(model, LlamaForCausalLM):
        model.save_pretrained(folder)
        return
    config = {
        **target.config.to_dict(), "dtype": "float32", "num_nextn_predict_layers": 1,
        "architectures": ["MiMoForCausalLM"], "model_type": "qwen2",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    layer = {f"model.mtp_layers.0.{name.removeprefix('layer.')}": weight for name, weight in model.state_dict().items()}
    weights = with_biases(target.state_dict() | layer)
    contiguous = {name: weight.detach().contiguous() for name, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def with_biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with biases of 0 for all query, key and value projections."""
    biased = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    return weights | {
        name.removesuffix("weight") + "bias": torch.zeros(weight.shape[0])
        for name, weight in weights.items()
        if name.endswith(biased)
    }
