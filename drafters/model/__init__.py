"""Choosing between the drafts of history and those of a model drafter of vLLM."""
