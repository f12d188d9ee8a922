"""The device drafter: the same history as flat arrays on the GPU, searched and voted on by Triton kernels."""
