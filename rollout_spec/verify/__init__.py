"""Lossless verification of drafts: `reference` is the truth in NumPy, `kernel` runs on GPUs, `cpu` elsewhere."""
