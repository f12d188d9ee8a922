"""Speculation in TRL trainers: one callback, `GRPOTrainer(..., callbacks=[RolloutSpecGenerator()])`.

TRL builds its vLLM engine in the trainer's constructor, after that of transformers has called `on_init_end`: the next
engine of the policy's model gets our arguments, others are built as before. Works for all trainers that build a
`vllm.LLM`: GRPO, RLOO, OnlineDPO and others. PPOTrainer builds none, so `rollout_spec.integrations.trainers.ppo` does.
With `vllm_mode="server"`, and in AsyncGRPO, the callback makes sure that the server speculates, and logs its counters.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import wrapt
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback

from rollout_spec import __version__
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.integrations.trainers.controller import EngineController
from rollout_spec.integrations.vllm.config import config_of, describe_engine
from rollout_spec.report import REPORT_NAME, summary

logger = logging.getLogger(__name__)

HISTORY_NAME = "rollout_spec_history"
STEPS_BEFORE_SUMMARY = 3
"""Training steps after which the log says what speculation does: at first there is little history."""

_awaiting_engine: ContextVar[RolloutSpecGenerator | None] = ContextVar("_awaiting_engine", default=None)
"""The callback of the trainer that is being made, until its engine is built or another trainer is made."""


class RolloutSpecGenerator(EngineController, TrainerCallback):
    """Brings speculation into a TRL trainer's vLLM engine, or watches its server; `EngineController` does the work.

    One object serves one trainer. Metrics reach the trainer's logs as `rollout_spec/*`. With each log, a colocated
    engine's report goes to `OUTPUT_DIR/rollout_spec.json`, which `rollout-spec doctor` explains.

    Args:
        llm_kwargs, logprob_tolerance, compare_every: As for `EngineController`. All arguments are for colocated
            engines.
        **options: Fields of `rollout_spec.RolloutSpecConfig`. `history_dir=True` keeps history in
            `OUTPUT_DIR/rollout_spec_history`, so that a run that resumes drafts from what it has sampled before.
    """

    def __init__(
        self,
        *,
        llm_kwargs: Mapping[str, Any] | None = None,
        logprob_tolerance: float | None = None,
        compare_every: int | None = None,
        **options: Any,
    ) -> None:
        self._keeps_history_beside_checkpoints = options.get("history_dir") is True
        if self._keeps_history_beside_checkpoints:  # the folder is not known before `on_init_end`
            options = {**options, "history_dir": HISTORY_NAME}
        own: Any = {"llm_kwargs": llm_kwargs, "logprob_tolerance": logprob_tolerance, "compare_every": compare_every}
        super().__init__(RolloutSpecConfig.from_dict(options, also_known=tuple(own)), **own)
        self._is_for_engine = any((options, llm_kwargs, logprob_tolerance is not None, compare_every is not None))
        self._is_summarised = False  # the training, in the log
        self._first_step = 0  # of the training: a resumed one goes on from its checkpoint
        self._server_url: str | None = None
        self._server: Any = None  # its `ServerCounters`, on the rank that logs
        _hook_trainers()

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Prepare for the engine that the trainer is about to build. Raises ValueError if there is nothing to do."""
        self._server_url = _server_url(args)
        if self._server_url is not None and self._is_for_engine:
            raise ValueError(
                "options, llm_kwargs, logprob_tolerance and compare_every are for an engine that the trainer builds: "
                "leave them out, and give options to the server, as in "
                """ROLLOUT_SPEC='{"num_speculative_tokens": 8}' vllm serve MODEL"""
            )
        if self._server_url is None and not getattr(args, "use_vllm", False):
            raise ValueError("RolloutSpecGenerator needs a trainer that generates with vLLM: set use_vllm=True")
        # A trainer with a server ignores this setting, which may then be more than its own processes.
        ranks_per_engine = min(getattr(args, "vllm_tensor_parallel_size", 1), args.world_size)
        replica = args.process_index // ranks_per_engine
        autocast = "bfloat16" if getattr(args, "bf16", False) else "float16" if getattr(args, "fp16", False) else None
        self.begin_run(seed=args.seed, replica=replica, model=model, autocast_dtype=autocast)
        _warn_of_truncation(args)
        if self._server_url is None:
            if self._keeps_history_beside_checkpoints:
                folder = Path(args.output_dir).absolute() / HISTORY_NAME
                self.config = dataclasses.replace(self.config, history_dir=str(folder))
            _leave_text_out(args)
            _hook_engines()
            _awaiting_engine.set(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a training, and say what speculation the engine has. Raises RuntimeError if it has none."""
        if self.llm is None and self._server_url is None:
            raise RuntimeError(
                "the trainer's vLLM engine was not built through this RolloutSpecGenerator, so nothing would be "
                "speculated: pass it in callbacks=[...] when the trainer is made, one new object per trainer"
            )
        self.begin_training()
        self._first_step = state.global_step
        if not state.is_world_process_zero:
            return
        if self._server_url is None:
            vllm_config = self.llm.llm_engine.vllm_config
            config = config_of(vllm_config) or self.config
            tell(describe_engine(vllm_config, config))
            found = self._command("history") if config.history_dir else {}
            if "rollouts" in found:  # a drafter of one's own may not say
                tell(f"rollout_spec: history begins with {found['rollouts']:,} rollouts, {found['tokens']:,} tokens")
        else:
            from rollout_spec.integrations.trainers.server import ServerCounters

            self._server = ServerCounters(self._server_url, args.vllm_server_timeout)
            tell(f"rollout_spec {__version__}: the vLLM server at {self._server_url} speculates")

    def is_evaluating(self) -> bool:
        """As TRL's trainers themselves find out."""
        return self.evaluating or (self.model is not None and not self.model.training)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin a step, from whose number seeds derive."""
        self.begin_step(state.global_step, model)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the report that `rollout-spec doctor` explains to OUTPUT_DIR/rollout_spec.json."""
        if self.llm is None or not state.is_world_process_zero:
            return
        report = {**self.report(), "global_step": state.global_step, "num_processes": args.world_size}
        path = Path(args.output_dir) / REPORT_NAME
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(report) + "\n")
            unfinished.replace(path)
        except OSError as error:  # must not end the run
            logger.warning("the report for rollout-spec doctor could not be written: %s", error)
        num_steps, most_steps = state.global_step - self._first_step, state.max_steps - self._first_step
        if not self._is_summarised and num_steps >= max(min(STEPS_BEFORE_SUMMARY, most_steps), 1):
            self._is_summarised = True
            tell(f"rollout_spec: after {num_steps} training steps {summary(report)}; more in {path}")


