"""Replay of recorded rollouts through a drafter, without a model or an engine."""
