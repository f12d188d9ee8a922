"""Everything that imports vllm, trl or transformers."""

if __name__ != "rollout_spec.integrations":
    raise ImportError("import this package as rollout_spec.integrations")