def tell(line: str) -> None:
    """Write a line where transformers writes a trainer's logs: TRL lets vLLM say errors only, and so our own lines."""
    tqdm.write(line)


def generator_of(trainer: Any) -> RolloutSpecGenerator | None:
    """The `RolloutSpecGenerator` among a trainer's callbacks, if it has one. Raises ValueError if it has several."""
    generators = [c for c in trainer.callback_handler.callbacks if isinstance(c, RolloutSpecGenerator)]
    if len(generators) > 1:
        raise ValueError(f"a trainer takes one RolloutSpecGenerator and has {len(generators)}: remove the others")
    return generators[0] if generators else None


def _server_url(args: Any) -> str | None:
    """Where the trainer's vLLM server is; None for trainers that build an engine, or use none."""
    if hasattr(args, "use_vllm"):  # which asynchronous trainers have not
        if not args.use_vllm or getattr(args, "vllm_mode", "colocate") == "colocate":
            return None
        return args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    return getattr(args, "vllm_server_base_url", None)


@functools.cache
def _hook_trainers() -> None:
    """Note whose engine comes next, and add our metrics to logs before reporters get them; `on_log` comes too late."""
    # PPOTrainer has no engine of its own. TRL had one up to 1.12.0.
    wrapt.register_post_import_hook("rollout_spec.integrations.trainers.ppo:hook", "trl.experimental.ppo.ppo_trainer")
    construct, write_log = Trainer.__init__, Trainer.log

    @functools.wraps(construct)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        _awaiting_engine.set(None)
        construct(trainer, *args, **kwargs)
        generator_of(trainer)  # raises if there are several

    @functools.wraps(write_log)
    def log(trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        generator = generator_of(trainer)
        if generator is not None:
            prefix = "eval_" if generator.is_evaluating() else ""
            metrics = (generator._server or generator).take_metrics()
            logs.update({prefix + name: value for name, value in metrics.items()})
        write_log(trainer, logs, *args, **kwargs)

    Trainer.__init__, Trainer.log = init, log


@functools.cache
def _hook_engines() -> None:
    """Let the engine of the trainer that is being made have our arguments."""
    import vllm

    build = vllm.LLM.__init__

    @functools.wraps(build)
    def init(llm: Any, *args: Any, **kwargs: Any) -> None:
        generator = _awaiting_engine.get()
        model = kwargs.get("model", args[0] if args else None)
        if generator is None or model != getattr(generator.model, "name_or_path", None):
            build(llm, *args, **kwargs)
        else:
            _awaiting_engine.set(None)  # a second engine may be a judge's
            generator.build_engine(build, llm, *args, **kwargs)

    vllm.LLM.__init__ = init


def _leave_text_out(args: Any) -> None:
    """Let the trainer's requests ask for tokens alone, unless they end at stop strings or the user has said otherwise.

    TRL decodes completions by itself and never reads the engine's text, which takes the host 8 to 10 µs per token.
    """
    given = getattr(args, "generation_kwargs", None) or {}
    if hasattr(args, "generation_kwargs") and not given.get("stop"):
        args.generation_kwargs = {"detokenize": False, **given}


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
