"""The numbers of the vote fit together."""

from __future__ import annotations

import numpy as np

from rollout_spec.drafters.host import vote


def test_there_is_a_weight_for_every_source_and_distance():
    preference = np.array(vote.PREFERENCE)
    assert preference.shape == (len(vote.SOURCES), vote.NUM_DISTANCE_BINS)
    assert (preference > 0).all()


def test_sources_are_named_in_order():
    numbers = [vote.OWN, vote.SIBLING, vote.PROMPT_TEXT, vote.SHARED, vote.LOOKAHEAD]
    assert numbers == list(range(len(vote.SOURCES)))


def test_edges_rise():
    for edges in (vote.DISTANCE_EDGES, vote.LENGTH_EDGES):
        assert all(np.diff(edges) > 0)
    assert vote.LENGTH_EDGES[-1] < vote.MAX_DEPTH


def test_exponent_1_is_among_those_that_are_tried():
    """It has the head start, and so is what is used before anything is known."""
    assert vote.INVERSE_TEMPERATURES.count(1.0) == 1
