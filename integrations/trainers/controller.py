"""What any trainer needs around a vLLM engine that speculates: seeds, policy versions, metrics, reports, a check.

Use with any training loop::

    controller = EngineController(RolloutSpecConfig())
    controller.begin_run(seed=0, model=policy)
    llm = vllm.LLM(**controller.engine_kwargs({"model": "my-policy"}))
    controller.attach(llm)
    for step in range(num_steps):
        controller.begin_step(step)
        outputs = llm.generate(prompts, sampling_params)
        ...  # update the policy, load its weights into the engine
        llm.reset_prefix_cache()
        log(controller.take_metrics())

`attach` wraps the engine's `generate` and `chat`, to give requests seeds and to count, and `reset_prefix_cache`, which
trainers call after they have loaded new weights. `rollout_spec.integrations.trainers.trl` does all this for TRL.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_spec import __version__, checks
from rollout_spec.config import CONFIG_KEY, RolloutSpecConfig
from rollout_spec.integrations.trainers.logprob_check import LogprobCheck
from rollout_spec.integrations.trainers.server import ServedEngine, ServerError
from rollout_spec.integrations.vllm import step_sizes
from rollout_spec.integrations.vllm.configuration import config_of, has_model_drafter
from rollout_spec.integrations.vllm.cpu_fixes import plain_weights
from rollout_spec.integrations.vllm.log import describe_engine
from rollout_spec.integrations.vllm.request_options import without_history
from rollout_spec.noise.host import derive_seed
from rollout_spec.stats import SpeculationStats

logger = logging.getLogger(__name__)


class EngineController:
    """Seeds, counts and checks the generations of one trainer's vLLM engine.

    Every rollout gets a seed of its own, derived from the run's seed, the training's number, the step, the generation's
    number in it, the engine's number and the rollout's place. So a run can be repeated and resumed rollout by rollout,
    with speculation or without. At the first generation the engine's log-probabilities are compared with the trainer's
    own forward pass; where that cannot be done, a warning says why. Under FSDP and ZeRO-3 all ranks must run that
    pass, so where several ranks train together each calls `generate` the first time that one does, with an empty list
    if it has no prompts.

    Args:
        config: The engine's settings.
        llm_kwargs: More keyword arguments for the `vllm.LLM` that the trainer builds, e.g. `{"dtype": "float32"}`.
        logprob_tolerance: See `LogprobCheck`.

    Raises:
        ValueError, TypeError: an argument is out of range or of the wrong type.

    Attributes:
        config: The engine's settings.
        llm: The engine, once it is attached; a `ServedEngine` once `connect` has been called.
        model: The trainer's model, for the comparison of log-probabilities; set by `begin_run` and `begin_step`.
        policy_version: Weight synchronisations so far, of unchanged weights, too. `stats()` and the metrics have the
            engine's own count of versions.
        evaluating: Set it to True while an evaluation is generated: its rollouts are drafted for, but do not stay in
            the history.
    """

    def __init__(
        self,
        config: RolloutSpecConfig,
        *,
        llm_kwargs: Mapping[str, Any] | None = None,
        logprob_tolerance: float | None = None,
    ) -> None:
        if not isinstance(config, RolloutSpecConfig):
            raise TypeError(f"config must be a RolloutSpecConfig, got {checks.shown(config)}")
        if llm_kwargs is not None and not (isinstance(llm_kwargs, Mapping) and all(type(k) is str for k in llm_kwargs)):
            raise TypeError(f"llm_kwargs must be a dict of keyword arguments, got {checks.shown(llm_kwargs)}")
        self.config = config
        self.llm: Any = None
        self.model: Any = None
        self.policy_version = 0
        self.evaluating = False
        self._llm_kwargs = dict(llm_kwargs or {})
        self._logprob_check = LogprobCheck(logprob_tolerance)
        self._enabled = True
        self._run_seed = 0
        self._replica = 0
        self._step = 0
        self._autocast_dtype: str | None = None
        self._num_trainings = 0  # so that seeds differ where one trainer trains twice
        self._num_generations = 0  # since the step began, evaluations included
        self._engine_generate: Callable[..., Any] = self._refuse_to_generate
        self._seen: dict[str, Any] = {}  # the engine's counters when the present interval began
        self._interval = _Interval()
        self._is_evaluation = False  # the present interval
        self._untaken: dict[bool, _Interval] = {}  # intervals since the last log of each kind, added up
        self._served: dict[str, Any] = {}  # a server's settings
        self._is_unanswered = False  # the last question to a server, which was said in the log

    # -- what the trainer says ---------------------------------------------------------------------------------------

    def begin_run(self, *, seed: int, replica: int = 0, model: Any = None, autocast_dtype: str | None = None) -> None:
        """Take the run's settings, before the engine is built.

        Args:
            seed: The run's, from which the rollouts' seeds derive.
            replica: Number of the engine among those that generate different rollouts; the ranks of one
                tensor-parallel group share it.
            model: The trainer's, a causal language model of transformers. None: log-probabilities are not compared.
            autocast_dtype: What the trainer's forward pass computes in, e.g. "bfloat16"; None: the model's dtype.

        Raises:
            ValueError, TypeError: `seed` or `replica` is no int, or out of range.
        """
        self._run_seed = checks.integer("seed", seed)
        self._replica = checks.integer("replica", replica, 0)
        self.model = model
        self._autocast_dtype = autocast_dtype

    def begin_training(self) -> None:
        """Begin a training: call it once per `train()` of the trainer. A resumed run counts from 1 again."""
        self._num_trainings += 1
        self._num_generations = 0

    def begin_step(self, step: int, model: Any = None) -> None:
        """Begin a training step. Seeds derive from its number; `model`, if given, replaces that of `begin_run`."""
        self._step, self._num_generations = checks.integer("step", step, 0), 0
        self.model = model if model is not None else self.model

    def begin_policy_version(self) -> None:
        """Tell the engine that it may have new weights. Once attached, `llm.reset_prefix_cache` calls this.

        The engine's next step begins a policy version if the model's parameters have changed; some trainers load the
        same ones again. It looks by itself where weights come through vLLM's ways
        (`rollout_spec.integrations.vllm.weights`). For new weights that are not in the parameters,
        `llm.collective_rpc("rollout_spec", args=("begin_policy_version", 1))` begins a version in any case.
        """
        self.policy_version += 1
        self._command("begin_policy_version")

    @property
    def enabled(self) -> bool:
        """Whether the engine drafts. May be set between generations; the rollouts do not depend on it.

        Where the drafter has raised, setting it to True changes nothing, and a warning says so.
        """
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        enabled = checks.switch("enabled", enabled)
        if enabled and self.llm is not None and self.stats()["drafter_errors"]:
            logger.warning("speculation stays off: the drafter has raised, see the engine's log")
            return
        self._enabled = enabled
        if self.llm is not None:
            self._command("set_enabled", self._enabled)

    # -- the engine --------------------------------------------------------------------------------------------------

    def engine_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The trainer's keyword arguments for `vllm.LLM`, with `llm_kwargs` and ours added.

        `max_num_batched_tokens` of the trainer, but not of `llm_kwargs`, is raised where it leaves no room for drafts.

        Raises:
            ValueError: the trainer or `llm_kwargs` sets `speculative_config` or our key of `additional_config`, or vLLM
                takes no argument of a name in `llm_kwargs`.
        """
        _check_llm_kwargs(self._llm_kwargs)
        ours = self.config.engine_kwargs()
        name = type(self).__name__
        for source, given in (("the trainer", kwargs), ("llm_kwargs", self._llm_kwargs)):
            if given.get("speculative_config") is not None:
                raise ValueError(
                    f"speculative_config is set by {source} and by {name}: give that of a drafter with a model to "
                    f"{name} alone, and leave out any other"
                )
            if CONFIG_KEY in (given.get("additional_config") or {}):
                raise ValueError(f"additional_config[{CONFIG_KEY!r}] is set by {source} and by {name}")
        merged = {**kwargs, **self._llm_kwargs, **ours}
        if (
            self.config.speculation
            and kwargs.get("max_num_batched_tokens")
            and not self._llm_kwargs.get("max_num_batched_tokens")
        ):
            merged["max_num_batched_tokens"] = step_sizes.max_num_batched_tokens(
                kwargs["max_num_batched_tokens"], merged.get("max_num_seqs"), self.config.max_draft_tokens
            )
        merged["additional_config"] = {
            **(kwargs.get("additional_config") or {}),
            **(self._llm_kwargs.get("additional_config") or {}),
            **ours["additional_config"],
        }
        return merged

    def build_engine(self, build: Callable[..., None], llm: Any, *args: Any, **kwargs: Any) -> None:
        """Run `build`, the constructor of the trainer's `vllm.LLM`, with `engine_kwargs`, and attach the engine.

        Raises:
            ValueError: as `engine_kwargs`.
            RuntimeError: as `attach`.
        """
        with plain_weights():
            build(llm, *args, **self.engine_kwargs(kwargs))
        self.attach(llm)

    def attach(self, llm: Any) -> None:
        """Wrap `generate`, `chat` and `reset_prefix_cache` of an engine that was built with `engine_kwargs`.

        Raises:
            RuntimeError: the engine runs without the plugin.
        """
        self.llm = llm
        try:
            self._seen = self.stats()
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
            self.begin_policy_version()
            return reset_prefix_cache(*args, **kwargs)

        def on_chat(messages: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
            conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
            return self._follow(functools.partial(chat, messages), conversations, sampling_params, args, kwargs)

        llm.generate = self._on_generate
        llm.chat = on_chat
        llm.reset_prefix_cache = on_reset_prefix_cache

    def connect(
        self, base_url: str, *, model: str, timeout: float = 240.0, options: Mapping[str, Any] | None = None
    ) -> None:
        """Follow a vLLM server, for metrics, reports, `enabled` and policy versions. Its requests are not touched.

        Metrics and reports that it does not answer for later are left out, with a warning.

        Args:
            base_url: The server's, such as "http://localhost:8000".
            model: The model that it serves.
            timeout: Seconds to wait for it.
            options: Fields of `RolloutSpecConfig` that it must have been started with.

        Raises:
            ValueError, TypeError: `base_url` is no URL, or `timeout` no number.
            TimeoutError: the server does not answer.
            RuntimeError: it runs without rollout_spec or without its development mode, with other settings, or with a
                drafter that has raised. The message has the command that starts it.
        """
        timeout = checks.number("timeout", timeout, lambda seconds: seconds >= 0, "a number from 0 on")
        llm = ServedEngine(base_url, self.config, model)
        llm.wait(timeout)
        try:
            served = llm.collective_rpc("rollout_spec", args=("config",))[0]
            self._seen = llm.collective_rpc("rollout_spec", args=("stats",))[0]
        except ServerError as error:
            raise RuntimeError(f"{error}. {llm.how_to_start()}") from error
        ours = self.config.to_dict()
        wanted = {name: ours[name] for name in (*(options or {}), "speculation") if ours[name] is not None}
        different = [name for name, value in wanted.items() if served.get(name) != json.loads(json.dumps(value))]
        if different:
            settings = ", ".join(f"{name}={served.get(name)!r} and not {wanted[name]!r}" for name in different)
            raise RuntimeError(f"the vLLM server at {base_url} was started with {settings}. {llm.how_to_start()}")
        if self._seen["drafter_errors"]:
            raise RuntimeError(
                f"the drafter of the vLLM server at {base_url} has raised, and stays off: its log has the cause. "
                f"{llm.how_to_start()}"
            )
        self.llm, self._served = llm, served
        if self.config.speculation:
            self._command("set_enabled", self._enabled)

    def _on_generate(self, prompts: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(self.generate, prompts)
        return self._follow(run, _as_list(prompts), sampling_params, args, kwargs)

    def _follow(
        self, run: Callable[..., Any], prompts: Sequence[Any], sampling_params: Any, args: Any, kwargs: Any
    ) -> Any:
        """Give each request a seed, generate, count, and compare log-probabilities the first time."""
        self.begin_generation()
        params = self._with_seeds(prompts, sampling_params)
        is_first = self._logprob_check.error is None
        unscored = self._logprob_check.ask_for_logprobs(params) if is_first else []
        started = time.perf_counter()
        outputs = run(params, *args, **kwargs)
        self._interval.seconds += time.perf_counter() - started
        self._interval.tokens += sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        if is_first:
            engine_config = self.llm.llm_engine.vllm_config.model_config
            self._logprob_check.compare(
                self.model, engine_config, prompts, outputs, params, autocast_dtype=self._autocast_dtype
            )
        for ordinal in unscored:
            for completion in outputs[ordinal].outputs:
                completion.logprobs = completion.cumulative_logprob = None
        return outputs

    def generate(self, prompts: Any, sampling_params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Run the engine; a subclass may generate in other ways. `sampling_params` holds one per prompt, seeded."""
        return self._engine_generate(prompts, sampling_params, *args, **kwargs)

    def _refuse_to_generate(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{type(self).__name__} has no engine yet: attach one, in TRL by passing it to a trainer in callbacks=[...]"
        )

    def is_evaluating(self) -> bool:
        """Whether an evaluation is generated; a trainer's hook may know by itself."""
        return self.evaluating

    def _with_seeds(self, prompts: Sequence[Any], sampling_params: Any) -> list[Any]:
        """One `SamplingParams` per prompt, with a seed of its own where it has none. Evaluations leave no history.

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
            if self.is_evaluating():
                params.extra_args = without_history(params.extra_args)
            if params.seed is None:
                numbers = (self._num_trainings, self._step, self._replica, self._num_generations, ordinal)
                params.seed = derive_seed(self._run_seed, *numbers)
            elif ordinal < len(prompts):
                request = _prompt_key(prompts[ordinal]), params.seed
                if request in seen:
                    raise ValueError(
                        f"SamplingParams.seed is {params.seed} for several requests with the same prompt, whose "
                        "rollouts would be copies of each other: leave the seed out (in TRL, of generation_kwargs, "
                        "too), and one per rollout is derived from the run's seed"
                    )
                seen.add(request)
            seeded.append(params)
        self._num_generations += 1
        return seeded

    def _command(self, name: str, *args: Any) -> Any:
        return self.llm.collective_rpc("rollout_spec", args=(name, *args))[0]

    # -- what the run should know ------------------------------------------------------------------------------------

    @property
    def logprob_error(self) -> tuple[float, float] | None:
        """(mean, max) absolute difference of log-probabilities at the first generation; see `LogprobCheck.error`."""
        return self._logprob_check.error

    def stats(self) -> dict[str, Any]:
        """The engine's `SpeculationStats` as a dict, and `drafter_bytes`."""
        result: dict[str, Any] = self._command("stats")
        return result

    def report(self) -> dict[str, Any]:
        """The report for `rollout-spec doctor`; see `rollout_spec.integrations.vllm.commands`."""
        result: dict[str, Any] = self._command("report")
        return result

    def describe_engine(self) -> str:
        """What speculation the engine has, in one line."""
        if self._served:
            k = self._served["num_speculative_tokens"] if self._served["speculation"] else 0
            drafts = f"up to {k} draft tokens per request and step, drafted by {self._served['drafter']!r}"
            return f"rollout_spec {__version__} is on in {self.llm.base_url}: {drafts if k else 'no drafts'}"
        vllm_config = self.llm.llm_engine.vllm_config
        config = config_of(vllm_config)
        assert config is not None, "the engine was built with its settings"
        return describe_engine(vllm_config, config, has_model=has_model_drafter(vllm_config))

    def take_metrics(self) -> dict[str, float]:
        """`rollout_spec/*` metrics since the last call; empty when nothing was generated since.

        While an evaluation is generated, or has just been, they are those of evaluations, otherwise of the training.
        """
        if self.llm is None or not self._end_interval():
            return {}
        interval, now = self._untaken.pop(self.is_evaluating(), None), self._seen
        if interval is None or not interval.stats.steps:
            return {}
        new = interval.stats
        metrics = {
            "tokens": new.emitted_tokens if self._served else interval.tokens,
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
            "policy_version": now["policy_version"],
        }
        if not self._served:
            metrics["generation_seconds"] = interval.seconds
        return {f"rollout_spec/{name}": float(value) for name, value in metrics.items()}

    def begin_generation(self) -> None:
        """Count what follows for the training or for the evaluation; the engine's own generations do so themselves."""
        if self.is_evaluating() != self._is_evaluation and self._end_interval():
            self._is_evaluation = self.is_evaluating()

    def _end_interval(self) -> bool:
        """Add what was generated in the present interval to what has not been taken. False if the engine is silent."""
        try:
            now = self.stats()
        except OSError as error:  # a server is busy, or gone: that is for its requests to tell
            if not self._is_unanswered:
                logger.warning("the vLLM server does not answer, so these logs have no rollout_spec metrics: %s", error)
            self._is_unanswered = True
            return False
        self._is_unanswered = False
        self._interval.stats = SpeculationStats.between(self._seen, now)
        before = self._untaken.get(self._is_evaluation, _Interval())
        self._untaken[self._is_evaluation] = before + self._interval
        self._seen, self._interval = now, _Interval()
        return True

    def write_report(self, path: Path, **about: Any) -> dict[str, Any] | None:
        """Write the report, with the entries of `about`, as JSON. Warns if the file cannot be written.

        Returns:
            What was written; None if it could not be.
        """
        try:
            report = {**self.report(), **about}
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}.{os.getpid()}")
            unfinished.write_text(json.dumps(report) + "\n")
            unfinished.replace(path)
            return report
        except (OSError, TypeError, ValueError) as error:  # must not end the run; no answer of a server is an OSError
            logger.warning("the report for rollout-spec doctor could not be written: %s", error)
            return None


@dataclass
class _Interval:
    """What an engine generated while the trainer did nothing but train, or nothing but evaluate."""

    stats: SpeculationStats = field(default_factory=SpeculationStats)
    seconds: float = 0.0  # that the trainer waited for it
    tokens: int = 0

    def __add__(self, other: _Interval) -> _Interval:
        return _Interval(self.stats + other.stats, self.seconds + other.seconds, self.tokens + other.tokens)


def _check_llm_kwargs(llm_kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError if `vllm.LLM` takes no argument of one of these names."""
    if not llm_kwargs:
        return
    from vllm import LLM, EngineArgs

    known = {*inspect.signature(LLM.__init__).parameters, *(field.name for field in dataclasses.fields(EngineArgs))}
    unknown = [name for name in llm_kwargs if name not in known]
    if unknown:
        raise ValueError(f"llm_kwargs: vllm.LLM takes no {unknown[0]!r}{checks.did_you_mean(unknown[0], known)}")


def _as_list(prompts: Any) -> Sequence[Any]:
    """A sequence of prompts from one prompt or a sequence, as `vllm.LLM.generate` takes them."""
    is_one = isinstance(prompts, (str, Mapping)) or (prompts and isinstance(prompts[0], int))
    return [prompts] if is_one else prompts


def _prompt_key(prompt: Any) -> str:
    """A string that is equal for equal prompts."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt", prompt))
    return repr(prompt)
