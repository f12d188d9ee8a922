"""Stands in for a GPU in every process whose PYTHONPATH names this folder: `experiments/gpu.sh` on a CPU.

Kernels are emulated (`tests/ptx`), vLLM sees a Triton backend and schedules as it would on a GPU, and `rollout-spec
doctor --device` checks the CPU with a small vocabulary. Python imports a module of this name when it starts.
"""

import wrapt

from tests.emulation import run_kernels, schedule_as_on_gpus, show_vllm_a_backend

run_kernels()
show_vllm_a_backend()


def check_the_cpu(doctor):
    """`doctor --device` on the CPU, in sizes that take seconds there."""
    check_device = doctor.check_device

    def check_cpu():
        import torch

        return check_device(torch.device("cpu"), 64)

    doctor.check_device = check_cpu


def pin_nothing(runner):
    """V1's runner pins memory for `ngram_gpu`, for which torch needs an accelerator."""
    import torch

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        def zeros(self, *args, pin_memory=False, **options):
            return torch.zeros(*args, **options)

    runner.torch = Torch()


wrapt.register_post_import_hook(pin_nothing, "vllm.v1.worker.gpu_model_runner")
wrapt.register_post_import_hook(lambda platform: schedule_as_on_gpus(), "vllm.platforms.cpu")
wrapt.register_post_import_hook(check_the_cpu, "rollout_spec.doctor")
