"""What a soak asks its engines for: rounds of requests and events drawn from a seed, weights and adapters."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.conftest import VOCAB_SIZE

MAX_MODEL_LEN = 256
ADAPTERS = tuple(f"{name}-v{version}" for name in ("ann", "bob", "eve") for version in range(3))
"""Two of them fit into the engines at a time."""
EVENTS = {"preempt": 0.3, "switch": 0.3, "vanish": 0.03}
"""Probabilities, for each round, that all running requests are preempted, that speculation is switched off, or on
again, and that the history folder vanishes."""


class Request(NamedTuple):
    """One request of a round, with the arguments of `SamplingParams` and the name of its LoRA adapter.

    Attributes:
        key: Unique in a soak.
        arrives: So many seconds after the round has begun; at once where a round is one call.
        leave_after: The client leaves once it has seen so many tokens. None: it stays.
    """

    key: str
    prompt: list[int]
    params: dict[str, Any]
    adapter: str | None
    arrives: float
    leave_after: int | None


class Round(NamedTuple):
    """Requests of one version of the weights, and what happens so many seconds after they have begun."""

    number: int
    version: int
    requests: list[Request]
    events: list[tuple[float, str]]


class Workload:
    """Rounds, one after the other, the same for the same seed and the same rollouts."""

    def __init__(self, seed: str, *, is_small: bool, has_adapters: bool) -> None:
        self._rng, self._has_adapters = random.Random(seed), has_adapters
        self._most_requests, self._most_tokens = (10, 40) if is_small else (28, 90)
        self._version = self._number = 0
        self._problems = [[1, *self._tokens(self._rng.choice([2, 5, 17, 40, 100]))] for _ in range(24)]
        self._said: list[list[int]] = []

    def observe(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A rollout that later prompts may continue."""
        self._said = [*self._said[-40:], [*prompt, *output]]

    def next_round(self) -> Round:
        """Draw one."""
        rng = self._rng
        self._number += 1
        self._version += rng.random() < 0.4
        # On a CPU vLLM applies some adapter to requests without one, where others of the step have any.
        has_adapters = self._has_adapters and rng.random() < 0.5
        requests = [
            self._request(f"{self._number}.{i}", has_adapters) for i in range(rng.randint(2, self._most_requests))
        ]
        events = [(rng.random(), name) for name, p in EVENTS.items() if rng.random() < p]
        return Round(self._number, self._version, requests, sorted(events))

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(4, VOCAB_SIZE) for _ in range(count)]

    def _request(self, key: str, has_adapter: bool) -> Request:
        rng = self._rng
        prompt = rng.choice(self._problems)
        if self._said and rng.random() < 0.25:  # a later turn, or a rollout that goes on
            prompt = [*rng.choice(self._said), *self._tokens(rng.choice([0, 1, 6]))][: MAX_MODEL_LEN - 20]
        params = self._parameters()
        params["max_tokens"] = min(params["max_tokens"], MAX_MODEL_LEN - len(prompt))
        return Request(
            key=key,
            prompt=prompt,
            params=params,
            adapter=rng.choice(ADAPTERS) if has_adapter else None,
            arrives=rng.choice([0.0, 0.0, 0.0, rng.random()]),
            leave_after=rng.randint(1, params["max_tokens"]) if rng.random() < 0.12 else None,
        )

    def _parameters(self) -> dict[str, Any]:
        rng = self._rng
        temperature = rng.choice([0.0, 0.6, 1.0, 1.0, 1.3])
        some = {
            "top_p": rng.choice([0.5, 0.8, 0.95]), "top_k": rng.choice([1, 3, 6, 20]),
            "min_p": rng.choice([0.02, 0.2]), "repetition_penalty": rng.choice([0.8, 1.3]),
            "presence_penalty": rng.choice([-0.5, 0.7]), "ignore_eos": True, "stop_token_ids": self._tokens(1),
            "stop": [" ".join(f"w{rng.randrange(VOCAB_SIZE - 4)}" for _ in range(rng.randint(1, 2)))],
            "allowed_token_ids": sorted({2, *self._tokens(12)}),
        }  # fmt: skip
        return {
            "temperature": temperature, "max_tokens": rng.randint(1, self._most_tokens), "seed": rng.randrange(2**40),
            "n": rng.choice([1, 1, 1, 1, 2, 4]) if temperature else 1, "logprobs": rng.choice([0, 1, VOCAB_SIZE]),
            **{name: value for name, value in some.items() if rng.random() < 0.12},
        }  # fmt: skip


def write_adapters(model: Path) -> None:
    """LoRA adapters for a model, in folders of their names beside it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    for number, name in enumerate(ADAPTERS):
        torch.manual_seed(number)
        config = LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
        for parameter_name, values in adapted.named_parameters():
            if "lora_" in parameter_name:
                torch.nn.init.normal_(values, std=0.2)
        adapted.save_pretrained(model.parent / name)


def logits_of(model: Path, version: int, tokens: Sequence[int]) -> torch.Tensor:
    """A policy version's logits of the token after these, without adapters, float64 [VOCAB_SIZE]."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy.load_state_dict(dict(weights_of(model, version)), strict=False)  # tied weights are there once
    with torch.no_grad():
        logits: torch.Tensor = policy.double()(torch.tensor([list(tokens)])).logits[0, -1]
    return logits


def weights_of(model: Path, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, values) of a policy version's parameters. Version 0 is what the model's file has."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(version)
    for name, values in sorted(load_file(model / "model.safetensors").items()):
        change = torch.randn(values.shape, generator=generator) * values.abs().mean() * 0.2
        yield name, values + change if version else values
