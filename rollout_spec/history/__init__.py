"""History that outlives the engine: what ended rollouts are, and the folder that keeps and shares them.

`rollout.py` says what is kept of a rollout, `shards.py` how files hold it, `folder.py` how an engine writes and reads
them while it runs.
"""
