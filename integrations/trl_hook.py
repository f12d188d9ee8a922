"""Speculation in TRL trainers: one callback, `GRPOTrainer(..., callbacks=[RolloutSpecGenerator()])`.

TRL builds its own vLLM engine, in the trainer's constructor, and fixes the engine's arguments. transformers calls
`on_init_end` before that. From then on `vllm.LLM` looks who builds it: an engine that a trainer with this callback
builds for its own model gets our arguments, every other one is left alone. The callback follows the run through what
TRL calls on the engine anyway: `generate` for the rollouts, `reset_prefix_cache` once after every weight
synchronisation. Works for the trainers that build a colocated `vllm.LLM`: GRPO, RLOO, OnlineDPO and their kin.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from rollout_spec.config import CONFIG_KEY, RolloutSpecConfig
from rollout_spec.integrations.sampling import needs_processing
from rollout_spec.integrations.vllm_cpu import plain_weights
from rollout_spec.noise import derive_seed
from rollout_spec.stats import SpeculationStats
from rollout_spec.types import SamplingRows
from rollout_spec.verify.vectorised import scores_matrix

logger = logging.getLogger(__name__)

LOGPROB_TOLERANCE = {"float32": 1e-4}
"""Largest mean |difference| between the engine's log-probabilities and the trainer's, by the engine's dtype."""
HALF_PRECISION_TOLERANCE = 5e-2
"""The same for other dtypes, where kernels that round differently disagree in the second decimal."""
NUM_CHECKED_ROLLOUTS = 8
NUM_CHECKED_TOKENS = 256
"""Tokens of each of them: the trainer's logits of long rollouts would take gigabytes beside the engine's cache."""
ROWS_PER_CHUNK = 64
"""Rows of logits that are scored at once."""
REPORT_NAME = "rollout_spec.json"


