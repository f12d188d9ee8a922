"""Speculation in TRL trainers: one callback, `GRPOTrainer(..., callbacks=[RolloutSpecGenerator()])`.

TRL builds its vLLM engine in the trainer's constructor, with arguments of its own. transformers calls `on_init_end`
before that, and there we wrap `vllm.LLM.__init__`: an engine that a trainer with this callback builds for its own model
gets our arguments, every other engine is built as before. Works for all trainers that build a `vllm.LLM`: GRPO, RLOO,
OnlineDPO and others. PPOTrainer builds none, so `rollout_spec.integrations.trainers.ppo` does.

Trainers that generate on a vLLM server, with `vllm_mode="server"` or as AsyncGRPO, speculate if the server does:
`ROLLOUT_SPEC='{}' vllm serve MODEL` starts one. There the callback makes sure of that and brings the server's metrics.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wrapt
from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback

from rollout_spec.checks import did_you_mean
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.doctor import REPORT_NAME, summary
from rollout_spec.integrations.trainers.controller import EngineController
from rollout_spec.integrations.vllm.request_options import KEEP_IN_HISTORY

logger = logging.getLogger(__name__)

HISTORY_NAME = "rollout_spec_history"
STEPS_BEFORE_SUMMARY = 3
"""Training steps after which the log says what speculation does: at first there is little history."""

_served: weakref.WeakSet[RolloutSpecGenerator] = weakref.WeakSet()
"""The callbacks of trainers that generate on a server."""


class RolloutSpecGenerator(EngineController, TrainerCallback):
    """Brings speculation into a TRL trainer's vLLM engine, or follows its server; `EngineController` does the work.

    One object serves one trainer. Metrics reach the trainer's logs as `rollout_spec/*`; with each log a report goes to
    `OUTPUT_DIR/rollout_spec.json`, which `rollout-spec doctor` explains.

    Args:
        llm_kwargs: More keyword arguments for the `vllm.LLM` that TRL builds, e.g. `{"dtype": "float32"}`.
        logprob_tolerance: Of a colocated engine: largest mean absolute difference of log-probabilities at the first
            generation. None: 1e-4 where engine and trainer compute in float32, 5e-2 otherwise. `math.inf` switches the
            check off.
        **options: Fields of `rollout_spec.RolloutSpecConfig`. A server must have been started with those given here.
            `history_dir=True` keeps history in `OUTPUT_DIR/rollout_spec_history`, beside the checkpoints, so that a run
            that resumes drafts from what it has sampled before.

    Attributes:
        llm: The engine, once TRL has built it, or a `ServedEngine`.
        model: The trainer's model.
        policy_version: Weight synchronisations so far.

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
        self._keeps_history_beside_checkpoints = options.get("history_dir") is True
        if self._keeps_history_beside_checkpoints:  # the folder is not known before `on_init_end`
            options = {**options, "history_dir": HISTORY_NAME}
        ours = ("llm_kwargs", "logprob_tolerance")
        known = [field.name for field in dataclasses.fields(RolloutSpecConfig)]
        for name in options:
            if name not in known and (hint := did_you_mean(name, ours)):
                raise ValueError(f"RolloutSpecGenerator takes no {name!r}{hint}")
        config = RolloutSpecConfig.from_dict(options)
        super().__init__(config, llm_kwargs=llm_kwargs, logprob_tolerance=logprob_tolerance)
        self._options = options
        self._has_server = False
        self._is_summarised = False  # the training, in the log
        _hook_ppo()

    def begin_run(self, *, seed: int, replica: int = 0, model: Any = None, autocast_dtype: str | None = None) -> None:
        """As `EngineController.begin_run`, for the trainer that is being made.

        Raises:
            ValueError: this object has an engine already.
        """
        if self.llm is not None:
            raise ValueError(
                "this RolloutSpecGenerator has an engine already, of another trainer or of one whose construction "
                "failed: make a new one for each trainer"
            )
        super().begin_run(seed=seed, replica=replica, model=model, autocast_dtype=autocast_dtype)
        _hook_trainer_log()

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Prepare for the engine that the trainer is about to build, or connect to its server.

        Raises:
            ValueError: the trainer does not generate with vLLM, this object has an engine already, or `llm_kwargs` or
                `history_dir=True` are given for a server.
            TimeoutError, RuntimeError: the server does not answer, or does not speculate; see `connect`.
        """
        server_url = _server_url(args)
        if server_url is None and not getattr(args, "use_vllm", False):
            raise ValueError("RolloutSpecGenerator needs a trainer that generates with vLLM: set use_vllm=True")
        replica = args.process_index // getattr(args, "vllm_tensor_parallel_size", 1)
        autocast = "bfloat16" if getattr(args, "bf16", False) else "float16" if getattr(args, "fp16", False) else None
        self.begin_run(seed=args.seed, replica=replica, model=model, autocast_dtype=autocast)
        _warn_of_truncation(args)
        if server_url is not None:
            self._has_server = True
            if self._keeps_history_beside_checkpoints:
                raise ValueError("history_dir=True is for an engine that the trainer builds: give the server a folder")
            if self._llm_kwargs:
                raise ValueError("llm_kwargs are for an engine that the trainer builds: give them to the server")
            self._connect_on_first_rank(server_url, args, model)
            _served.add(self)
            _hook_server_requests()
            return
        if self._keeps_history_beside_checkpoints:
            folder = Path(args.output_dir).absolute() / HISTORY_NAME
            self.config = dataclasses.replace(self.config, history_dir=str(folder))
        _warn_of_split_groups(args)
        _hook_engines()

    def _connect_on_first_rank(self, url: str, args: Any, model: Any) -> None:
        """`connect` on the rank that talks to the server in TRL, too. All ranks raise what it raises."""
        errors: list[Exception | None] = [None]
        if args.process_index == 0:
            try:
                name = getattr(model, "name_or_path", "MODEL")
                self.connect(url, model=name, timeout=args.vllm_server_timeout, options=self._options)
            except (RuntimeError, OSError) as error:
                errors = [error]
        if args.world_size > 1:
            broadcast_object_list(errors, from_process=0)
        if errors[0] is not None:
            raise errors[0]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a training, and say what speculation the engine has.

        Raises:
            RuntimeError: the trainer's engine was not built through this callback.
        """
        if self.llm is None and not self._has_server:
            raise RuntimeError(
                "the trainer's vLLM engine was not built through this RolloutSpecGenerator, so nothing would be "
                "speculated: pass it in callbacks=[...] when the trainer is made, one new object per trainer"
            )
        self.begin_training()
        self._is_summarised = False
        if state.is_world_process_zero:
            tell(self.describe_engine())

    def is_evaluating(self) -> bool:
        """As TRL's trainers themselves find out."""
        return self.evaluating or (self.model is not None and not self.model.training)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin a step, from whose number seeds derive."""
        self.begin_step(state.global_step, model)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the report that `rollout-spec doctor` explains to OUTPUT_DIR/rollout_spec.json.

        Once per training, after the first steps, its summary also goes to the log; a warning if it has none.
        """
        if self.llm is None or not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / REPORT_NAME
        report = self.write_report(path, global_step=state.global_step, num_processes=args.world_size)
        if report is None or self._is_summarised or self.is_evaluating():
            return
        if state.global_step >= min(STEPS_BEFORE_SUMMARY, state.max_steps) and self.config.speculation:
            self._is_summarised = True
            try:
                line = summary(report)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # a server's may be of any kind
                logger.warning("the report in %s has no summary: %r", path, error)
            else:
                tell(f"rollout_spec: after {state.global_step} training steps {line}; more in {path}")


