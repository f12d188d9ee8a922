"""`tests.runners.adaptive` in a worker's own process, where vLLM imports this module before it makes the worker."""

from contextlib import ExitStack

from tests.runners import adaptive

FOR_GOOD = ExitStack()
FOR_GOOD.enter_context(adaptive.as_on_a_gpu())


class Extension:
    """For vLLM's `worker_extension_cls`."""

    def let_costs_rise(self):
        adaptive.set_costs(self.model_runner, adaptive.rising)

    def let_the_device_wait(self):
        runner = self.model_runner
        runner.adaptive_verification.host_time._device_waits = lambda: True
        runner.rollout_spec.time_the_host()

    def host_milliseconds(self):
        return self.model_runner.adaptive_verification.host_time.milliseconds
