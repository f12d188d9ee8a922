"""A soak's engine in a process of its own, which steps it itself, as a trainer's process does."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from experiments.engines.build import build_engine, command
from experiments.soak.engines import (
    ADAPTER_NAMES,
    PROBE,
    ROUND_SECONDS,
    SEARCH_PATH,
    START_SECONDS,
    Answer,
    Plan,
    Rollout,
    sampling_arguments,
    usage,
)
from experiments.soak.workload import Request, Round, adapter_folder


class Colocated:
    """`vllm.LLM` in a child process, which steps it itself, as a trainer's process does."""

    def __init__(self, plan: Plan) -> None:
        self._pipe, theirs = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=_serve_rounds, args=(plan, theirs))
        with _environment({**plan.environment, **SEARCH_PATH}):
            self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Raises RuntimeError if it does not start."""
        self._receive(START_SECONDS)

    def begin(self, round_: Round) -> None:
        """Let it serve a round."""
        self._pipe.send(round_)

    def end(self) -> Answer:
        """Wait for the round's end. Raises RuntimeError if the engine fails or hangs."""
        return self._receive(ROUND_SECONDS)

    def stop(self, *, kill: bool = False) -> None:
        """End it with SIGTERM, or kill it and its workers."""
        if not self._process.is_alive():
            return
        processes = [psutil.Process(self._process.pid)]
        processes += processes[0].children(recursive=True)
        if kill:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        else:
            self._pipe.send(None)
        self._process.join(60)
        if self._process.is_alive():
            raise RuntimeError("an engine does not end")

    def _receive(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise RuntimeError(f"an engine hangs: no answer after {seconds:.0f} s")
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError("an engine has died") from None
        if isinstance(answer, str):
            raise RuntimeError(f"an engine has failed:\n{answer}")
        return answer


def _serve_rounds(plan: Plan, pipe: Any) -> None:
    """The child process: build the engine, and serve rounds until there are no more."""
    import traceback

    file = os.open(plan.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        engine = _ColocatedEngine(plan)
        pipe.send(True)
        while (round_ := pipe.recv()) is not None:
            pipe.send(engine.serve(round_))
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


class _ColocatedEngine:
    """The engine inside of the child process."""

    def __init__(self, plan: Plan) -> None:
        if plan.environment.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
            from tests.interpreter import run_kernels, schedule_as_on_gpus, show_vllm_a_backend

            run_kernels()
            show_vllm_a_backend()
            schedule_as_on_gpus()
        import torch

        torch.set_num_threads(1)
        self._plan = plan
        mode = "budget" if plan.speculates else "off"
        self._llm = build_engine(plan.model, mode, options=plan.options, **plan.engine_arguments())
        self._engine = self._llm.llm_engine
        self._version = 0
        self._round = 0
        self._enabled = True
        self._num_preempted = 0
        scheduler = self._engine.engine_core.engine_core.scheduler
        self._scheduler, preempt = scheduler, scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._num_preempted += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted

    def serve(self, round_: Round) -> Answer:
        """Serve a round."""
        started, preempted = time.perf_counter(), self._num_preempted
        answer = Answer()
        self._round = round_.number
        self._set_weights(round_.version)
        coming = sorted(round_.requests, key=lambda request: request.arrives)
        events = list(round_.events)
        by_key = {request.key: request for request in coming}
        engine, gone, count = self._engine, set(), 0
        while coming or engine.has_unfinished_requests():
            while coming and (count >= coming[0].arrives or not engine.has_unfinished_requests()):
                self._add(coming.pop(0))
            for output in engine.step():
                for completion in output.outputs:
                    rollout = answer.rollout(output.request_id, completion.index)
                    count += len(completion.token_ids) - len(rollout.token_ids)
                    _take(rollout, completion)
                    leave_after = by_key[output.request_id].leave_after
                    gone_already = output.request_id in gone or output.finished
                    if leave_after is not None and len(rollout.token_ids) >= leave_after and not gone_already:
                        engine.abort_request([output.request_id])
                        gone.add(output.request_id)
            while events and count >= events[0].after:
                self._happen(events.pop(0).name, answer)
        answer.count("abort", len(gone))
        answer.count("preemption", self._num_preempted - preempted)
        self._end(answer)
        answer.seconds = time.perf_counter() - started
        return answer

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import StructuredOutputsParams

        given = sampling_arguments(request, is_reference=not self._plan.speculates)
        if "structured_outputs" in given:
            given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
        if request.is_evaluation:
            given["extra_args"] = {"rollout_spec": {"keep_in_history": False}}
        adapter = None
        if request.adapter is not None:
            name = "{}-v{}".format(*request.adapter)
            path = adapter_folder(Path(self._plan.model).parent, *request.adapter)
            adapter = LoRARequest(name, ADAPTER_NAMES.index(name) + 1, str(path))
        prompt: Any = {"prompt_token_ids": request.prompt}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        self._engine.add_request(request.key, prompt, SamplingParams(**given), lora_request=adapter)

    def _set_weights(self, version: int) -> None:
        if version != self._version:
            self._version = version
            self._llm.collective_rpc("soak_set_weights", args=(version,))
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def _happen(self, name: str, answer: Answer) -> None:
        answer.count(name)
        if name == "pause":
            time.sleep(0.3)
        elif name == "preempt":
            self._engine.reset_prefix_cache(reset_running_requests=True)
        elif name == "weights":
            answer.begin_new_weights()
            self._set_weights(self._version + 1)
        elif name == "switch" and self._plan.speculates:
            self._enabled = not self._enabled
            self._llm.collective_rpc("rollout_spec", args=("set_enabled", self._enabled))
        elif name == "vanish" and "history_dir" in self._plan.options:
            shutil.rmtree(self._plan.options["history_dir"], ignore_errors=True)

    def _end(self, answer: Answer) -> None:
        from vllm import SamplingParams

        if not self._enabled:
            self._enabled = True
            self._llm.collective_rpc("rollout_spec", args=("set_enabled", True))
        params = SamplingParams(max_tokens=1, extra_args={"rollout_spec": {"keep_in_history": False}})
        self._engine.add_request(PROBE, {"prompt_token_ids": [1]}, params)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        answer.checks = self._llm.collective_rpc("soak_check")
        answer.stats = command(self._llm, "stats")
        answer.history = command(self._llm, "history")
        pool = self._scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks of the key-value cache are lost"
        assert not self._scheduler.requests, "the scheduler keeps requests"
        answer.memory_bytes, answer.open_files = usage(os.getpid())


def _take(rollout: Rollout, completion: Any) -> None:
    """Take over what vLLM says of a rollout so far."""
    rollout.token_ids = list(completion.token_ids)
    rollout.text = completion.text
    rollout.finish_reason, rollout.stop_reason = completion.finish_reason, completion.stop_reason
    for position in list(completion.logprobs)[len(rollout.top) :]:
        rollout.top.append({token: found.logprob for token, found in position.items()})


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