class RolloutSpecGenerator(TrainerCallback):
    """Brings speculation into the vLLM engine of a TRL trainer.

    Every rollout gets a seed of its own, derived from the run's seed, the step, the number of the generation and the
    rollout's place in it, so a run can be repeated rollout by rollout, with speculation or without. At the first
    generation the engine's log-probabilities are compared with the trainer's own forward pass; where that cannot be
    done, a warning says why. One object serves one trainer. Metrics reach the trainer's logs as
    `rollout_spec/*`; with each log a report goes to `OUTPUT_DIR/rollout_spec.json`, which `rollout-spec doctor`
    explains.

    Args:
        llm_kwargs: More keyword arguments for the `vllm.LLM` that TRL builds, e.g. `{"dtype": "float32"}`.
        logprob_tolerance: Largest mean absolute difference of log-probabilities at the first generation. None: 1e-4
            for a float32 engine, 5e-2 otherwise. `math.inf` switches the check off.
        **options: Fields of `rollout_spec.RolloutSpecConfig`.

    Attributes:
        llm: The engine, once TRL has built it.
        policy_version: Weight synchronisations so far.
        logprob_error: (mean, max) absolute difference found at the first generation, NaN where nothing could be
            compared, or None before it.

    Raises:
        ValueError, TypeError: an option is unknown or out of range.
    """

    def __init__(
        self,
        *,
        llm_kwargs: Mapping[str, Any] | None = None,
        logprob_tolerance: float | None = None,
        **options: Any,
    ) -> None:
        self.config = RolloutSpecConfig.from_dict(options)
        self.llm: Any = None
        self.policy_version = 0
        self.logprob_error: tuple[float, float] | None = None
        self._llm_kwargs = dict(llm_kwargs or {})
        self._logprob_tolerance = logprob_tolerance
        self._enabled = True
        self._model: Any = None
        self._run_seed = 0
        self._replica = 0  # ranks of one tensor-parallel group generate the same rollouts and share it
        self._step = 0
        self._num_generations = 0  # of all steps, trainings and evaluations: the dice of none are rolled again
        self._engine_generate: Callable[..., Any] = _no_engine
        self._logged: dict[str, Any] = {}
        self._generation_seconds = 0.0
        self._num_tokens = 0  # generated since the last log

    # -- switching ---------------------------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether the engine drafts. May be set between generations; the rollouts do not depend on it."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = bool(enabled)
        if self.llm is not None:
            self._command("set_enabled", self._enabled)

    # -- the trainer's events ----------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Prepare for the engine that the trainer is about to build.

        Raises:
            ValueError: the trainer does not generate with a colocated vLLM engine, or the callback serves another one.
        """
        if self.llm is not None:
            raise ValueError("this RolloutSpecGenerator serves another trainer already: make one for each trainer")
        if not getattr(args, "use_vllm", False):
            raise ValueError("RolloutSpecGenerator needs a trainer that generates with vLLM: set use_vllm=True")
        if getattr(args, "vllm_mode", "colocate") != "colocate":
            raise ValueError(
                'RolloutSpecGenerator works with vllm_mode="colocate". For a server, start it with the flags that '
                "rollout_spec.engine_kwargs() stands for (see the README) and leave this callback out"
            )
        self._model = model
        self._run_seed = args.seed
        self._replica = args.process_index // getattr(args, "vllm_tensor_parallel_size", 1)
        _warn_of_split_groups(args)
        _hook_trainer_log()
        _hook_engines()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises RuntimeError if the trainer's engine was built without us."""
        if self.llm is None:
            raise RuntimeError(
                "the trainer's vLLM engine was not built through this RolloutSpecGenerator, so nothing would be "
                "speculated: pass it in callbacks=[...] when the trainer is made, one new object per trainer"
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Follow the step, which the seeds derive from."""
        self._model = model if model is not None else self._model
        self._step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the report that `rollout-spec doctor` explains to OUTPUT_DIR/rollout_spec.json."""
        if self.llm is None or not state.is_world_process_zero:
            return
        about = {"global_step": state.global_step, "num_processes": args.world_size}
        path = Path(args.output_dir) / REPORT_NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".tmp")
            unfinished.write_text(json.dumps({**self.report(), **about}) + "\n")
            unfinished.replace(path)
        except (OSError, TypeError, ValueError) as error:  # no reason to end a run
            logger.warning("the report for rollout-spec doctor could not be written: %s", error)

    # -- the engine --------------------------------------------------------------------------------------------------

    def build_engine(self, build: Callable[..., None], llm: Any, *args: Any, **kwargs: Any) -> None:
        """Run the constructor of the trainer's `vllm.LLM` with our arguments added, and follow the engine.

        Raises:
            ValueError: the arguments ask for a drafter already.
            RuntimeError: the engine runs without the plugin.
        """
        with plain_weights():
            build(llm, *args, **self._extend(kwargs))
        self._attach(llm)

    def _extend(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The engine's arguments with ours added."""
        ours = self.config.engine_kwargs()
        for source, given in (("the trainer", kwargs), ("llm_kwargs", self._llm_kwargs)):
            if given.get("speculative_config") is not None:
                raise ValueError(
                    f"speculative_config is set by {source} and by RolloutSpecGenerator: remove one of them"
                )
            if CONFIG_KEY in (given.get("additional_config") or {}):
                raise ValueError(f"additional_config[{CONFIG_KEY!r}] is set by {source} and by RolloutSpecGenerator")
        merged = {**kwargs, **self._llm_kwargs, **ours}
        merged["additional_config"] = {
            **(kwargs.get("additional_config") or {}),
            **(self._llm_kwargs.get("additional_config") or {}),
            **ours["additional_config"],
        }
        return merged

    def _attach(self, llm: Any) -> None:
        """Follow what the trainer calls on the engine.

        Raises:
            RuntimeError: the engine runs without the plugin.
        """
        self.llm = llm
        try:
            self._logged = self.stats()
        except AttributeError as error:
            self.llm = None
            raise RuntimeError(
                "the engine's worker did not load the rollout_spec plugin: reinstall rollout-spec so that vLLM finds "
                "its entry point, and check that the VLLM_PLUGINS environment variable, if set, contains rollout_spec"
            ) from error
        if self.config.speculation:
            self._command("set_enabled", self._enabled)
        self._engine_generate = llm.generate
        self._default_params = llm.get_default_sampling_params
        reset_prefix_cache, chat = llm.reset_prefix_cache, llm.chat

        def on_reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
            self.policy_version += 1
            if self.config.speculation:
                self._command("begin_policy_version", self.policy_version)
            return reset_prefix_cache(*args, **kwargs)

        def on_chat(messages: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
            conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
            return self._follow(functools.partial(chat, messages), conversations, sampling_params, args, kwargs)

        llm.generate = self._on_generate
        llm.chat = on_chat
        llm.reset_prefix_cache = on_reset_prefix_cache

    def _on_generate(self, prompts: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(self.generate, prompts)
        return self._follow(run, _as_list(prompts), sampling_params, args, kwargs)

    def _follow(
        self, run: Callable[..., Any], prompts: Sequence[Any], sampling_params: Any, args: Any, kwargs: Any
    ) -> Any:
        """Generate with seeds, count, and compare log-probabilities the first time."""
        params = self._with_seeds(prompts, sampling_params)
        is_first = self.logprob_error is None
        unscored = self._ask_for_logprobs(params) if is_first else []
        started = time.perf_counter()
        outputs = run(params, *args, **kwargs)
        self._generation_seconds += time.perf_counter() - started
        self._num_tokens += sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        if is_first:
            self._check_logprobs(outputs, params)
        for ordinal in unscored:
            for completion in outputs[ordinal].outputs:
                completion.logprobs = completion.cumulative_logprob = None
        return outputs

    def generate(self, prompts: Any, sampling_params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Run the engine; a subclass may generate in other ways. `sampling_params` holds one per prompt, seeded."""
        return self._engine_generate(prompts, sampling_params, *args, **kwargs)

    def _with_seeds(self, prompts: Sequence[Any], sampling_params: Any) -> list[Any]:
        """One `SamplingParams` per prompt, with a seed of its own where it has none.

        Raises:
            ValueError: two requests with the same prompt have the same seed, so one would be a copy of the other.
        """
        if sampling_params is None:
            sampling_params = self._default_params()
        if not isinstance(sampling_params, Sequence):
            sampling_params = [sampling_params] * len(prompts)
        seen: set[tuple[Any, int]] = set()
        seeded = []
        for ordinal, params in enumerate(sampling_params):
            params = params.clone()
            if params.seed is None:
                numbers = (self._step, self._replica, self._num_generations, ordinal)
                params.seed = derive_seed(self._run_seed, *numbers)
            elif ordinal < len(prompts):
                request = _prompt_key(prompts[ordinal]), params.seed
                if request in seen:
                    raise ValueError(
                        f"SamplingParams.seed is {params.seed} for several requests with the same prompt, whose "
                        "rollouts would be copies of each other: leave the seed out (of generation_kwargs, too), and "
                        "one per rollout is derived from args.seed"
                    )
                seen.add(request)
            seeded.append(params)
        self._num_generations += 1
        return seeded

    def _command(self, name: str, *args: Any) -> Any:
        return self.llm.collective_rpc("rollout_spec", args=(name, *args))[0]

    # -- what the run should know ------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """The engine's `SpeculationStats` as a dict, and `drafter_bytes`."""
        result: dict[str, Any] = self._command("stats")
        return result

    def report(self) -> dict[str, Any]:
        """What `rollout-spec doctor` explains; see `rollout_spec.integrations.commands.report`."""
        result: dict[str, Any] = self._command("report")
        return result

    def take_metrics(self) -> dict[str, float]:
        """`rollout_spec/*` metrics since the last call; empty when nothing was generated."""
        if self.llm is None or self._generation_seconds == 0:
            return {}
        now = self.stats()
        new = SpeculationStats.between(self._logged, now)
        self._logged = now
        metrics = {
            "generation_seconds": self._generation_seconds,
            "tokens": self._num_tokens,
            "mean_acceptance_length": new.mean_acceptance_length,
            "acceptance_rate": new.acceptance_rate,
            "draft_tokens": new.draft_tokens,
            "accepted_tokens": new.accepted_tokens,
            "tokens_per_step": new.tokens_per_step,
            "draft_seconds": new.draft_seconds,
            "forward_seconds": new.forward_seconds,
            "verify_seconds": new.verify_seconds,
            "step_seconds": new.step_seconds,
            "drafter_errors": new.drafter_errors,
            "drafter_mbytes": now["drafter_bytes"] / 1e6,
            "policy_version": self.policy_version,
        }
        self._generation_seconds, self._num_tokens = 0.0, 0
        return {f"rollout_spec/{name}": float(value) for name, value in metrics.items()}

    def _ask_for_logprobs(self, params: Sequence[Any]) -> list[int]:
        """Let the engine score the rollouts that are checked, and return which of them the trainer wants no scores of.

        RLOO, OnlineDPO and others ask for none.
        """
        unscored = [i for i, p in enumerate(params[:NUM_CHECKED_ROLLOUTS]) if p.logprobs is None]
        for i in unscored:
            params[i].logprobs = 0
        return unscored

    def _check_logprobs(self, outputs: Sequence[Any], params: Sequence[Any]) -> None:
        """Compare the engine's log-probabilities with the trainer's forward pass, on a few rollouts.

        Raises:
            RuntimeError: they differ by more than the tolerance, or are missing or not finite.
        """
        engine = self.llm.llm_engine.vllm_config.model_config
        dtype, mode = str(engine.dtype).removeprefix("torch."), str(engine.logprobs_mode)
        tolerance = self._logprob_tolerance
        if tolerance is None:
            tolerance = LOGPROB_TOLERANCE.get(dtype, HALF_PRECISION_TOLERANCE)
        if math.isinf(tolerance):
            self.logprob_error = (math.nan, math.nan)
            return
        checked = [
            (output, p)
            for output, p in zip(outputs[:NUM_CHECKED_ROLLOUTS], params, strict=False)
            if mode == "raw_logprobs" or (mode == "processed_logprobs" and not _changes_logits(p))
        ]
        if not checked:
            self.logprob_error = (math.nan, math.nan)
            logger.warning(
                "the engine's log-probabilities were not compared with the trainer's: %s",
                "penalties, masks or grammars change them, which the trainer's forward pass knows nothing of"
                if mode == "processed_logprobs"
                else f"logprobs_mode={mode!r} gives none",
            )
            return
        errors = [logprob_errors(self._model, output, p, mode) for output, p in checked if output.outputs[0].token_ids]
        if not errors:
            return
        error = torch.cat(errors)
        self.logprob_error = (float(error.mean()), float(error.max()))
        if not self.logprob_error[0] <= tolerance:
            trainer_dtype = str(self._model.dtype).removeprefix("torch.")
            remedy = (
                f"The engine runs in {dtype} and the trainer in {trainer_dtype}: make them equal, e.g. "
                f'RolloutSpecGenerator(llm_kwargs={{"dtype": "{trainer_dtype}"}})'
                if dtype != trainer_dtype
                else f"Both run in {dtype}, so look for other weights (a synchronisation that left some out, "
                "quantisation) or another model implementation in the engine"
            )
            raise RuntimeError(
                f"the engine's log-probabilities differ from the trainer's by {self.logprob_error[0]:.2g} on average "
                f"(at most {self.logprob_error[1]:.2g}; tolerance {tolerance:.2g}), so importance ratios would be "
                f"wrong. {remedy}; or set logprob_tolerance"
            )


def _no_engine(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("RolloutSpecGenerator has no engine yet: pass it to a trainer in callbacks=[...]")


def _as_list(prompts: Any) -> Sequence[Any]:
    """Prompts as `vllm.LLM.generate` takes them: one, or a sequence."""
    is_one = isinstance(prompts, (str, Mapping)) or (prompts and isinstance(prompts[0], int))
    return [prompts] if is_one else prompts


def _prompt_key(prompt: Any) -> str:
    """Equal for requests with equal texts."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt", prompt))
    return repr(prompt)


def _changes_logits(params: Any) -> bool:
    """Whether the engine changes a request's logits in ways that the trainer's forward pass cannot repeat."""
    return needs_processing(params) or bool(params.structured_outputs)


def _hook_engines() -> None:
    """Let `vllm.LLM` ask who builds it, once per process."""
    import vllm

    original = vllm.LLM.__init__
    if hasattr(original, "rollout_spec"):
        return

    @functools.wraps(original)
    def init(llm: Any, *args: Any, **kwargs: Any) -> None:
        trainer = _trainer_under_construction()
        callbacks = trainer.callback_handler.callbacks if trainer is not None else ()
        generators = [callback for callback in callbacks if isinstance(callback, RolloutSpecGenerator)]
        model = kwargs.get("model", args[0] if args else None)
        if trainer is None or not generators or model != trainer.model.name_or_path:
            original(llm, *args, **kwargs)
        elif len(generators) > 1:
            raise ValueError(f"a trainer takes one RolloutSpecGenerator and has {len(generators)}: remove the others")
        else:
            generators[0].build_engine(original, llm, *args, **kwargs)

    init.rollout_spec = True  # type: ignore[attr-defined]
    vllm.LLM.__init__ = init


def _trainer_under_construction() -> Trainer | None:
    """The trainer in whose constructor this is called, None elsewhere.

    The call stack says so at any time. A hook that waits for the next engine would outlive a constructor that fails.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(owner, Trainer) and hasattr(owner, "callback_handler"):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _warn_of_split_groups(args: Any) -> None:
    group = getattr(args, "num_generations", None)
    if group is None:
        return
    rollouts = args.per_device_train_batch_size * (getattr(args, "steps_per_generation", None) or 1)
    if rollouts % group:
        warnings.warn(
            f"each engine generates {rollouts} rollouts per step, which is no multiple of num_generations={group}: "
            "groups are split between engines, and siblings in different engines cannot help each other",
            stacklevel=2,
        )


def _hook_trainer_log() -> None:
    """Let `Trainer.log` add our metrics before any reporter sees the logs; callbacks' `on_log` comes too late."""
    original = Trainer.log
    if hasattr(original, "rollout_spec"):
        return

    @functools.wraps(original)
    def log(trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, RolloutSpecGenerator):
                prefix = "" if trainer.model.training else "eval_"
                logs.update({prefix + name: value for name, value in callback.take_metrics().items()})
        original(trainer, logs, *args, **kwargs)

    log.rollout_spec = True  # type: ignore[attr-defined]
    Trainer.log = log


@torch.no_grad()
def logprob_errors(model: Any, output: Any, params: Any, mode: str = "processed_logprobs") -> torch.Tensor:
    """|engine - trainer| for the first NUM_CHECKED_TOKENS tokens of one rollout, float32 [T]; NaN where one is missing.

    Args:
        model: The trainer's, a causal language model of transformers.
        output: vLLM's `RequestOutput`.
        params: Its `SamplingParams`.
        mode: The engine's `logprobs_mode`: "processed_logprobs" or "raw_logprobs".
    """
    completion = output.outputs[0]
    count = min(len(completion.token_ids), NUM_CHECKED_TOKENS)
    if completion.logprobs is None:
        return torch.full((count,), math.nan)
    prompt = list(output.prompt_token_ids)
    tokens = list(completion.token_ids[:count])
    was_training = model.training
    model.eval()  # without dropout
    input_ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
    forward = (model.get_base_model() if hasattr(model, "get_base_model") else model).forward  # of a PEFT model
    keeps = {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(forward).parameters else {}
    logits = model(input_ids, **keeps).logits[0, -count:]  # not those of the prompt
    model.train(was_training)
    expected = [
        _score(logits[start : start + ROWS_PER_CHUNK].float(), tokens[start : start + ROWS_PER_CHUNK], params, mode)
        for start in range(0, count, ROWS_PER_CHUNK)
    ]
    scored = zip(completion.logprobs[:count], tokens, strict=True)
    return (torch.tensor([entry[token].logprob for entry, token in scored]) - torch.cat(expected)).abs()


def _score(logits: torch.Tensor, tokens: list[int], params: Any, mode: str) -> torch.Tensor:
    """Log-probabilities of one token per row of logits, float32 [T], on the CPU."""
    count = len(tokens)

    def repeated(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=logits.device)

    if mode == "processed_logprobs":
        rows = SamplingRows(
            temperature=repeated(params.temperature, torch.float32),
            seeds=repeated(0, torch.int64),
            positions=repeated(0, torch.int64),
            top_k=repeated(params.top_k, torch.int64) if params.top_k > 0 else None,
            top_p=repeated(params.top_p, torch.float32) if params.top_p < 1 else None,
            min_p=repeated(params.min_p, torch.float32) if params.min_p > 0 else None,
        )
        logits = scores_matrix(logits, rows, torch.zeros_like(rows.seeds))
    chosen = torch.tensor(tokens, device=logits.device)
    return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].cpu()
