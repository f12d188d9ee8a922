"""`tests.runners.adaptive` in a worker's own process, where vLLM imports this module before it makes the worker."""

from contextlib import ExitStack

from rollout_spec.integrations.vllm.host_time import HostTime
from rollout_spec.integrations.vllm.ranks import sharing_from_first_rank
from tests.runners import adaptive

FOR_GOOD = ExitStack()
FOR_GOOD.enter_context(adaptive.as_on_a_gpu())


class Extension:
    """For vLLM's `worker_extension_cls`."""

    def let_costs_rise(self):
        adaptive.set_costs(self.model_runner, adaptive.rising)

    def let_the_device_wait(self):
        runner = self.model_runner
        share = sharing_from_first_rank(runner.vllm_config)
        self.host_time = HostTime(runner.adaptive_verification, runner.step_timing, share, lambda: True)
        self.host_time.device_waits = lambda: True

    def host_milliseconds(self):
        return self.host_time.milliseconds
