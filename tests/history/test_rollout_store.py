"""The store of ended rollouts, where their texts arrive after a while."""

from dataclasses import dataclass

import numpy as np

from rollout_spec.history.store import Rollout, RolloutStore


@dataclass
class Late:
    """A rollout of some tokens, which arrives when it is told to or waited for."""

    problem_id: int
    size: int
    has_arrived: bool = False

    @property
    def num_sampled(self):
        return self.size * self.has_arrived

    def arrive(self, *, wait):
        self.has_arrived |= wait
        return self.has_arrived

    def read(self):
        assert self.has_arrived
        return Rollout(self.problem_id, np.zeros(0, np.int32), np.zeros(self.size, np.int32))


def sizes(rollouts):
    return [rollout.tokens.size for rollout in rollouts]


def test_rollouts_are_recorded_as_they_arrive_but_in_the_order_in_which_they_ended():
    store = RolloutStore()
    store.is_recording = True
    entries = [Late(1, 3), Late(2, 4), Late(1, 0), Late(1, 5)]
    for entry in entries:
        store.add(entry, record=True)
    store.add(Late(3, 6, has_arrived=True), record=False)
    entries[1].has_arrived = True
    assert store.take_recorded() == [], "the first has not arrived"
    assert store.drop_oldest() is entries[0]
    assert list(store.of_problem(1)) == entries[2:]
    entries[0].has_arrived = True
    assert sizes(store.take_recorded()) == [3, 4], "also what has been dropped meanwhile"
    assert sizes(store.take_recorded(wait=True)) == [5], "and nothing of what said nothing or came from elsewhere"
    assert store.take_recorded(wait=True) == []
    assert store.summary() == {
        "problems": 3, "rollouts": 4, "tokens": 15, "requests": 0, "requests_with_history": 0,
    }  # fmt: skip


def test_a_problem_is_known_while_it_has_rollouts_or_is_held():
    store = RolloutStore()
    for _ in range(2):
        store.begin_request(7)
    store.release(7)
    assert store.knows(7)
    store.add(Late(7, 1), record=True)
    store.release(7)
    assert store.knows(7), "it has a rollout"
    store.hold(7)
    store.drop_oldest()
    assert store.knows(7), "which the device still has"
    store.release(7)
    assert not store.knows(7)
    assert not store.num_held
    assert store.summary()["requests_with_history"] == 1
