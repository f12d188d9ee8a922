"""Compiling functions of ours with numba: the decorators, the cache of machine code, and warming up."""
