"""`python -m experiments.real_policy`.

The stages are in `run`, because processes that are spawned do not import this module.
"""

from experiments.real_policy.run import main

if __name__ == "__main__":
    main()
