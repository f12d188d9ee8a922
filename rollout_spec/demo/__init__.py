"""A small reasoning task and a small policy, so that GRPO with speculative rollouts runs on a laptop's CPU."""
