"""An engine's end of a folder of history, without the engine."""

from __future__ import annotations

import gc
import pickle
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_spec import RolloutSpecConfig
from rollout_spec.drafters import build_drafter
from rollout_spec.history import folder as folder_module
from rollout_spec.history.folder import HistoryFolder
from rollout_spec.history.rollout import Rollout, Root
from rollout_spec.history.roots import Roots
from rollout_spec.history.shards import Origin, read_shard
from rollout_spec.history.storage import open_storage
from rollout_spec.history.text import fingerprint, problem_of_text
from rollout_spec.integrations.vllm import engine_history
from rollout_spec.integrations.vllm.engine_history import STEPS_PER_SHARING, EngineHistory, origin_of

MODEL = SimpleNamespace(
    hf_text_config=SimpleNamespace(model_type="llama", num_hidden_layers=2),
    skip_tokenizer_init=True,
    model="model",
    get_hidden_size=lambda: 64,
    get_vocab_size=lambda: 100,
)


def rollout(number, version=0, size=5):
    """A rollout of `size` tokens that say which it is."""
    return Rollout(number, version, np.array([1, 2, 3], np.int32), np.full(size, number, np.int32))


class Rank:
    """A rank's history, and what it has taken in: `taken`."""

    def __init__(self, path, share=None):
        self.taken = []
        self.drafter = build_drafter("history")
        engine = SimpleNamespace(model_config=MODEL, parallel_config=SimpleNamespace(tensor_parallel_size=1))
        config = RolloutSpecConfig(history_dir=str(path))
        self.roots = Roots()
        self.history = EngineHistory(config, engine, self.drafter, self.roots, share)
        add_rollouts = self.drafter.add_rollouts
        self.drafter.add_rollouts = lambda rollouts: (self.taken.extend(rollouts), add_rollouts(rollouts))

    def take(self):
        """Let its folder read and write, and take in what has come. Returns [(tokens' number, version)]."""
        if self.history._folder is not None:
            self.history._folder.exchange()
        self.taken.clear()
        for _ in range(STEPS_PER_SHARING):
            self.history.exchange()
        return [(int(rollout.tokens[0]), rollout.version) for rollout in self.taken]


@pytest.fixture
def ranks(monkeypatch):
    """Makes an engine's ranks, of which the first one is to be called first: `sent` is what the other is yet to get."""
    monkeypatch.setattr(folder_module, "SECONDS_LOCAL", 3600.0)  # nothing is exchanged by itself
    made = []

    def make(path, count=1):
        sent = deque()

        def send(value):
            sent.append(pickle.dumps(value))
            return value

        for number in range(count):
            monkeypatch.setattr(engine_history, "is_first_rank", lambda config, number=number: number == 0)
            share = None if count == 1 else (lambda value: pickle.loads(sent.popleft())) if number else send
            made.append(Rank(path, share))
        return (*made[-count:], sent)

    yield make
    for rank in made:
        rank.history.close()


def test_ranks_go_on_from_what_was_learned_alike(ranks, tmp_path):
    """With what one rank has learned and another one has not, their drafts, and so their batches, would differ."""
    first, _ = ranks(tmp_path)
    first.history.load()
    learned = {name: counts + 1 for name, counts in first.drafter.learned().items()}
    assert learned
    first.drafter.learn(learned)
    first.history.begin_policy_version(3)
    first.history._folder.exchange()
    assert first.history._folder.load_learned().keys() == learned.keys(), "a run that is killed leaves it, too"
    first.history._folder.add([rollout(1, version=3)])
    first.history.close()

    one, other, sent = ranks(tmp_path, count=2)
    assert [rank.history.load() for rank in (one, other)] == [3, 3]
    for rank in (one, other):
        assert [r.version for r in rank.taken] == [3]
        assert rank.drafter.history_summary()["newest_version"] == 3
        found = rank.drafter.learned()
        assert found.keys() == learned.keys()
        for name, counts in learned.items():
            assert np.array_equal(found[name], counts), name
    assert not sent


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("ours", "expected"), [(0, [0, 0, 0]), (5, [0, 1, 5]), (7, [1, 3, 7]), (20, [14, 16, 20])])
def test_rollouts_of_other_engines_are_as_old_here_as_there(ranks, tmp_path, count, ours, expected):
    """Engines count versions on their own: what is two versions old there is two versions old here."""
    *here, sent = ranks(tmp_path, count)
    for rank in here:
        rank.history.load()
        rank.drafter.begin_policy_version(ours)
        rank.history.begin_policy_version(ours)
    other = HistoryFolder(str(tmp_path), Origin(), max_bytes=1 << 30)
    other.add([rollout(version, version) for version in (3, 5, 9)])
    other.exchange()
    for rank in here:
        assert rank.take() == list(zip((3, 5, 9), expected, strict=True))
        assert len(sent) == (count == 2 and rank is here[0]), "told once in STEPS_PER_SHARING steps, and not in each"


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_takes_in_some_of_what_has_come(ranks, tmp_path, monkeypatch, count):
    """All at once would make everyone wait for it."""
    monkeypatch.setattr(engine_history, "MAX_TOKENS_PER_STEP", 10)
    *here, _ = ranks(tmp_path, count)
    for rank in here:
        rank.history.load()
    other = HistoryFolder(str(tmp_path), Origin(), max_bytes=1 << 30)
    other.add(map(rollout, range(3)))  # of 8 tokens, contexts included
    other.exchange()
    here[0].history._folder.exchange()
    for rank in here:
        if count > 1:
            for _ in range(STEPS_PER_SHARING - 1):
                rank.history.exchange()
            assert rank.taken == []
        for num_taken in (1, 2, 3, 3):
            rank.history.exchange()
            assert len(rank.taken) == num_taken


