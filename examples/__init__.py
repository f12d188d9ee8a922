"""Scripts to start from, and the demo: `python -m examples.demo`."""
