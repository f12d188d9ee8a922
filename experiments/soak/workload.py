"""What a soak asks its engines for: a tiny model, adapters, and rounds of requests and events drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

VOCAB_SIZE = 32
"""All log-probabilities of a position are asked for, so it is small."""
EOS = 2
MAX_MODEL_LEN = 256
ADAPTERS = ("ann", "bob", "eve")
"""Two of them fit into the engines at a time."""
ADAPTER_VERSIONS = 4
NUM_PROBLEMS = 24
TENANTS = (None, None, None, "red", "blue")
"""Cache salts, the first ones more often."""


@dataclass(frozen=True)
class Request:
    """One request of a round.

    Attributes:
        key: Its name, unique in a soak.
        params: Arguments of `SamplingParams`; `structured_outputs` as a dict.
        adapter: (name, version) of its LoRA adapter.
        arrives: It is sent once the round's rollouts have so many tokens.
        leave_after: The client leaves once it has seen so many tokens. None: it stays.
        is_evaluation: It does not stay in the history.
    """

    key: str
    prompt: list[int]
    params: dict[str, Any]
    adapter: tuple[str, int] | None
    arrives: int
    leave_after: int | None
    is_evaluation: bool
    cache_salt: str | None


class Event(NamedTuple):
    """Something that happens to the engine once the round's rollouts have `after` tokens."""

    after: int
    name: str  # "pause", "preempt", "switch", "weights", or "vanish" of the history folder


@dataclass(frozen=True)
class Round:
    """Requests that are served together, what happens meanwhile, and the weights that it begins with."""

    number: int
    version: int
    requests: list[Request]
    events: list[Event]


@dataclass
class Kind:
    """What a kind of engine can do, and how long its kernels take.

    Attributes:
        size: Most requests of a round.
        max_tokens: Of a rollout.
        omits: Names of events and of sampling parameters that the engine does not have.
    """

    size: int = 28
    max_tokens: int = 90
    adapters: bool = False
    omits: Sequence[str] = field(default_factory=tuple)


