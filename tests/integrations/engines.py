"""Engines on the tiny model, and what it means that two of them give the same rollouts."""

import atexit
import gc
import os

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

import vllm
from vllm import LLM, SamplingParams

from rollout_spec import engine_kwargs
from rollout_spec.budget import Budget
from rollout_spec.drafters.registry import HISTORY_DRAFTER
from rollout_spec.features import SIGNATURE_BITS, TOP_TOKENS, decoded_probabilities, unpack
from rollout_spec.integrations.vllm import compat
from rollout_spec.noise import host as noise
from rollout_spec.schedule import _Size
from rollout_spec.verify.reference import pack_signatures
from tests.conftest import VOCAB_SIZE

GAP = 1e-3
"""The engine's logits vary by about 1e-6 with the batch: a token may differ only where the choice was this close."""


IS_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
"""Whether engines in this process have vLLM's V2 model runner."""

V2_OF_0_31 = IS_V2 and not compat.is_v2_old()
"""Whether V2 cuts our drafts on the device, lets a model draft beside history, and has our noise without us."""

MIXES_MASKS = not IS_V2 and vllm.__version_tuple__[:2] < (0, 31)
"""V1 mixes up requests' `allowed_token_ids` before 0.31, also without drafts."""
RESIDENT = {"drafter_options": {"max_resident_tokens": 4096}}
"""History on the device takes little memory."""
DEVICE = {"drafter": "device", "sub_steps": 2, **RESIDENT}
"""Where nothing but decoding happens, each step has two forward passes."""
OF_RUNNER = DEVICE if IS_V2 else {}
"""The drafter of this process's model runner."""
PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""For `mixed_params`: nothing is truncated."""
LAST = SamplingParams(max_tokens=2, seed=1, extra_args={"rollout_spec": {"keep_in_history": False}})
"""A request with which the others' end is noticed, which is a step later."""

own_processes = pytest.mark.skipif(
    vllm.__version_tuple__[:2] == (0, 24),
    reason="vLLM 0.24's CPU build starts no engine with drafts, except in this process (see tests/conftest.py)",
)
"""For engines whose workers are processes of their own."""


ENGINES = []
"""Keeps every engine alive: shutting one down destroys the process-wide groups that the others use."""

# As the process exits, vLLM shuts each of them down and collects garbage twice for it: minutes where there are many.
atexit.register(setattr, gc, "collect", lambda generation=2: 0)


def build(model, *, max_num_seqs=32, **kwargs):
    llm = LLM(
        model=str(model),
        enforce_eager=True,
        dtype="float32",
        max_num_seqs=max_num_seqs,
        **{"max_model_len": 128, "num_gpu_blocks_override": 300, "logprobs_mode": "processed_logprobs", **kwargs},
    )
    ENGINES.append(llm)
    return llm


def verify_all(**options):
    """Arguments of an engine that verifies every draft, however bad it is."""
    return engine_kwargs(budget=False, **options)


def set_step_times(monkeypatch):
    """Let engines learn the times of a GPU, where drafts pay, and not those of this CPU and of what else it does."""
    observe = Budget.observe_step
    monkeypatch.setattr(_Size, "usual_seconds", lambda size, k: 0.01)

    def as_on_a_gpu(budget, num_tokens, seconds, **options):
        observe(budget, num_tokens, 0.01 + 1e-6 * num_tokens, **{**options, "draft_seconds": 1e-4})

    monkeypatch.setattr(Budget, "observe_step", as_on_a_gpu)


def every_draft(k, **options):
    """Options of an engine in V1 whose drafter ends no draft early, however likely it is to be rejected."""
    arguments = {"shared": True, "max_draft_tokens": k, "min_survival": 0.0, **options}
    return {"num_speculative_tokens": k, "drafter": HISTORY_DRAFTER, "drafter_options": arguments}


def runner_of(llm):
    return llm.llm_engine.model_executor.driver_worker.model_runner


def session_of(llm):
    """What drafts from history in an engine, on the host or on the device; None where nothing does."""
    return runner_of(llm).rollout_spec.session


def rollouts_of(llm):
    """[(prompt, tokens, their features)] of the ended rollouts that our drafter keeps, oldest first."""
    drafter = session_of(llm).drafter
    for _ in range(1 + IS_V2):  # from the device texts arrive another step later
        generate(llm, [LAST])
    drafter.check_integrity()
    if IS_V2:
        drafter.rollouts.take_arrived(wait=True)
        rollouts = [archived.read() for archived in drafter.rollouts.by_age]
        return [(rollout.context, rollout.tokens, rollout.features) for rollout in rollouts]
    store = drafter._store
    return [
        (store.text(request.prompt.documents[-1]), *store.read(request.document)) for request in drafter.rollouts.by_age
    ]


def kept_by(llm):
    """Tokens of each ended rollout that the drafter has kept, or, if it is an adversary, was told of; oldest first."""
    if hasattr(session_of(llm).drafter, "finished"):
        generate(llm, [LAST])
        return [tuple(tokens) for tokens in session_of(llm).drafter.finished]
    return [tuple(tokens.tolist()) for _, tokens, _ in rollouts_of(llm)]


