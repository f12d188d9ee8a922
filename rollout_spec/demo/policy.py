"""The demo's policy: a Llama of 2 layers and a tokenizer with one token per word of the task."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rollout_spec.demo.task import VOCABULARY

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
MAX_POSITION_EMBEDDINGS = 512
HIDDEN_SIZE = 128
INTERMEDIATE_SIZE = 256
HEAD_DIM = 32
"""vLLM's attention on CPUs takes no smaller heads."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer: words at white space, `decode(encode(text)) == text` for text with single spaces.

    No special token is added on its own: a prompt starts with a word that starts nothing else, so a beginning of
    sequence would say nothing, and an engine that takes text and one that takes token ids see the same prompt.
    """
    vocabulary = {token: token_id for token_id, token in enumerate((PAD, BOS, EOS, UNK, *VOCABULARY))}
    words = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=MAX_POSITION_EMBEDDINGS,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Make an untrained policy, float32 on the CPU, whose weights depend on `seed` alone.

    Two layers are the fewest that can copy (one finds the earlier place, one reads what followed it).
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=2,
        num_attention_heads=HIDDEN_SIZE // HEAD_DIM,
        num_key_value_heads=HIDDEN_SIZE // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
