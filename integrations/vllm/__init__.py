"""The plugin for vLLM: hooks, the adapters of both model runners, and what they share."""
