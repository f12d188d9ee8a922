"""Compiling functions of ours with numba: the decorators and the cache of machine code."""
