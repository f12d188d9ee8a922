"""The demo's policy: a Llama of 2 layers, a tokenizer with one token per word of the task, and their warm start."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.demo.task import VOCABULARY, make_prompt, trace_text

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
MAX_POSITION_EMBEDDINGS = 512
IGNORED_LABEL = -100  # of prompts and padding: cross entropy leaves them out


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer: words at white space, and no special token is added on its own."""
    vocabulary = {token: token_id for token_id, token in enumerate((*SPECIAL_TOKENS.values(), *VOCABULARY))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, padding_side="left", model_max_length=MAX_POSITION_EMBEDDINGS,
        clean_up_tokenization_spaces=False, **SPECIAL_TOKENS,
    )  # fmt: skip


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, heads: int = 4) -> LlamaForCausalLM:
    """Make an untrained policy, float32 on the CPU, whose weights depend on `seed` and its attention heads alone."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256,
        num_hidden_layers=2,  # the fewest that can copy: one finds the earlier place, one reads what followed it
        # vLLM's attention takes no heads of fewer than 32 numbers on CPUs, of 64 on GPUs.
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=128 // heads,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS, tie_word_embeddings=False, dtype="float32",
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def warm_start(out_dir: Path, *, seed: int = 0, steps: int = 600, batch_size: int = 32, heads: int = 4) -> None:
    """Teach a fresh policy the form of the search, so that GRPO starts from a non-zero reward. Prints how far it is.

    The same arguments give the same weights on the same machine. `out_dir` appears when it is complete.
    """
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed, heads).train()
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    gains = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    batches = trace_batches(tokenizer, random.Random(seed), batch_size)
    for step in range(1, steps + 1):
        input_ids, labels = next(batches)
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % max(1, steps // 10) == 0:
            print(f"  step {step} of {steps}, loss {loss.item():.3f}", flush=True)
    unfinished = out_dir.with_suffix(".tmp")
    model.eval().save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(out_dir)


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first 5 % of the steps, then a cosine down to 0."""
    warmup = max(1, steps // 20)
    decay = 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return (step + 1) / warmup if step < warmup else decay


def trace_batches(tokenizer: Any, rng: random.Random, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless batches of fresh traces, as `pad` returns them."""
    while True:
        pool = []
        for _ in range(16 * batch_size):
            prompt = make_prompt(rng)
            ids, trace_ids = tokenizer.encode(prompt), tokenizer.encode(trace_text(prompt, rng))
            pool.append(([*ids, *trace_ids, tokenizer.eos_token_id], len(ids)))
        pool.sort(key=lambda sample: len(sample[0]))  # so that little of a batch is padding
        starts = list(range(0, len(pool), batch_size))
        rng.shuffle(starts)
        for first in starts:
            yield pad(pool[first : first + batch_size], tokenizer.pad_token_id)


def pad(samples: Sequence[tuple[list[int], int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Make input_ids and labels, int64 [B, L], of B texts: each one's token ids, and how many of them are the prompt.

    No attention mask is needed: padding is on the right, where a causal model's real tokens do not see it.
    """
    input_ids = [torch.tensor(token_ids) for token_ids, _ in samples]
    labels = [torch.tensor([IGNORED_LABEL] * start + token_ids[start:]) for token_ids, start in samples]
    return pad_sequence(input_ids, True, pad_token_id), pad_sequence(labels, True, IGNORED_LABEL)
