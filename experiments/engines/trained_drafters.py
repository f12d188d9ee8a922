"""Small draft models for a Llama policy: a separate model and an MTP layer, trained on its traces. And a policy with
recurrent layers, a Qwen3-Next, with an MTP layer.

Both learn the policy's distribution of the next token (cross entropy with its probabilities) on the texts of the demo's
warm start, and are saved as vLLM reads them: `method="draft_model"` and `"mtp"`.

An MTP layer is one decoder layer. At position t it sees the embedding of token t + 1 and the hidden state from which
the policy's lm_head computes the logits of token t + 1, and gives a hidden state from which the same lm_head computes
the logits of token t + 2. vLLM hands it what its target's `forward` returns: a MiMo's states before the final norm,
which it applies in `compute_logits` (`vllm/model_executor/models/mimo.py`), a Qwen3-Next's after it. To draft further
tokens the layer sees its own hidden state in place of the policy's, one position on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from examples.demo.policy import IGNORED_LABEL, build_tokenizer, learning_rate_factor, trace_batches

Method = Literal["draft_model", "mtp"]
Policy = LlamaForCausalLM | Qwen3NextForCausalLM
Batches = Iterator[tuple[Tensor, Tensor]]
"""(input_ids, labels), both int64 [B, L], as `trace_batches` yields them."""

TRAINED_DEPTH = 3
"""Tokens in a row that an MTP layer learns to draft."""


class TargetOutput(NamedTuple):
    """What a policy says of texts: hidden states for its MTP layer [B, L, H], and logits [B, L, V]."""

    hidden_states: Tensor
    logits: Tensor


@torch.no_grad()
def run_target(target: Policy, input_ids: Tensor) -> TargetOutput:
    """One forward pass. input_ids: int64 [B, L]."""
    seen: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        normed = target.model(input_ids=input_ids, use_cache=False).last_hidden_state
    finally:
        hook.remove()
    return TargetOutput(normed if isinstance(target, Qwen3NextForCausalLM) else seen[0], target.lm_head(normed))


# -- the layer ---------------------------------------------------------------------------------------------------------


class MtpLayer(nn.Module):
    """An MTP layer (MiMo's) for a Llama policy, with the same computation as vLLM's."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.project = nn.Linear(2 * size, size, bias=False)
        self.q_proj = nn.Linear(size, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, size, bias=False)
        self.queries_per_key = config.num_attention_heads // config.num_key_value_heads
        self.mlp = LlamaMLP(config)
        self.rotary = LlamaRotaryEmbedding(config)
        norms = ("token", "hidden", "input", "post_attention", "final")
        self.norms = nn.ModuleDict({f"{name}_layernorm": LlamaRMSNorm(size, eps=config.rms_norm_eps) for name in norms})

    def forward(self, embeddings: Tensor, hidden_states: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One more drafted token for a draft that starts at each position.

        Args:
            embeddings: [B, T, H], at t of token t + 1.
            hidden_states: [B, T, H]: the policy's in the first pass, then this layer's, one position on.
            cache: Keys and values [B, heads, T, head_dim] of the earlier passes. This pass's are appended.

        Returns:
            [B, T, H].
        """
        embeddings = torch.cat((torch.zeros_like(embeddings[:, :1]), embeddings[:, 1:]), 1)  # as vLLM's mimo_mtp
        embeddings = self.norms["token_layernorm"](embeddings)
        x = self.project(torch.cat((self.norms["hidden_layernorm"](hidden_states), embeddings), -1))
        x = x + self._attend(self.norms["input_layernorm"](x), cache)
        x = x + self.mlp(self.norms["post_attention_layernorm"](x))
        return self.norms["final_layernorm"](x)

    def _attend(self, x: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The draft that starts at s is at t = s + d in pass d: it sees pass 0 up to s, then pass i at s + i."""
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(x, torch.arange(length)[None]))
        k, v = (part.repeat_interleave(self.queries_per_key, 1) for part in (k, v))
        cache.append((k, v))
        depth = len(cache) - 1
        q = q * self.head_dim**-0.5
        position = torch.arange(length)
        first_keys, first_values = cache[0]
        unseen = position[None, :] > position[:, None] - depth
        scores = [(q @ first_keys.transpose(-1, -2)).masked_fill(unseen, -torch.inf)]
        values = []
        for i, (keys, own_values) in enumerate(cache[1:], start=1):
            back = depth - i
            score = (q * keys.roll(back, 2)).sum(-1, keepdim=True)
            scores.append(score.masked_fill((position < back)[:, None], -torch.inf))
            values.append(own_values.roll(back, 2))
        weights = torch.cat(scores, -1).softmax(-1)
        out = weights[..., :length] @ first_values
        for i, own_values in enumerate(values):
            out = out + weights[..., length + i, None] * own_values
        return self.o_proj(out.transpose(1, 2).flatten(2))


class RecurrentMtpLayer(nn.Module):
    """The MTP layer of a Qwen3-Next, with attention. Its weights are called as in checkpoints, but for a prefix."""

    def __init__(self, config: Qwen3NextConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        initialised = qwen3_next.Qwen3NextModel(config).layers  # transformers does so for whole models only
        self.layers = nn.ModuleList([initialised[config.layer_types.index("full_attention")]])
        for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            self.add_module(name, qwen3_next.Qwen3NextRMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.rotary = qwen3_next.Qwen3NextRotaryEmbedding(config)

    def forward(self, embeddings: Tensor, hidden_states: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """As `MtpLayer.forward`, with the same tokens seen."""

        def update(keys: Tensor, values: Tensor, _: int) -> tuple[Tensor, ...]:
            """Append this pass's to the cache. Returns those of all passes."""
            cache.append((keys, values))
            return tuple(torch.cat(parts, 2) for parts in zip(*cache, strict=True))

        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden_states)), -1))
        depth, position = len(cache), torch.arange(x.shape[1])
        back = position[:, None] - position
        seen = torch.cat([back >= depth, *(back == depth - i for i in range(1, depth + 1))], 1)
        rotary, passes = self.rotary(x, position[None]), SimpleNamespace(update=update)
        return self.norm(self.layers[0](x, rotary, attention_mask=seen[None, None], past_key_values=passes))


