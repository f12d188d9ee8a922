"""`tests.runners.adaptive` in a worker's own process, where vLLM imports this module before it makes the worker."""

from contextlib import ExitStack

from tests.runners import adaptive

FOR_GOOD = ExitStack()
FOR_GOOD.enter_context(adaptive.as_on_a_gpu())


class Extension:
    """For vLLM's `worker_extension_cls`."""

    def let_costs_rise(self):
        adaptive.set_costs(self.model_runner, adaptive.rising)
