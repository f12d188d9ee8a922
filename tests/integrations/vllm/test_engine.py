"""What an engine with V1's model runner samples follows the target; `tests/runners` shows what drafts do not change."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm import SamplingParams

from rollout_spec.config import PROPOSER_PATH, RolloutSpecConfig
from rollout_spec.integrations.vllm import engine_v1
from rollout_spec.integrations.vllm.config import check_engine
from rollout_spec.noise import host as noise
from tests.distributions import matches_distribution
from tests.integrations.engines import build, generate, verify_all
from tests.verify.batches import probabilities

pytestmark = pytest.mark.engine

NUM_SAMPLES = 6000
PROMPT = [1, 4, 9]


def sampled_pairs(llm, **parameters):
    params = [
        SamplingParams(max_tokens=3, ignore_eos=True, seed=noise.derive_seed("pairs", i), **parameters)
        for i in range(NUM_SAMPLES)
    ]
    return np.array([list(o.token_ids) for o in generate(llm, params, [PROMPT] * NUM_SAMPLES)])


def follows_target(tokens, reference_model, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> bool:
    """First tokens, and second tokens given the three most frequent first ones, against the analytic softmax."""
    limits = {"top_k": top_k, "top_p": top_p, "min_p": min_p}

    def matches(context, samples):
        with torch.no_grad():
            logits = reference_model(torch.tensor([context])).logits[0, -1].numpy()
        return matches_distribution(samples, probabilities(logits, temperature=temperature, **limits))

    frequent = np.argsort(np.bincount(tokens[:, 0]))[::-1][:3]
    return matches(PROMPT, tokens[:, 0]) and all(
        matches([*PROMPT, int(first)], tokens[tokens[:, 0] == first, 1]) for first in frequent if first in tokens[:, 0]
    )


def build_constant(model, verify):
    options = {"num_speculative_tokens": 2, "drafter": "tests.adversaries.SameToken", "verify": verify}
    return build(model, max_num_seqs=256, **verify_all(**options))


@pytest.fixture(scope="module")
def sampling(tiny_model):
    return build_constant(tiny_model, "sample")


@pytest.fixture(scope="module")
def rejecting(tiny_model):
    return build_constant(tiny_model, "rejection")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("sampling", {"temperature": 0.5, "top_p": 0.9}),
        ("rejecting", {"temperature": 1.0}),
        ("rejecting", {"temperature": 1.2, "top_k": 5, "min_p": 0.05}),
        pytest.param("off", {"temperature": 1.0}, marks=pytest.mark.exhaustive),
        pytest.param("sampling", {"temperature": 1.0}, marks=pytest.mark.exhaustive),
        pytest.param("rejecting", {"temperature": 0.5, "top_p": 0.9}, marks=pytest.mark.exhaustive),
    ],
)
def test_samples_follow_the_target(request, reference_model, name, parameters):
    tokens = sampled_pairs(request.getfixturevalue(name), **parameters)
    assert follows_target(tokens, reference_model, **parameters)


# -- what cannot be tried on a CPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "prefill_context_parallel_size"])
def test_parallelism_that_is_not_supported(name):
    parallel = SimpleNamespace(**{"pipeline_parallel_size": 1, name: 2})
    config = SimpleNamespace(
        model_config=SimpleNamespace(runner_type="generate"), use_v2_model_runner=False, parallel_config=parallel
    )
    with pytest.raises(ValueError, match=f"supports neither .* parallelism: set {name}=1"):
        check_engine(config, RolloutSpecConfig(drafter="history"))


def test_a_worker_without_the_plugin():
    """vLLM loads the model before anything is generated."""
    config = SimpleNamespace(
        additional_config={},
        speculative_config=SimpleNamespace(model=PROPOSER_PATH, method="custom_class", num_speculative_tokens=4),
        use_v2_model_runner=False,
    )
    with pytest.raises(RuntimeError, match="VLLM_PLUGINS"):
        engine_v1.RolloutSpecProposer(config).load_model(None)
