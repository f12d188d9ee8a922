"""Whether a model's passes pay, from steps whose cost is known."""

from __future__ import annotations

import random

import pytest

from rollout_spec.budget.model import STEPS_BETWEEN_TRIALS, TRIAL_STEPS, ModelBudget


def run(budget, num_requests, steps, with_model, without, noise=0.0):
    """Steps of an engine; each way has (tokens per request, seconds). Returns the share taken with the model."""
    rng, taken = random.Random(0), 0
    for _ in range(steps):
        uses_model = budget.wants_model(num_requests)
        taken += uses_model
        tokens, seconds = with_model if uses_model else without
        seconds *= 1 + noise * rng.random() + (20 * noise if rng.random() < 0.05 else 0)
        said = sum(int(tokens) + (rng.random() < tokens % 1) for _ in range(num_requests))
        budget.observe_step(num_requests, said, seconds, uses_model=uses_model)
    return taken / steps


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_it_is_used_where_it_pays(noise):
    budget = ModelBudget()
    run(budget, 4, 200, (2.5, 1.2), (1.5, 1.0), noise)
    run(budget, 256, 200, (2.5, 3.0), (1.5, 1.0), noise)
    assert run(budget, 4, 3000, (2.5, 1.2), (1.5, 1.0), noise) > 0.95
    assert run(budget, 256, 3000, (2.5, 3.0), (1.5, 1.0), noise) < 0.05
    assert set(budget.speeds()) == {4, 256}


def test_a_change_is_noticed():
    """As when history has grown: the model gains less, and later more again."""
    budget = ModelBudget()
    run(budget, 8, 300, (3.0, 1.2), (1.2, 1.0))
    assert run(budget, 8, 4 * STEPS_BETWEEN_TRIALS, (3.0, 1.2), (2.9, 1.0)) < 0.6
    assert run(budget, 8, STEPS_BETWEEN_TRIALS, (3.0, 1.2), (2.9, 1.0)) < 0.1
    run(budget, 8, 4 * STEPS_BETWEEN_TRIALS, (4.5, 1.2), (2.9, 1.0))
    assert run(budget, 8, STEPS_BETWEEN_TRIALS, (4.5, 1.2), (2.9, 1.0)) > 0.9


@pytest.mark.parametrize("num_late", [0, 5])
def test_steps_of_the_way_that_was_left_are_not_counted(num_late):
    """Tensor-parallel ranks may learn of them after they have decided otherwise."""
    budget = ModelBudget()
    for _ in range(6 * TRIAL_STEPS):
        way = budget.wants_model(4)
        budget.observe_step(4, 10 if way else 6, 1.25 if way else 1.0, uses_model=way)
        if budget.wants_model(4) != way:
            for _ in range(num_late):
                budget.observe_step(4, 1000, 1.0, uses_model=way)
    assert budget.speeds() == {4: (6.0, 8.0)}
