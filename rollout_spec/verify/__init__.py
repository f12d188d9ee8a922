"""Lossless verification of drafts: `reference` is the truth in torch, `kernel` runs on GPUs, `cpu` elsewhere."""
