"""Problems that are told by their prompt's text, and fingerprints of tokenizers.

Most recordings hold text, decoded without special tokens, from which a prompt's token ids cannot be had back exactly.
What can be had from either is the text without special tokens, so its hash is the problem's id.
"""

from __future__ import annotations

import hashlib
from typing import Any

from rollout_spec.drafters.base import Tokens


def problem_of_text(text: str) -> int:
    """The problem id of a prompt's text without special tokens: its hash, in [0, 2**64).

    Any whitespace counts as one space, and none at the ends: tokenizers differ in what they put around special tokens.
    """
    digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8, person=b"prompt text").digest()
    return int.from_bytes(digest, "little")


def text_key(tokenizer: Any, token_ids: Tokens) -> int:
    """The problem id by text of a prompt's token ids, in [0, 2**64).

    Args:
        tokenizer: What transformers' `AutoTokenizer` or vLLM gives.
    """
    return problem_of_text(tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=True))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text. Special tokens that are written out in it become one token each, and none is added."""
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids


def fingerprint(vocabulary: dict[str, int]) -> str:
    """128 bits that are equal for equal vocabularies, by token."""
    digest = hashlib.blake2b(digest_size=16)
    for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
        digest.update(f"{number} {token}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()
