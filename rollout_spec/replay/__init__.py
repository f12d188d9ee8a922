"""Replay of recorded rollouts through a drafter: no model, no engine, seconds instead of hours."""
