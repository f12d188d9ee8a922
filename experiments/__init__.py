"""Benchmarks and long trials, run from the repository's root: `python -m experiments.engines.bench_phase`.

engines/      vLLM engines: whole rollout phases, budgets, model drafters; `build.py` builds them all
drafting/     what drafters draft on recorded rollouts, ours and other people's (`peers.py`)
costs/        what the verifier, the device drafter and a step cost
soak/         engines that live through what happens to them in days
real_policy/  a real language model trained by GRPO on a CPU
results/      rows, and what they say (README.md)
gpu.sh        all that needs a GPU, in stages; check_gpu.py compares the kernels with the reference there
"""
