"""Rollouts and drafts of Llamas of transformers, without an engine, drawn with `rollout_spec.noise`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout_spec.demo.task import make_problem, prompt_text
from rollout_spec.noise.host import derive_seed, gumbel
from rollout_spec.replay.traces import Problem, Rollout


class Drafts(NamedTuple):
    """A draft of k tokens at each of a rollout's n tokens, given the tokens before it."""

    tokens: np.ndarray
    """int64 [n, k]; -1 where nothing was drafted."""
    probabilities: np.ndarray
    """float32 [n, k]: of the drafted tokens, by the draft model."""
    first_logprobs: torch.Tensor
    """float32 [n, vocabulary]: the draft model's for the first token."""

    def num_accepted(self, rollout: Rollout) -> np.ndarray:
        """Tokens of each draft until it differs from the rollout, int64 [n]."""
        following = np.pad(rollout.tokens, (0, self.tokens.shape[1]), constant_values=-2)
        truth = np.lib.stride_tricks.sliding_window_view(following, self.tokens.shape[1])[: rollout.tokens.size]
        return np.cumprod(self.tokens == truth, axis=1).sum(1)


def load(directory: Path) -> Any:
    """A model of transformers, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def relative_costs(policy: Any, draft_model: Any, num_kept: int) -> dict[str, float]:
    """Cost of a drafted token over that of the policy's forward pass, by the weights that are read.

    Returns:
        `layers`: of the layers alone; `head`: of the layers and the head.
    """

    def weights(model: Any, num_layers: int) -> int:
        return num_layers * sum(weight.numel() for weight in model.model.layers[0].parameters())

    drafting, target = weights(draft_model, num_kept), weights(policy, len(policy.model.layers))
    heads = draft_model.lm_head.weight.numel(), policy.lm_head.weight.numel()
    return {"layers": drafting / target, "head": (drafting + heads[0]) / (target + heads[1])}


@contextmanager
def only_layers(model: Any, kept: Sequence[int]) -> Iterator[None]:
    """Let a Llama consist of some of its layers."""
    body, layers = model.model, model.model.layers
    try:
        body.layers = torch.nn.ModuleList([layers[i] for i in kept])
        body.config.num_hidden_layers = len(kept)
        for place, i in enumerate(kept):
            layers[i].self_attn.layer_idx = place  # in the KV cache
        yield
    finally:
        body.layers, body.config.num_hidden_layers = layers, len(layers)
        for place, layer in enumerate(layers):
            layer.self_attn.layer_idx = place


def noise_of(rollout: Rollout, vocab_size: int) -> torch.Tensor:
    """The noise that each token of a rollout was drawn with, float32 [n, vocabulary]."""
    positions = rollout.prompt.size - 1 + np.arange(rollout.tokens.size)
    return torch.from_numpy(gumbel(rollout.seed, positions[:, None], np.arange(vocab_size)))


def demo_prompts(number: int) -> dict[str, Sequence[int]]:
    """Prompts of the demo's task, by name."""
    from rollout_spec.demo.policy import build_tokenizer

    tokenizer, rng = build_tokenizer(), random.Random(7)
    return {f"demo/{i}": tokenizer(prompt_text(make_problem(rng)))["input_ids"] for i in range(number)}


def train_small(directory: Path, steps: int = 400) -> None:
    """Train a model of one layer on the traces that the demo's policy was trained on."""
    from transformers import LlamaForCausalLM

    from rollout_spec.demo.policy import build_model, build_tokenizer
    from rollout_spec.demo.warm_start import IGNORED_LABEL, learning_rate_factor, trace_batches

    tokenizer = build_tokenizer()
    config = build_model(tokenizer, 0).config
    config.num_hidden_layers = 1
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    batches = trace_batches(tokenizer, random.Random(1), 32)
    for _ in range(steps):
        input_ids, labels = next(batches)
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(directory)