def says(rank, prompt, tokens):
    """A request of the rank's engine says these tokens, and ends. Its problem is 7."""
    rank.roots.start(np.array(prompt, np.int32), lambda: 7)
    rank.drafter.start_request("a", prompt, problem_id=7)
    rank.drafter.extend("a", tokens)
    rank.drafter.stop_request("a")


def test_rollouts_are_written_once_and_other_engines_recognise_their_prompts(ranks, tmp_path):
    one, _ = ranks(tmp_path)
    one.history.load()
    prompt = list(range(4, 24))
    says(one, prompt, [1, 2, 3])
    one.history.exchange()
    one.history.exchange()
    root = one.roots.root_of(7)
    assert root.length == len(prompt)
    says(one, [9, 9], [4, 5])  # of another prompt, as the engine says
    one.history.record(Root(2, 99))
    one.history.exchange()
    one.history.close()
    storage = open_storage(tmp_path)
    entries = [entry for name in storage.sizes() for entry in read_shard(storage, name, Origin())[1]]
    found = sorted((entry.rollout.tokens.tolist(), entry.rollout.root) for entry in entries)
    assert found == [([1, 2, 3], root), ([4, 5], Root(2, 99))]

    other, _ = ranks(tmp_path)
    other.history.load()
    later_turn = np.array([*prompt, 1, 2, 3, 50], np.int32)
    assert other.roots.start(later_turn, lambda: 8).problem_id == 7


def test_prompts_are_found_by_text_where_there_are_recordings_of_their_text(ranks, tmp_path, monkeypatch):
    decoded = []

    def decode(token_ids, skip_special_tokens):
        decoded.append(token_ids)
        return " ".join(map(str, token_ids))

    monkeypatch.setattr(engine_history, "_tokenizer", lambda config: SimpleNamespace(decode=decode))
    known, other = problem_of_text("1 2 3"), problem_of_text("4 5")
    folder = HistoryFolder(str(tmp_path / "text"), Origin(), max_bytes=1 << 30)
    folder.add([rollout(5)._replace(problem_id=known, by_text=True), rollout(6)._replace(problem_id=other)])
    folder.exchange()
    of_text, of_ids = ranks(tmp_path / "text")[0], ranks(tmp_path / "ids")[0]
    for rank in (of_text, of_ids):
        rank.history.load()
    found = [of_text.history.problem_by_text(np.array(p, np.int32)) for p in ([1, 2, 3], [4, 5], [1, 2])]
    assert found == [known, None, None]
    assert len(decoded) == 3
    assert of_ids.history.problem_by_text(np.array([1, 2, 3], np.int32)) is None
    assert len(decoded) == 3, "prompts are not decoded for nothing"


def test_without_a_tokenizer_recordings_of_text_are_not_used_but_ranks_must_agree(ranks, tmp_path, monkeypatch, caplog):
    folder = HistoryFolder(str(tmp_path), Origin(), max_bytes=1 << 30)
    folder.add([rollout(5)._replace(problem_id=problem_of_text("1"), by_text=True)])
    folder.exchange()
    monkeypatch.setattr(engine_history, "_tokenizer", lambda config: 1 / 0)
    alone, first = ranks(tmp_path)[0], ranks(tmp_path, count=2)[0]
    for rank in (alone, first):
        rank.history.load()
    for _ in range(2):
        assert alone.history.problem_by_text(np.array([1], np.int32)) is None
    assert caplog.text.count("recordings of text are not used") == 1
    with pytest.raises(ZeroDivisionError):
        first.history.problem_by_text(np.array([1], np.int32))


def test_rollouts_are_of_a_tokenizer_by_its_vocabulary(monkeypatch, caplog):
    model = SimpleNamespace(**{**vars(MODEL), "skip_tokenizer_init": False})
    monkeypatch.setattr(
        engine_history, "_tokenizer", lambda config: SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    )
    assert origin_of(model) == Origin(fingerprint({"a": 0, "b": 1}), 100, "model", "llama, 2 layers of 64")
    assert origin_of(MODEL).tokenizer is None
    monkeypatch.setattr(engine_history, "_tokenizer", lambda config: 1 / 0)
    assert origin_of(model).tokenizer is None
    assert "shards are not checked for it" in caplog.text


def test_an_engine_that_is_dropped_ends_its_thread_which_writes_what_there_is(tmp_path):
    rank = Rank(tmp_path)
    rank.history.load()
    rank.history.cycle = rank.history  # as in an engine, which is collected as garbage
    folder, thread = rank.history._folder, rank.history._folder._thread
    folder.add([rollout(1)])
    del rank
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert folder.stats.rollouts_written == 1
