"""History that outlives the engine: which problem a rollout is of, and the folder that keeps and shares rollouts.

`rollout.py` says what is kept of a rollout, `roots.py` which problem a prompt belongs to, `shards.py` and `storage.py`
how files hold rollouts, `folder.py` how an engine writes and reads them while it runs, `tidying.py` how they are merged
and deleted. `recordings.py`, `importers.py`, `contents.py` and `command.py` are the command `rollout-spec history`;
`text.py` serves recordings without token ids.
"""