def tell(line: str) -> None:
    """Write a line where transformers writes a trainer's logs: TRL lets vLLM say errors only, and so our own lines."""
    tqdm.write(line)


def _server_url(args: Any) -> str | None:
    """Where the trainer's vLLM server is; None for trainers that build an engine, or use none."""
    has_choice = hasattr(args, "use_vllm")  # asynchronous trainers have none
    if has_choice and (not args.use_vllm or getattr(args, "vllm_mode", "colocate") == "colocate"):
        return None
    url = getattr(args, "vllm_server_base_url", None)
    if url is None and has_choice:
        url = f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    return url


@functools.cache
def _hook_ppo() -> None:
    """Prepare for PPOTrainer, which has no engine of its own, where TRL has one and it is imported."""
    wrapt.register_post_import_hook("rollout_spec.integrations.trainers.ppo:hook", "trl.experimental.ppo.ppo_trainer")


def _hook_server_requests() -> None:
    """Wrap `VLLMGeneration.generate` of TRL, once per process: a server must be told which requests are evaluations."""
    from trl.generation.vllm_generation import VLLMGeneration

    original = VLLMGeneration.generate
    if hasattr(original, "rollout_spec"):
        return

    @functools.wraps(original)
    def generate(generation: Any, prompts: Any, images: Any = None, *args: Any, **kwargs: Any) -> Any:
        for callback in _served:
            if callback.model is generation.model and callback.llm is not None:
                callback.begin_generation()
        if generation.mode != "server" or generation.model.training:
            return original(generation, prompts, images, *args, **kwargs)
        given = generation.generation_kwargs
        name = "vllm_xargs" if images is None else "extra_args"  # TRL asks another endpoint for prompts with images
        generation.generation_kwargs = {**given, name: {KEEP_IN_HISTORY: False, **(given.get(name) or {})}}
        try:
            return original(generation, prompts, images, *args, **kwargs)
        finally:
            generation.generation_kwargs = given

    generate.rollout_spec = True  # type: ignore[attr-defined]
    VLLMGeneration.generate = generate