def layer_hidden_states(
    layer: MtpLayer | RecurrentMtpLayer, embed: nn.Module, input_ids: Tensor, hidden_states: Tensor, depth: int
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


def warm_start_recurrent(folder: Path, *, steps: int = 600, batch_size: int = 32) -> None:
    """As the demo's `warm_start`, of a Qwen3-Next with a layer of gated DeltaNet and one of attention.

    Each token uses both experts: rounding cannot change which.
    """
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, full_attention_interval=2, head_dim=32,
        num_attention_heads=4, num_key_value_heads=4, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=64, linear_value_head_dim=64, num_experts=2, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=128, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config)

    def loss_of(input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL)

    fit(model, loss_of, trace_batches(tokenizer, random.Random(0), batch_size), steps, peak_learning_rate=4e-3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def soft_cross_entropy(logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy with the target's probabilities where there is a label. logits [B, L, V], labels [B, L]."""
    use = labels != IGNORED_LABEL
    return -(target_logits[use].softmax(-1) * logits[use].log_softmax(-1)).sum(-1).mean()


def layer_loss(layer: MtpLayer | RecurrentMtpLayer, target: Policy, input_ids: Tensor, labels: Tensor) -> Tensor:
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


def fit(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    batches: Batches,
    steps: int,
    peak_learning_rate: float,
) -> list[float]:
    """Train with AdamW, a linear warm-up and a cosine decay. Returns each step's loss, in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    losses = []
    for _ in range(steps):
        loss = loss_of(*next(batches))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def build(target: Policy, method: Method, seed: int) -> nn.Module:
    """An untrained draft model. The separate one has one layer, half of the policy's width."""
    config = target.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if method != "draft_model":
            return (RecurrentMtpLayer if isinstance(target, Qwen3NextForCausalLM) else MtpLayer)(config)
        size = config.hidden_size // 2
        small = {
            "hidden_size": size, "intermediate_size": config.intermediate_size // 2, "num_hidden_layers": 1,
            "num_attention_heads": size // config.head_dim, "num_key_value_heads": size // config.head_dim,
        }  # fmt: skip
        return LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), **small}))


def train(
    target: Policy,
    tokenizer: PreTrainedTokenizerFast,
    method: Method,
    *,
    steps: int,
    held_out: Sequence[Sequence[int]] = (),
    seed: int = 1,
    batch_size: int = 16,
    peak_learning_rate: float = 4e-3,
) -> tuple[nn.Module, list[float]]:
    """Train a draft model for a policy on the warm start's texts, without those of the prompts `held_out`.

    Returns:
        The model, and each step's loss in nats per token.
    """
    target.requires_grad_(False)
    model = build(target, method, seed).train()
    loss = draft_model_loss if method == "draft_model" else layer_loss
    batches = without_prompts(trace_batches(tokenizer, random.Random(f"{seed}/{method}"), batch_size), held_out)
    losses = fit(model, lambda ids, labels: loss(model, target, ids, labels), batches, steps, peak_learning_rate)
    return model.eval(), losses


# -- checkpoints -----------------------------------------------------------------------------------------------------


def save(model: nn.Module, target: Policy, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write what vLLM loads. For "mtp" that is the policy itself with the layer in it, a Llama as a MiMo model.

    A Qwen2 model, and so a MiMo, is a Llama whose query, key and value projections have biases: zeros.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    if isinstance(model, LlamaForCausalLM):
        model.save_pretrained(folder)
        return
    config = {**target.config.to_dict(), "dtype": "float32", "num_nextn_predict_layers": 1}
    weights, of_layer = dict(target.state_dict()), model.state_dict().items()
    if isinstance(model, MtpLayer):
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
        weights = with_biases(weights | {checkpoint_name(name): weight for name, weight in of_layer})
    else:
        weights |= {f"mtp.{name}": weight for name, weight in of_layer}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    contiguous = {name: weight.detach().contiguous() for name, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def checkpoint_name(name: str) -> str:
    """What checkpoints for vLLM call the weight that `MtpLayer` calls `name`."""
    layer = "model.mtp_layers.0."
    if name == "project.weight":
        return f"{layer}input_proj.weight"
    if name.split(".")[0] in ("q_proj", "k_proj", "v_proj", "o_proj"):
        return f"{layer}self_attn.{name}"
    return layer + name.removeprefix("norms.")


def with_biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with biases of 0 for all query, key and value projections."""
    biased = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    return weights | {
        name.removesuffix("weight") + "bias": torch.zeros(weight.shape[0])
        for name, weight in weights.items()
        if name.endswith(biased)
    }
