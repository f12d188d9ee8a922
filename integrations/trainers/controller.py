"""What any trainer needs around a vLLM engine that speculates: seeds, metrics, reports, a check.

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

`rollout_spec.integrations.trainers.trl` does all this for TRL.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollout_spec import checks
from rollout_spec.config import CONFIG_KEY, RolloutSpecConfig
from rollout_spec.integrations.trainers import logprob_check
from rollout_spec.integrations.trainers.comparison import Comparison, Measured
from rollout_spec.integrations.vllm.compat import plain_weights
from rollout_spec.integrations.vllm.requests import without_history
from rollout_spec.noise.host import derive_seed
from rollout_spec.stats import SpeculationStats

logger = logging.getLogger(__name__)

RATES = "tokens_per_step", "mean_acceptance_length", "acceptance_rate", "draft_tokens", "accepted_tokens"


class EngineController:
    """Seeds, counts and checks the generations of one trainer's vLLM engine.

    Every rollout gets a seed of its own, derived from the run's seed, the training's number, the step, the generation's
    number in it, the engine's number and the rollout's place. So a run can be repeated and resumed rollout by rollout,
    with speculation or without. At the first generation log-probabilities are compared with the trainer's own forward
    pass. Under FSDP and ZeRO-3 all ranks must run that: each calls `generate` the first time that one does, with an
    empty list if it has no prompts.

    Args:
        config: The engine's settings.
        llm_kwargs: More keyword arguments for the `vllm.LLM` that the trainer builds, e.g. `{"dtype": "float32"}`.
        logprob_tolerance: Largest mean absolute difference of log-probabilities at the first generation. None: 1e-4
            where engine and trainer compute in float32, 5e-2 otherwise. `math.inf` switches the check off.
        compare_every: n, 3 or more: sample every n-th generation without drafts, which gives the same rollouts, and
            measure what drafts gain. That costs at most 1/n of the gain. None: not measured.

    Attributes:
        llm: The engine, once it is attached.
        model: The trainer's model; set by `begin_run` and `begin_step`.
        logprob_error: (mean, max) absolute difference of log-probabilities at the first generation; NaN if nothing
            could be compared; None before.
        evaluating: Set it to True while an evaluation is generated: its rollouts get drafts, but leave no history.
    """

    def __init__(
        self,
        config: RolloutSpecConfig,
        *,
        llm_kwargs: Mapping[str, Any] | None = None,
        logprob_tolerance: float | None = None,
        compare_every: int | None = None,
    ) -> None:
        if not isinstance(config, RolloutSpecConfig):
            raise TypeError(f"config must be a RolloutSpecConfig, got {checks.shown(config)}")
        if llm_kwargs is not None and not (isinstance(llm_kwargs, Mapping) and all(type(k) is str for k in llm_kwargs)):
            raise TypeError(f"llm_kwargs must be a dict of keyword arguments, got {checks.shown(llm_kwargs)}")
        if logprob_tolerance is not None:
            checks.number("logprob_tolerance", logprob_tolerance, lambda value: value >= 0, "at least 0")
        if compare_every is not None:
            checks.integer("compare_every", compare_every, 3)
        if compare_every is not None and not config.speculation:
            raise ValueError("compare_every compares with drafts, and speculation is False: leave it out")
        self._comparison = None if compare_every is None else Comparison(compare_every)
        self.config = config
        self.llm: Any = None
        self.model: Any = None
        self.evaluating = False
        self.logprob_error: tuple[float, float] | None = None
        self._llm_kwargs = dict(llm_kwargs or {})
        self._logprob_tolerance = logprob_tolerance
        self._enabled = True
        self._autocast: str | None = None
        self._run_seed = self._replica = self._step = 0
        self._num_trainings = self._num_generations = 0  # of this trainer; of this step, evaluations included
        self._has_steps = False  # whether the trainer calls `begin_step`
        self._first_stats: dict[str, Any] = {}  # the engine's counters when it was attached
        self._last_stats: dict[str, Any] = {}  # and when metrics were last taken; since then:
        self._num_tokens, self._seconds = 0, 0.0

    def begin_run(self, *, seed: int, replica: int = 0, model: Any = None, autocast_dtype: str | None = None) -> None:
        """Take the run's settings. Raises ValueError if the engine is built already.

        Args:
            seed: The run's, from which the rollouts' seeds derive.
            replica: Number of the engine; the ranks of one tensor-parallel group share it.
            model: The trainer's, a causal language model of transformers. None: log-probabilities are not compared.
            autocast_dtype: What the trainer's forward pass computes in, e.g. "bfloat16"; None: the model's dtype.
        """
        if self.llm is not None:
            raise ValueError(f"this {type(self).__name__} has an engine already: make a new one for each trainer")
        self._run_seed = checks.integer("seed", seed)
        self._replica = checks.integer("replica", replica, 0)
        self.model, self._autocast = model, autocast_dtype

    def begin_training(self) -> None:
        """Begin a training: call it once per `train()` of the trainer. A resumed run counts from 1 again."""
        self._num_trainings += 1
        self._num_generations = 0

    def begin_step(self, step: int, model: Any = None) -> None:
        """Begin a training step, from whose number seeds derive; `model`, if given, replaces that of `begin_run`."""
        self._step, self._num_generations, self._has_steps = checks.integer("step", step, 0), 0, True
        self.model = model if model is not None else self.model

    def is_evaluating(self) -> bool:
        """Whether an evaluation is generated; a trainer's hook may know by itself."""
        return self.evaluating

    @property
    def enabled(self) -> bool:
        """Whether the engine drafts; may be set between generations. RuntimeError: on, after the drafter has raised."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        enabled = checks.switch("enabled", enabled)
        if self.llm is not None:
            self._command("set_enabled", enabled)
        self._enabled = enabled

    def engine_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The trainer's keyword arguments for `vllm.LLM`, with `llm_kwargs` and ours added.

        `max_num_batched_tokens` of the trainer, but not of `llm_kwargs`, is raised where it leaves no room for drafts.
        Raises ValueError if the trainer or `llm_kwargs` sets what we set.
        """
        ours = self.config.engine_kwargs()
        additions: dict[str, Any] = {}
        for given in (kwargs, self._llm_kwargs):
            additions.update(given.get("additional_config") or {})
            if given.get("speculative_config") is not None or CONFIG_KEY in additions:
                raise ValueError(
                    f"speculative_config or additional_config[{CONFIG_KEY!r}] is set by the trainer or in llm_kwargs, "
                    f"and by {type(self).__name__}: leave it out, or give it to {type(self).__name__}(...) alone"
                )
        merged = {**kwargs, **self._llm_kwargs, **ours, "additional_config": additions | ours["additional_config"]}
        name = "max_num_batched_tokens"
        if self.config.speculation and kwargs.get(name) and not self._llm_kwargs.get(name):
            # What does not fit into a step waits for the next one, the requests at the end of vLLM's list every time.
            merged[name] = max(kwargs[name], (merged.get("max_num_seqs") or 0) * (self.config.max_draft_tokens + 1))
        return merged

    def build_engine(self, build: Callable[..., None], llm: Any, *args: Any, **kwargs: Any) -> None:
        """Run `build`, the constructor of the trainer's `vllm.LLM`, with `engine_kwargs`, and attach the engine."""
        with plain_weights():
            build(llm, *args, **self.engine_kwargs(kwargs))
        self.attach(llm)

    def attach(self, llm: Any) -> None:
        """Wrap `generate` and `chat` of an engine that was built with `engine_kwargs`.

        Raises RuntimeError if the engine runs without the plugin.
        """
        self.llm = llm
        try:
            self._first_stats = self._last_stats = self.stats()
        except AttributeError as error:
            self.llm = None
            raise RuntimeError(
                "the engine's worker did not load the rollout_spec plugin: reinstall rollout-spec, and add "
                "rollout_spec to the environment variable VLLM_PLUGINS, if that is set"
            ) from error
        if self.config.speculation:
            self._command("set_enabled", self._enabled)
        self._engine_generate, chat = llm.generate, llm.chat

        def on_generate(prompts: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
            is_one = isinstance(prompts, (str, Mapping)) or (prompts and isinstance(prompts[0], int))
            run = functools.partial(self.generate, prompts)
            return self._follow(run, [prompts] if is_one else prompts, sampling_params, args, kwargs)

        def on_chat(messages: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
            is_one = messages and isinstance(messages[0], Mapping)
            run = functools.partial(chat, messages)
            return self._follow(run, [messages] if is_one else messages, sampling_params, args, kwargs)

        llm.generate, llm.chat = on_generate, on_chat

    def generate(self, prompts: Any, sampling_params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Run the engine; a subclass may generate in other ways. `sampling_params` holds one per prompt, seeded."""
        return self._engine_generate(prompts, sampling_params, *args, **kwargs)

    def _follow(self, run: Callable[..., Any], prompts: Any, sampling_params: Any, args: Any, kwargs: Any) -> Any:
        """Give each request a seed, generate, count, and compare log-probabilities the first time."""
        params = self._with_seeds(prompts, sampling_params)
        is_first = self.logprob_error is None
        unscored = logprob_check.ask_for_logprobs(params) if is_first else []
        outputs = self._timed(functools.partial(run, params, *args, **kwargs))
        if is_first:
            engine, settings = self.llm.llm_engine.vllm_config.model_config, (self._autocast, self._logprob_tolerance)
            self.logprob_error = logprob_check.compare(self.model, engine, prompts, outputs, params, *settings)
        for completion in (completion for ordinal in unscored for completion in outputs[ordinal].outputs):
            completion.logprobs = completion.cumulative_logprob = None
        return outputs

    def _timed(self, run: Callable[[], Any]) -> Any:
        """Generate, without drafts where that is to be compared, and count."""
        comparison = None if self.is_evaluating() else self._comparison
        if comparison is not None and not self._enabled:
            comparison.forget()
            comparison = None
        turn = self._num_generations if self._has_steps else 0
        is_plain = comparison is not None and comparison.is_plain(turn)
        if is_plain:  # nor with several forward passes per step, which need no drafts
            self._command("set_enabled", False, False)
        started = time.perf_counter()
        try:
            outputs = run()
            seconds = time.perf_counter() - started
        finally:
            if is_plain:
                self._draft_again()
        completions = [completion for output in outputs for completion in output.outputs]
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        self._seconds += seconds
        self._num_tokens += num_tokens
        if comparison is not None:
            comparison.observe(len(completions), num_tokens, seconds, turn)
        return outputs

    def _draft_again(self) -> None:
        """After a generation without drafts. The drafter may have raised in it, which ends no run."""
        try:
            self._command("set_enabled", True)
        except Exception as error:
            logger.warning("the engine does not draft any more, so nothing more is compared: %s", error)
            self._enabled = False

    def measured(self) -> Measured | None:
        """What drafts gain by `compare_every`; None before it is known."""
        return None if self._comparison is None else self._comparison.measured()

    def _with_seeds(self, prompts: Sequence[Any], sampling_params: Any) -> list[Any]:
        """One `SamplingParams` per prompt, with a seed where it has none. Raises ValueError if rollouts were copies."""
        if sampling_params is None:
            sampling_params = self.llm.get_default_sampling_params()
        if not isinstance(sampling_params, Sequence):
            sampling_params = [sampling_params] * len(prompts)
        seen: set[tuple[str, int]] = set()
        seeded = []
        for ordinal, params in enumerate(sampling_params):
            params = params.clone()
            if self.is_evaluating():
                params.extra_args = without_history(params.extra_args)
            if params.seed is None:
                numbers = (self._num_trainings, self._step, self._replica, self._num_generations, ordinal)
                params.seed = derive_seed(self._run_seed, *numbers)
            elif ordinal < len(prompts):
                request = repr(prompts[ordinal]), params.seed
                if request in seen:
                    raise ValueError(
                        f"SamplingParams.seed is {params.seed} for several requests with the same prompt, so their "
                        "rollouts would be copies: leave it out (in TRL, of generation_kwargs, too)"
                    )
                seen.add(request)
            seeded.append(params)
        self._num_generations += 1
        return seeded

    def _command(self, name: str, *args: Any) -> Any:
        return self.llm.collective_rpc("rollout_spec", args=(name, *args))[0]

    def stats(self) -> dict[str, Any]:
        """The engine's `SpeculationStats` as a dict, `drafter_bytes` and `live_requests`."""
        return dict(self._command("stats"))

    def report(self) -> dict[str, Any]:
        """What `rollout-spec doctor` explains, once it is written as JSON."""
        report, measured = self._command("report"), self.measured()
        return {
            **report,
            "stats": SpeculationStats.between(self._first_stats, report["stats"]).to_dict(),
            "measured": None if measured is None else measured._asdict(),
            "compare_every": self._comparison and self._comparison.every,
        }

    def take_metrics(self) -> dict[str, float]:
        """`rollout_spec/*` metrics since the last call; empty when nothing was generated since."""
        if self.llm is None:
            return {}
        now = self.stats()
        stats = SpeculationStats.between(self._last_stats, now)
        if not stats.steps:
            return {}
        metrics = {
            "tokens": self._num_tokens,
            "generation_seconds": self._seconds,
            "drafter_mbytes": now["drafter_bytes"] / 1e6,
        }
        self._last_stats, self._num_tokens, self._seconds = now, 0, 0.0
        measured = self.measured()
        if measured is not None:
            metrics |= {f"measured_{name}": value for name, value in measured._asdict().items() if value is not None}
        return as_metrics(stats, (*RATES, "draft_seconds", "drafter_errors"), metrics)


def as_metrics(stats: SpeculationStats, names: Iterable[str], more: Mapping[str, float]) -> dict[str, float]:
    """`rollout_spec/*` of these fields of the counters, and more."""
    values = {name: getattr(stats, name) for name in names} | dict(more)
    return {f"rollout_spec/{name}": float(value) for name, value in values.items()}