def _hook_engines() -> None:
    """Wrap `vllm.LLM.__init__`, once per process."""
    import vllm

    original = vllm.LLM.__init__
    if hasattr(original, "rollout_spec"):
        return

    @functools.wraps(original)
    def init(llm: Any, *args: Any, **kwargs: Any) -> None:
        trainer = _trainer_under_construction()
        model = kwargs.get("model", args[0] if args else None)
        is_policy = trainer is not None and model == getattr(trainer.model, "name_or_path", None)
        generator = generator_of(trainer) if is_policy else None
        if generator is None or generator.llm is not None:  # a second engine may be a judge's
            original(llm, *args, **kwargs)
        else:
            generator.build_engine(original, llm, *args, **kwargs)

    init.rollout_spec = True  # type: ignore[attr-defined]
    vllm.LLM.__init__ = init


def generator_of(trainer: Any) -> RolloutSpecGenerator | None:
    """The `RolloutSpecGenerator` among a trainer's callbacks, if it has one.

    Raises:
        ValueError: it has several.
    """
    generators = [c for c in trainer.callback_handler.callbacks if isinstance(c, RolloutSpecGenerator)]
    if len(generators) > 1:
        raise ValueError(f"a trainer takes one RolloutSpecGenerator and has {len(generators)}: remove the others")
    return generators[0] if generators else None


def _trainer_under_construction() -> Trainer | None:
    """The trainer in whose constructor this is called; None elsewhere.

    Found on the call stack: a hook that waits for the next engine would remain after a constructor that fails.
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


def _warn_of_truncation(args: Any) -> None:
    """Warn where a trainer takes log-probabilities of a truncated distribution for those of the policy."""
    given = {name: getattr(args, name, None) for name in ("top_p", "top_k", "min_p")}
    given.update(
        {name: value for name, value in (getattr(args, "generation_kwargs", None) or {}).items() if name in given}
    )
    is_off = {"top_p": lambda p: p >= 1, "top_k": lambda k: k <= 0, "min_p": lambda p: p <= 0}
    truncated = [f"{name}={value}" for name, value in given.items() if value is not None and not is_off[name](value)]
    # Of the engine's log-probabilities, GRPO corrects by them, and asynchronous trainers know no others.
    takes_them = getattr(args, "vllm_importance_sampling_correction", not hasattr(args, "use_vllm"))
    if truncated and takes_them:
        warnings.warn(
            f"{' and '.join(truncated)}: the engine's log-probabilities are those of the tokens that are left, and the "
            "trainer's of the whole vocabulary, so importance ratios are biased and may be clipped to no gradient "
            "(huggingface/trl#6789). Sample with top_p=1, top_k=0 and min_p=None, or set "
            "vllm_importance_sampling_correction=False",
            stacklevel=2,
        )


def _hook_trainer_log() -> None:
    """Wrap `Trainer.log` to add our metrics before reporters get the logs; callbacks' `on_log` comes too late."""
    original = Trainer.log
    if hasattr(original, "rollout_spec"):
        return

    @functools.wraps(original)
    def log(trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, RolloutSpecGenerator):
                prefix = "eval_" if callback.is_evaluating() else ""
                logs.update({prefix + name: value for name, value in callback.take_metrics().items()})
        original(trainer, logs, *args, **kwargs)

    log.rollout_spec = True  # type: ignore[attr-defined]
    Trainer.log = log