def check_features(rollouts, reference_model, temperature):
    """What a drafter was told of each token is what a forward pass of the same model sees, or nothing.

    Args:
        rollouts: (prompt, tokens, features), all sampled at one temperature.

    Returns:
        (tokens that were checked, tokens of which it was told nothing).
    """
    num_checked = num_wrong_bits = num_unknown = 0
    for prompt, tokens, features in rollouts:
        with torch.no_grad():
            found = reference_model(torch.from_numpy(np.concatenate((prompt, tokens)))[None], output_hidden_states=True)
        rows = slice(prompt.size - 1, prompt.size + tokens.size - 1)
        packed = pack_signatures(found.hidden_states[-1][0, rows])
        logprobs = (found.logits[0, rows] / temperature).log_softmax(-1).numpy()
        known = np.flatnonzero(features.any(1))
        logprobs, (signatures, ids, codes) = logprobs[known], unpack(features[known])
        different = packed.numpy().view(np.uint64)[known] ^ signatures
        num_wrong_bits += sum(int(word).bit_count() for word in different.ravel())  # rounding decides some
        top = -np.sort(-logprobs, 1)[:, :TOP_TOKENS]
        assert np.take_along_axis(logprobs, ids, 1) == pytest.approx(top, abs=1e-4)
        # The vocabulary is one chunk, whose sum is exact.
        assert np.log(decoded_probabilities()[codes]) == pytest.approx(np.maximum(top, -15.875), abs=0.04)
        num_checked += known.size
        num_unknown += tokens.size - known.size
    assert num_wrong_bits <= 1e-3 * SIGNATURE_BITS * num_checked
    return num_checked, num_unknown


def switching_off_and_on(llm, params, periods, prompts=None):
    """Outputs of `generate`, with speculation switched off and on again during these ranges of steps."""
    engine, outputs, step, prompts = llm.llm_engine, {}, 0, prompts or prompts_of(params)
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, p)
    while engine.has_unfinished_requests():
        is_on = not any(step in period for period in periods)
        llm.collective_rpc("rollout_spec", args=("set_enabled", is_on))
        for output in engine.step():
            outputs[output.request_id] = output.outputs[0]
        step += 1
    llm.collective_rpc("rollout_spec", args=("set_enabled", True))
    return [outputs[str(i)] for i in range(len(prompts))]


def history_of(llm):
    return llm.collective_rpc("rollout_spec", args=("history",))[0]


def stats_of(llm):
    return llm.collective_rpc("rollout_spec", args=("stats",))[0]


def generate(llm, params, prompts=None):
    prompts = prompts or prompts_of(params)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def prompts_of(params):
    return [[1, 4 + i % 3, 9] for i in range(len(params))]


def assert_same(ours, plain, params, reference_model, prompts=None):
    """Same tokens and log-probabilities; a difference only where two perturbed logits were close."""
    for prompt, p, a, b in zip(prompts or prompts_of(params), params, ours, plain, strict=True):
        a_ids, b_ids = list(a.token_ids), list(b.token_ids)
        at = next((i for i, (x, y) in enumerate(zip(a_ids, b_ids, strict=False)) if x != y), None)
        if at is None:
            assert a_ids == b_ids
            at = len(a_ids)
        else:
            with torch.no_grad():
                logits = reference_model(torch.tensor([prompt + a_ids[:at]])).logits[0, -1].numpy()
            if p.temperature > 0:
                position = len(prompt) + at - 1
                logits = logits / p.temperature + noise.gumbel(p.seed, position, np.arange(VOCAB_SIZE))
            best = np.sort(logits)[-2:]
            assert best[1] - best[0] < GAP, f"token {at} differs by more than rounding"
        assert_same_scores(a.logprobs[:at], b.logprobs[:at])


def assert_same_scores(ours, theirs):
    """Ranks and log-probabilities of each token's candidates; a prompt's first token has none."""
    for x, y in zip(ours, theirs, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.keys() == y.keys()
            assert [v.rank for v in x.values()] == [v.rank for v in y.values()]
            assert [v.logprob for v in x.values()] == pytest.approx([v.logprob for v in y.values()], abs=1e-4)


def mixed_params(count, seed=0, **fixed):
    rng = np.random.default_rng(seed)
    return [
        SamplingParams(
            **{
                "temperature": float(rng.choice([0.0, 0.6, 1.0, 1.3])),
                "top_p": float(rng.choice([1.0, 0.8])),
                "top_k": int(rng.choice([0, 6])),
                "min_p": float(rng.choice([0.0, 0.05])),
                "seed": noise.derive_seed("engine", seed, i),
                "max_tokens": int(rng.integers(1, 60)),
                "logprobs": 1,
                **fixed,
            }
        )
        for i in range(count)
    ]


def count_preemptions(llm):
    """A list that grows by each preempted request's id."""
    preempted = []
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original = scheduler._preempt_request

    def preempt(request, *args, **kwargs):
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return preempted


FEW_BLOCKS = {"block_size": 32, "num_gpu_blocks_override": 7, "enable_prefix_caching": False}
"""Of an engine that preempts requests where six run at once."""


def two_busy_rounds(llm):
    """Outputs, with preempted and stopped requests among them."""
    preempted = count_preemptions(llm)
    params = [
        *mixed_params(8, 1, max_tokens=40, ignore_eos=True),
        *mixed_params(3, 2, max_tokens=30, stop=["w7", "w3"], logprobs=None),
    ]
    outputs = []
    for _ in range(2):
        outputs += generate(llm, params)
    assert preempted
    return outputs


FIRST_PROMPTS = [[1, 4 + i, 9, 3, 4, 5, 6, 7, 8, 3, 5, 7, 9, 4, 6, 8, 3, 6, 9] for i in range(3)]
"""Of conversations."""
