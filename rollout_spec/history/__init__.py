"""History that lasts: which problem a prompt belongs to, what ended rollouts are, and the folder that keeps them.

`roots.py` recognises conversations. `rollout.py` says what is kept of a rollout, `shards.py` how files hold it,
`folder.py` how an engine writes and reads them while it runs.
"""
