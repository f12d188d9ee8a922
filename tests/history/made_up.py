"""Made-up rollouts for tests of history."""

import numpy as np

from rollout_spec.features import FEATURE_WORDS
from rollout_spec.history.folder import HistoryFolder, Origin
from rollout_spec.history.store import Rollout, Root

ORIGIN = Origin(tokenizer="of the test", vocab_size=10_000, model="tiny", states="8 layers")


def rollout(number, *, problem=1, order=0, size=5):
    """A rollout whose tokens say which it is."""
    tokens = np.full(size, number, np.int32)
    features = np.full((size, FEATURE_WORDS), -number, np.int64)
    return Rollout(problem, tokens[:3], tokens, features, Root(40, 2**64 - 1 - number), order)


def plain(rollout):
    """A rollout as values that can be compared."""
    features = None if rollout.features is None else rollout.features.tolist()
    return rollout._replace(context=rollout.context.tolist(), tokens=rollout.tokens.tolist(), features=features)


def numbers(rollouts):
    return [int(rollout.tokens[0]) for rollout in rollouts]


def rollouts_in(path):
    """All that a folder holds."""
    folder = HistoryFolder(str(path), Origin())
    return [rollout for file in sorted(folder.files()) for rollout in folder.rollouts(file)]
