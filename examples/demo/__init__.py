"""A small reasoning task and a small policy, so that GRPO with speculative rollouts runs on a laptop's CPU."""

ENVIRONMENT = {  # to be set before torch and vllm are imported
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the trainer's engine runs in its process
    "OMP_NUM_THREADS": "1",  # a second thread does not help so small a model
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
