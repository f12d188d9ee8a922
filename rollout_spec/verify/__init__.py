"""Lossless verification of drafts: `reference` is the truth in NumPy, `vectorised` the same in torch."""
