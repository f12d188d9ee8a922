"""The integrations with vLLM, TRL and transformers; nothing else in the package imports those libraries."""

if __name__ != "rollout_spec.integrations":
    raise ImportError("import this package as rollout_spec.integrations")