class Workload:
    """Rounds, one after the other, the same for the same seed and the same rollouts.

    Args:
        seed: Anything that `random.Random` takes.
    """

    def __init__(self, seed: Any, kind: Kind) -> None:
        self._rng = random.Random(seed)
        self._kind = kind
        self._version = 0
        self._adapter_versions = dict.fromkeys(ADAPTERS, 0)
        rng = self._rng
        self._problems = [
            [1, *(rng.randrange(4, VOCAB_SIZE) for _ in range(rng.choice([2, 5, 17, 40, 100])))]
            for _ in range(NUM_PROBLEMS)
        ]
        self._said: list[list[int]] = []  # prompt and output of some rollouts
        self._number = 0

    def observe(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A rollout that later prompts may continue."""
        self._said = [*self._said[-40:], [*prompt, *output]]

    def next_round(self) -> Round:
        """Draw one."""
        rng, number = self._rng, self._number
        self._number += 1
        if rng.random() < 0.3:
            self._version += 1
        if self._kind.adapters and rng.random() < 0.3:
            name = rng.choice(ADAPTERS)
            self._adapter_versions[name] = (self._adapter_versions[name] + 1) % ADAPTER_VERSIONS
        # On a CPU vLLM applies some adapter to requests without one, where others of the step have any.
        has_adapters = self._kind.adapters and rng.random() < 0.5
        size = rng.randint(2, self._kind.size)
        requests = [self._request(f"{number}.{i}", has_adapters) for i in range(size)]
        expected = sum(request.params["max_tokens"] * request.params["n"] for request in requests) // 2
        version = self._version
        events = []
        for name, chance in (("pause", 0.1), ("preempt", 0.2), ("switch", 0.2), ("weights", 0.1), ("vanish", 0.03)):
            if rng.random() < chance and name not in self._kind.omits:
                events.append(Event(rng.randrange(expected + 1), name))
                self._version += name == "weights"
        return Round(number, version, requests, sorted(events))

    def _request(self, key: str, has_adapter: bool) -> Request:
        rng = self._rng
        prompt = rng.choice(self._problems)
        if self._said and rng.random() < 0.25:  # a later turn, or a rollout that goes on
            prompt = [*rng.choice(self._said), *(rng.randrange(4, VOCAB_SIZE) for _ in range(rng.choice([0, 1, 6])))]
            prompt = prompt[: MAX_MODEL_LEN - 20]
        params = {key: value for key, value in self._parameters() if key not in self._kind.omits}
        if params["temperature"] == 0:
            params["n"] = 1  # vLLM takes no more where they would be equal
        if "min_tokens" in params:
            params["min_tokens"] = min(params["min_tokens"], params["max_tokens"])
        leaves = rng.random() < 0.12
        return Request(
            key=key,
            prompt=prompt,
            params=params,
            adapter=self._adapter() if has_adapter else None,
            arrives=rng.choice([0, 0, 0, rng.randrange(400)]),
            leave_after=rng.randrange(1, params["max_tokens"] + 1) if leaves else None,
            is_evaluation=rng.random() < 0.1,
            cache_salt=rng.choice(TENANTS),
        )

    def _adapter(self) -> tuple[str, int]:
        name = self._rng.choice(ADAPTERS)
        return name, self._adapter_versions[name]

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        rng = self._rng
        words = [f"w{i}" for i in range(VOCAB_SIZE - 4)]
        yield "temperature", rng.choice([0.0, 0.6, 1.0, 1.0, 1.3])
        yield "max_tokens", rng.randint(1, self._kind.max_tokens)
        yield "seed", rng.randrange(2**40)
        yield "n", rng.choice([1, 1, 1, 1, 2, 4])
        yield "logprobs", rng.choice([0, 1, VOCAB_SIZE])
        some: dict[str, Any] = {
            "top_p": rng.choice([0.5, 0.8, 0.95]),
            "top_k": rng.choice([1, 3, 6, 20]),
            "min_p": rng.choice([0.02, 0.2]),
            "repetition_penalty": rng.choice([0.8, 1.3]),
            "presence_penalty": rng.choice([-0.5, 0.7]),
            "frequency_penalty": rng.choice([-0.3, 0.5]),
            "min_tokens": rng.randint(0, 30),
            "ignore_eos": True,
            "stop_token_ids": [rng.randrange(4, VOCAB_SIZE)],
            "stop": [" ".join(rng.choice(words) for _ in range(rng.randint(1, 2)))],
            "bad_words": [rng.choice(words)],
            "allowed_token_ids": sorted({EOS, *(rng.randrange(4, VOCAB_SIZE) for _ in range(12))}),
            "structured_outputs": {"regex": "(w1|w2|w3)((w4|w5)(w6|w7))+"},
        }
        chosen = [name for name in some if rng.random() < 0.12]
        if "structured_outputs" in chosen:
            # Masks that exclude each other leave nothing to sample. A stop token that the grammar has is an error.
            others = ("bad_words", "allowed_token_ids", "min_tokens", "stop_token_ids")
            chosen = [name for name in chosen if name not in others]
        for name in chosen:
            if name == "min_tokens":
                yield "ignore_eos", False
            yield name, some[name]


def write_model(folder: Path, seed: int = 0) -> None:
    """A Llama of two layers with random weights, sharp enough that some drafts are right; and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging

    logging.disable_progress_bar()

    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCAB_SIZE - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
            pad_token_id=0, bos_token_id=1, eos_token_id=EOS, dtype="float32",
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)


def adapter_folder(models: Path, name: str, version: int) -> Path:
    """Where `write_adapters` puts an adapter, beside the model."""
    return models / f"{name}-{version}"


def write_adapters(models: Path) -> None:
    """LoRA adapters for the model, each in several versions."""
    from safetensors.torch import save_file

    for place, name in enumerate(ADAPTERS):
        for version in range(ADAPTER_VERSIONS):
            folder = adapter_folder(models, name, version)
            folder.mkdir()
            generator = torch.Generator().manual_seed(100 * place + version)
            weights = {}
            for layer in range(2):
                for module in ("q_proj", "v_proj"):
                    prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                    weights[f"{prefix}.lora_A.weight"] = torch.randn(4, 64, generator=generator) * 0.2
                    weights[f"{prefix}.lora_B.weight"] = torch.randn(64, 4, generator=generator) * 0.2
            save_file(weights, folder / "adapter_model.safetensors")
            config = {
                "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 4, "lora_dropout": 0.0,
                "bias": "none", "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": str(models),
            }  # fmt: skip
            (folder / "adapter_config.json").write_text(json.dumps(config))


def weights_of(model: Path, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, values) of a policy version's parameters. Version 0 is what `write_model` has written."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(version)
    for name, values in sorted(load_file(model / "model.safetensors").items()):
        change = torch.randn(values.shape, generator=generator) * values.abs().mean() * 0.2
        yield name, values + change if version else values


def all_tokens() -> np.ndarray:
    """int64 [VOCAB_SIZE]"""
    return np.arange(VOCAB_SIZE)
