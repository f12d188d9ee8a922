"""Made-up rollouts, a history in memory, and tokenizers for tests of history."""

from __future__ import annotations

import contextlib

import numpy as np
from hypothesis import strategies as st

from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.history.contents import Contents, each_once
from rollout_spec.history.rollout import CONTEXT_TOKENS, Rollout, Root
from rollout_spec.history.storage import SUFFIX

UINT64 = st.integers(0, 2**64 - 1)
TOKENS = st.integers(0, 2**31 - 1)


class MemoryStorage:
    """A `ShardStorage` in a dictionary, which its folders share: `files` by path."""

    def __init__(self, files=None, path=""):
        self.files = {} if files is None else files
        self._path = path

    def _below(self):
        """Paths of all files in it and in its folders, as seen from it."""
        return [name.removeprefix(self._path) for name in self.files if name.startswith(self._path)]

    def folder(self, path):
        return type(self)(self.files, f"{self._path}{path}/")

    def folders(self):
        return list(dict.fromkeys(name.split("/")[0] for name in self._below() if "/" in name))

    def sizes(self):
        names = [name for name in self._below() if "/" not in name and name.endswith(SUFFIX)]
        return {name: len(self.files[self._path + name]) for name in names}

    def read(self, name):
        if self._path + name not in self.files:
            raise FileNotFoundError(name)
        return self.files[self._path + name]

    def write(self, name, data):
        self.files[self._path + name] = data

    def delete(self, name):
        self.files.pop(self._path + name, None)

    def remove_unfinished(self, *, before):
        pass  # a file is there as a whole or not at all

    def tidying(self):
        return contextlib.nullcontext(True)


@st.composite
def rollouts(draw):
    """A rollout of any kind."""
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=6))
    words = st.integers(-(2**63), 2**63 - 1)
    size = FEATURE_WORDS * len(tokens)
    features = draw(st.none() | st.lists(words, min_size=size, max_size=size))
    return Rollout(
        draw(UINT64),
        draw(st.integers(0, 2**31 - 1)),
        np.array(draw(st.lists(TOKENS, max_size=CONTEXT_TOKENS)), np.int32),
        np.array(tokens, np.int32),
        None if features is None else np.array(features, np.int64).reshape(-1, FEATURE_WORDS),
        draw(st.none() | st.builds(Root, st.integers(0, 2**31 - 1), UINT64)),
        draw(st.booleans()),
        draw(st.none() | st.floats(allow_nan=False, allow_infinity=False, width=32)),
        draw(st.booleans()),
    )


def plain(rollout):
    """A rollout as values that can be compared."""
    features = None if rollout.features is None else rollout.features.tolist()
    return rollout._replace(context=rollout.context.tolist(), tokens=rollout.tokens.tolist(), features=features)


def stored(storage):
    """All rollouts of a history, as values that can be compared."""
    return [plain(rollout) for rollout in each_once(Contents(storage))]


def chat_tokenizer(template, special_tokens, **named):
    """A byte-level tokenizer with a chat template of TRL's, and with `<think>`, which is not special, as in Qwen3."""
    from importlib.resources import files

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["What is the answer to this? The answer is that the sum is two."] * 3,
        trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=alphabet, special_tokens=special_tokens, show_progress=False
        ),
    )
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ("<think>", "</think>")])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    made.chat_template = (files("trl") / "chat_templates" / f"{template}.jinja").read_text()
    return made