@torch.inference_mode()
def sample(
    model: Any, prompts: dict[str, Sequence[int]], number: int, temperature: float, max_tokens: int
) -> list[Problem]:
    """So many rollouts of each prompt (token ids by prompt id)."""
    end, problems = model.config.eos_token_id, []
    for prompt_id, prompt in prompts.items():
        seeds = np.array([derive_seed("model_drafts", temperature.hex(), prompt_id, k) for k in range(number)])
        feed, past, columns = torch.tensor(prompt).repeat(number, 1), None, []
        for at in range(max_tokens):
            out = model(input_ids=feed, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, logits = out.past_key_values, out.logits[:, -1].numpy() / temperature
            noise = gumbel(seeds[:, None], len(prompt) - 1 + at, np.arange(logits.shape[1]))
            columns.append((logits + noise).argmax(1))
            feed = torch.tensor(columns[-1])[:, None]
            if (np.stack(columns, 1) == end).any(1).all():
                break
        rollouts = []
        for k, text in enumerate(np.stack(columns, 1).astype(np.int32)):
            text = text[: np.argmax(text == end) + 1] if end in text else text
            rollouts.append(Rollout(k, 0, np.array(prompt, np.int32), text, (text.size,), int(seeds[k])))
        problems.append(Problem(prompt_id, rollouts))
    return problems


@torch.inference_mode()
def read(model: Any, rollout: Rollout, temperature: float) -> tuple[torch.Tensor, Any]:
    """A model's log-probabilities at each token of a rollout, float32 [n, vocabulary], and its KV cache."""
    tokens = torch.from_numpy(np.concatenate((rollout.prompt, rollout.tokens[:-1]))).long()
    out = model.model(input_ids=tokens[None], use_cache=True)
    logits = model.lm_head(out.last_hidden_state[0, rollout.prompt.size - 1 :])
    return (logits / temperature).log_softmax(1), out.past_key_values


@torch.inference_mode()
def draft(
    model: Any,
    kept: Sequence[int],
    cache: Any,
    rollout: Rollout,
    temperature: float,
    noise: torch.Tensor | None,
    k: int,
    *,
    only_accepted: bool = False,
) -> Drafts:
    """Let some of a model's layers draft k tokens at every token of a rollout.

    As in self-speculative decoding (Zhang et al., arXiv:2309.08168) they read the KV cache that the whole model has
    written for the tokens before the last known one, and write their own for this one and the drafted ones. All drafts
    of a rollout run side by side, one token per pass; the attention mask keeps them apart.

    Args:
        kept: The layers, in order.
        cache: Of the whole model, from `read`. Not changed.
        noise: [n, vocabulary]; each token is the one that the model would sample with it. None: the most probable one.
        only_accepted: Leave off drafts once they differ from the rollout.
    """
    from transformers import DynamicCache

    n, first = rollout.tokens.size, rollout.prompt.size - 1
    texts = torch.from_numpy(np.concatenate((rollout.prompt, rollout.tokens))).long()
    past = DynamicCache()
    for place, i in enumerate(kept):
        past.update(cache.layers[i].keys, cache.layers[i].values, place)
    before = torch.arange(texts.numel() - 1)
    owners = torch.zeros(0, dtype=torch.int64)  # of the KV cache's columns behind the rollout's: the draft's number
    rows, feed = torch.arange(n), texts[first:-1]
    tokens, probabilities, first_logprobs = np.full((n, k), -1), np.zeros((n, k), np.float32), torch.zeros(0)
    with only_layers(model, kept):
        for depth in range(k):
            owners = torch.cat((owners, rows))
            mask = torch.cat((before < (first + rows)[:, None], owners == rows[:, None]), 1)
            out = model.model(
                input_ids=feed[None],
                position_ids=(first + rows + depth)[None],
                attention_mask=mask[None, None],
                past_key_values=past,
                use_cache=True,
            )
            logprobs = (model.lm_head(out.last_hidden_state[0]) / temperature).log_softmax(1)
            first_logprobs = logprobs if depth == 0 else first_logprobs
            feed = (logprobs if noise is None else logprobs + noise[rows + depth]).argmax(1)
            tokens[rows, depth] = feed
            probabilities[rows, depth] = logprobs.gather(1, feed[:, None])[:, 0].exp()
            alive = rows + depth + 1 < n  # there is noise for the next one
            if only_accepted:
                alive &= feed == texts[first + 1 + rows + depth]
            rows, feed = rows[alive], feed[alive]
            if not rows.numel():
                break
    return Drafts(tokens, probabilities, first_logprobs)
