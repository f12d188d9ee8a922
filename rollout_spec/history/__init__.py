"""History that outlives the engine: which problem a rollout is of, and the folder that keeps and shares rollouts.

`store.py` has the rollouts that a drafter's history holds, and `problems.py` says which problem a prompt belongs to.
`folder.py` has the files, and `exchange.py` the thread that reads and writes them for an engine. `logs.py` reads what
others have written, and `command.py` is `rollout-spec history`.
"""
