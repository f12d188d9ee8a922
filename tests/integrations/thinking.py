"""Requests with a thinking budget, of the four kinds that differ: who says that thinking begins, and how it ends."""

from __future__ import annotations

from tests.integrations.engines import generate, mixed_params

KINDS = [(end, begins) for end in ("w5", "w5 w6") for begins in ("in the prompt", "by the model")]
"""(the string that ends thinking, of one token or two; where thinking begins)."""
BEGIN = 7  # the id of w3
BUDGET = 5


def settings_of(end):
    """Arguments of an engine whose requests may have a budget."""
    return {"reasoning_config": {"reasoning_start_str": "w3", "reasoning_end_str": end}}


def requests_of(begins, **fixed):
    """(prompts, params) of requests with a budget, and of as many without one among them."""
    params = mixed_params(12, 5, **{"max_tokens": 30, "ignore_eos": True, **fixed})
    said = BEGIN if begins == "in the prompt" else 8
    prompts = [[1, 4 + i % 3, said, 4 + i % 5] for i in range(len(params))]
    for p in params[::2]:
        p.thinking_token_budget = BUDGET
        p.logit_bias = {} if begins == "in the prompt" else {BEGIN: 1.0}
    return prompts, params


def num_used_up(llm, prompts, params, outputs):
    """How many rollouts their budget has changed."""
    free = [p.clone() for p in params]
    for p in free:
        p.thinking_token_budget = None
    without = generate(llm, free, prompts)
    return sum(list(a.token_ids) != list(b.token_ids) for a, b in zip(outputs, without, strict=True))
