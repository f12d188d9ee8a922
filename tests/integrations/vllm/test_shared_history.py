"""An engine's end of a folder of history, without the engine."""

from __future__ import annotations

import gc
import pickle
import secrets
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_spec import RolloutSpecConfig
from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.host.store import PAGE_TOKENS
from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.history.contents import Contents, each_once
from rollout_spec.history.folder import LONGEST, HistoryFolder
from rollout_spec.history.partitions import path_of, write_rollouts
from rollout_spec.history.rollout import Rollout, Root
from rollout_spec.history.roots import Roots
from rollout_spec.history.shards import Entry, Origin, write_shard
from rollout_spec.history.storage import LocalStorage, open_storage
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


def write(path, *rollouts):
    """Rollouts of another engine."""
    write_rollouts(open_storage(path), [Entry(secrets.randbits(64), 0, rollout) for rollout in rollouts], Origin())


def rollouts_in(path):
    """All that a folder holds."""
    return list(each_once(Contents(open_storage(path))))


class Rank:
    """A rank's history, and what it has taken in: `taken`."""

    def __init__(self, path, share=None, drafter_options=None, **options):
        self.taken = []
        self.drafter = build_drafter("history", **(drafter_options or {}))
        engine = SimpleNamespace(model_config=MODEL, parallel_config=SimpleNamespace(tensor_parallel_size=1))
        config = RolloutSpecConfig(history_dir=str(path), **options)
        self.roots = Roots()
        self.history = EngineHistory(config, engine, self.drafter, self.roots, share)
        add_rollouts = self.drafter.add_rollouts
        self.drafter.add_rollouts = lambda rollouts: (self.taken.extend(rollouts), add_rollouts(rollouts))

    def take(self, *problem_ids):
        """Take in what others have said of problems, of each of which a request begins here, says nothing and ends.

        Returns:
            [(tokens' number, version)].
        """
        for problem_id in problem_ids:
            self.history.begin_request(problem_id)
        if self.history._folder is not None:
            self.history._folder.exchange()
        self.taken.clear()
        for _ in range(STEPS_PER_SHARING):
            self.history.exchange()
        for problem_id in problem_ids:
            self.history.end_request(problem_id)
        return [(int(rollout.tokens[0]), rollout.version) for rollout in self.taken]


@pytest.fixture
def ranks(monkeypatch):
    """Makes an engine's ranks, of which the first one is to be called first: `sent` is what the other is yet to get."""
    monkeypatch.setattr(HistoryFolder, "start", lambda folder: None)  # nothing is exchanged by itself
    made = []

    def make(path, count=1, **options):
        sent = deque()

        def send(value):
            sent.append(pickle.dumps(value))
            return value

        for number in range(count):
            monkeypatch.setattr(engine_history, "is_first_rank", lambda config, number=number: number == 0)
            share = None if count == 1 else (lambda value: pickle.loads(sent.popleft())) if number else send
            made.append(Rank(path, share, **options))
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
@pytest.mark.parametrize(("ours", "oldest", "newest"), [(0, 0, 0), (5, 3, 5), (7, 3, 7), (20, 3, 9)])
def test_rollouts_of_other_engines_have_the_versions_that_they_had_there(ranks, tmp_path, count, ours, oldest, newest):
    """Of a trainer's versions an engine may be told later than another one: what is newer counts as the present."""
    *here, sent = ranks(tmp_path, count)
    for rank in here:
        rank.history.load()
        rank.drafter.begin_policy_version(ours)
        rank.history.begin_policy_version(ours)
    write(tmp_path, *(rollout(version, version) for version in (3, 5, 9)))
    for rank in here:
        assert rank.take(3, 5, 9) == [(3, 3), (5, 5), (9, 9)]
        assert len(sent) == (count == 2 and rank is here[0]), "told once in STEPS_PER_SHARING steps, and not in each"
        summary = rank.drafter.history_summary()
        assert (summary["rollouts"], summary["oldest_version"], summary["newest_version"]) == (3, oldest, newest)


def test_an_engine_goes_on_from_the_newest_version_of_which_it_knows(ranks, tmp_path):
    """By a rollout that it has read, or by what the last engine to end, or to begin a version, has written."""
    write(tmp_path / "rollouts", rollout(1, 2), rollout(2, 6), rollout(3, 4))
    assert ranks(tmp_path / "rollouts")[0].history.load() == 6
    for name, expected in (("rollouts", 8), ("learned", 8)):
        first, _ = ranks(tmp_path / name)
        first.history.load()
        first.drafter.begin_policy_version(8)
        first.history.begin_policy_version(8)
        first.history.close()
        second, _ = ranks(tmp_path / name)
        assert second.history.load() == expected
        assert second.history._folder.load_learned().keys() == second.drafter.learned().keys()
    assert ranks(tmp_path / "none")[0].history.load() == 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_takes_in_some_of_what_has_come(ranks, tmp_path, monkeypatch, count):
    """All at once would make everyone wait for it."""
    monkeypatch.setattr(engine_history, "MAX_TOKENS_PER_STEP", 10)
    *here, _ = ranks(tmp_path, count)
    for rank in here:
        rank.history.load()
    write(tmp_path, *map(rollout, range(3)))  # of 8 tokens, contexts included
    for problem_id in range(3):
        here[0].history.begin_request(problem_id)
    here[0].history._folder.exchange()
    for rank in here:
        if count > 1:
            for _ in range(STEPS_PER_SHARING - 1):
                rank.history.exchange()
            assert rank.taken == []
        for num_taken in (1, 2, 3, 3):
            rank.history.exchange()
            assert len(rank.taken) == num_taken


def begins(rank, prompt=(4, 5), problem_id=7):
    """A request of the rank's engine begins, in the order of calls that engines have."""
    rank.roots.start(np.array(prompt, np.int32), lambda: problem_id)
    rank.history.begin_request(problem_id)
    rank.drafter.start_request("a", list(prompt), problem_id=problem_id)


def ends(rank, tokens, problem_id=7, *, keep=True):
    """It has said these tokens, and ends."""
    rank.drafter.extend("a", tokens)
    rank.drafter.stop_request("a", keep=keep)
    rank.history.end_request(problem_id)


def says(rank, prompt, tokens):
    """A request of the rank's engine says these tokens, and ends. Its problem is 7."""
    begins(rank, prompt)
    ends(rank, tokens)


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
    found = sorted((rollout.tokens.tolist(), rollout.root) for rollout in rollouts_in(tmp_path))
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
    write(
        tmp_path / "text",
        rollout(5)._replace(problem_id=known, by_text=True),
        rollout(6)._replace(problem_id=other),
    )
    of_text, of_ids = ranks(tmp_path / "text")[0], ranks(tmp_path / "ids")[0]
    for rank in (of_text, of_ids):
        rank.history.load()
    found = [of_text.history.problem_by_text(np.array(p, np.int32)) for p in ([1, 2, 3], [4, 5], [1, 2])]
    assert found == [known, None, None]
    assert len(decoded) == 3
    assert of_ids.history.problem_by_text(np.array([1, 2, 3], np.int32)) is None
    assert len(decoded) == 3, "prompts are not decoded for nothing"


def test_prompts_are_found_by_text_of_which_an_engine_has_not_read_the_rollouts(ranks, tmp_path, monkeypatch):
    """At its start it has room for some problems alone; of which problems there are recordings it knows of all."""
    monkeypatch.setattr(engine_history, "SAMPLED_TOKENS", 0)
    monkeypatch.setattr(
        engine_history, "_tokenizer", lambda config: SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    )
    known = problem_of_text("1 2 3")
    write(tmp_path, rollout(5)._replace(problem_id=known, by_text=True))
    for rank in ranks(tmp_path, count=2)[:2]:
        rank.history.load()
        assert rank.taken == []
        assert rank.history.problem_by_text(np.array([1, 2, 3], np.int32)) == known


def test_without_a_tokenizer_recordings_of_text_are_not_used_but_ranks_must_agree(ranks, tmp_path, monkeypatch, caplog):
    write(tmp_path, rollout(5)._replace(problem_id=problem_of_text("1"), by_text=True))
    monkeypatch.setattr(engine_history, "_tokenizer", lambda config: 1 / 0)
    alone, first = ranks(tmp_path)[0], ranks(tmp_path, count=2)[0]
    for rank in (alone, first):
        rank.history.load()
    for _ in range(2):
        assert alone.history.problem_by_text(np.array([1], np.int32)) is None
    assert caplog.text.count("recordings of text are not used") == 1
    with pytest.raises(ZeroDivisionError):
        first.history.problem_by_text(np.array([1], np.int32))


# -- of which problems an engine reads -------------------------------------------------------------------------------


@pytest.fixture
def read_problems(monkeypatch):
    """Problems of whose shards any was read, and of which folders were listed, one entry for each time."""
    reads, lists = [], []
    read, sizes = LocalStorage.read, LocalStorage.sizes

    def problem_of(storage):
        name = storage._path.name
        return int(name, 16) if len(name) == 16 else None

    def counted_read(storage, name):
        reads.append(problem_of(storage))
        return read(storage, name)

    def counted_sizes(storage):
        lists.append(problem_of(storage))
        return sizes(storage)

    monkeypatch.setattr(LocalStorage, "read", counted_read)
    monkeypatch.setattr(LocalStorage, "sizes", counted_sizes)
    return reads, lists


def test_an_engine_reads_the_problems_that_it_is_asked_for(ranks, tmp_path, monkeypatch, read_problems):
    """However many others have written: neither are their shards read, nor their folders listed."""
    reads, lists = read_problems
    monkeypatch.setattr(engine_history, "SAMPLED_TOKENS", 0)
    monkeypatch.setattr(HistoryFolder, "tidy", lambda folder: None)  # which looks at all folders, once a minute
    rank, _ = ranks(tmp_path)
    for number in range(200):
        write(tmp_path, rollout(number))
    reads.clear()
    rank.history.load()
    assert [problem for problem in reads + lists if problem is not None] == [], "nothing unasked"
    reads.clear()
    lists.clear()
    assert rank.take(17, 42) == [(17, 0), (42, 0)]
    assert reads == lists == [17, 42]
    write(tmp_path, rollout(18), rollout(42, 3))
    reads.clear()
    lists.clear()
    assert rank.take(42) == [(42, 3)]
    assert reads == lists == [42]
    reads.clear()
    assert rank.take(42) == []
    assert reads == [], "what was read once is known by its name"
    lists.clear()
    assert rank.take() == []
    assert lists == [], "no request is live"
    assert rank.history.stats()["rollouts_read"] == 3


@pytest.mark.parametrize("max_tokens", [0, 40, 10**6])
def test_at_its_start_an_engine_reads_as_much_as_it_may_of_some_problems(ranks, tmp_path, monkeypatch, max_tokens):
    monkeypatch.setattr(engine_history, "SAMPLED_TOKENS", max_tokens)
    write(tmp_path, *map(rollout, range(20)))  # of 8 tokens, contexts included
    rank, _ = ranks(tmp_path)
    rank.history.load()
    assert len({r.problem_id for r in rank.taken}) == len(rank.taken) == min(max_tokens // 8, 20)
    assert rank.drafter.history_summary()["rollouts"] == len(rank.taken)
    missing = sorted(set(range(20)) - {r.problem_id for r in rank.taken})
    assert rank.take(*range(20)) == [(number, 0) for number in missing], "each once"


def test_what_a_drafter_has_dropped_is_read_again_when_its_problem_comes_back(ranks, tmp_path):
    rank, _ = ranks(tmp_path, drafter_options={"max_history_tokens": 4 * PAGE_TOKENS})
    rank.history.load()
    write(tmp_path, rollout(1), rollout(2, size=3 * PAGE_TOKENS))
    assert rank.take(1) == [(1, 0)]
    assert rank.take(1) == []
    assert rank.take(2) == [(2, 0)]
    assert not rank.drafter.knows(1)
    assert rank.take(1) == [(1, 0)]
    assert rank.drafter.knows(1)
    assert rank.take(1) == []


def test_the_engines_own_rollouts_come_back_once_the_drafter_has_dropped_them(ranks, tmp_path):
    rank, _ = ranks(tmp_path, drafter_options={"max_history_tokens": 4 * PAGE_TOKENS})
    rank.history.load()
    begins(rank)
    rank.history._folder.exchange()
    ends(rank, [1, 2, 3])
    rank.history.exchange()
    assert rank.take(7) == [], "it has them"
    write(tmp_path, rollout(2, size=3 * PAGE_TOKENS))
    rank.take(2)
    assert not rank.drafter.knows(7)
    assert rank.take(7) == [(1, 0)]


def test_problems_of_which_nothing_is_left_are_forgotten_now_and_then(ranks, tmp_path, monkeypatch):
    """What was read of them would take memory for as long as the engine lives."""
    monkeypatch.setattr(engine_history, "STEPS_PER_FORGETTING", 2 * STEPS_PER_SHARING)
    rank, _ = ranks(tmp_path, drafter_options={"max_history_tokens": 4 * PAGE_TOKENS})
    rank.history.load()
    write(tmp_path, *map(rollout, range(20)))
    for number in range(20):
        assert rank.take(number) == [(number, 0)]
    for _ in range(2):  # steps
        rank.take()
    rank.history._folder.exchange()
    kept = set(rank.history._folder._problems)
    assert kept == {number for number in range(20) if rank.drafter.knows(number)}
    assert 0 < len(kept) < 20


def test_what_ends_elsewhere_comes_while_a_request_is_live(ranks, tmp_path):
    """As when several engines generate a group of rollouts of one problem."""
    one, other = ranks(tmp_path)[0], ranks(tmp_path)[0]
    for rank in (one, other):
        rank.history.load()
        begins(rank)
    for rank in (one, other):
        assert rank.take() == []
    ends(one, [8, 9])
    one.history.exchange()
    one.history._folder.exchange()
    assert other.drafter.knows(7)
    found = []
    for _ in range(LONGEST):
        found += other.take()
    assert found == [(8, 0)]
    ends(other, [6, 7])
    other.history.exchange()
    assert other.take() == []
    assert one.take() == [], "no request of it is live there"
    assert one.take(7) == [(6, 0)]
    assert one.take(8) == []


def test_a_problem_of_which_nothing_comes_is_looked_at_less_often(ranks, tmp_path, read_problems):
    _, lists = read_problems
    rank, _ = ranks(tmp_path)
    rank.history.load()
    rank.history.begin_request(7)
    looks = []
    for _ in range(14):
        lists.clear()
        rank.history._folder.exchange()
        looks.append(lists.count(7))
    assert looks == [1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    write(tmp_path, rollout(7))
    lists.clear()
    for _ in range(4):
        rank.history._folder.exchange()
    assert lists.count(7) == 3, "once something has come, it is looked at each time"
    rank.history.begin_request(7)
    rank.history.end_request(7)
    lists.clear()
    for _ in range(LONGEST):
        rank.history._folder.exchange()
    assert 7 in lists, "one of its requests is live"
    rank.history.end_request(7)
    lists.clear()
    for _ in range(2 * LONGEST):
        rank.history._folder.exchange()
    assert 7 not in lists


def test_a_rank_that_does_not_read_counts_no_requests(ranks, tmp_path):
    first, other, sent = ranks(tmp_path, count=2)
    for rank in (first, other):
        rank.history.load()
        rank.history.begin_request(7)
        rank.history.begin_request(None)
        rank.history.end_request(None)
    assert first.history._live == {7: 1}
    assert not other.history._live
    for rank in (first, other):
        rank.history.end_request(7)
        assert not rank.history._live
    assert not first.history._folder._asked
    assert not sent


def test_a_request_that_ends_before_the_folder_is_read_is_not_taken_back(ranks, tmp_path):
    """The thread may be busy with other problems for as long as a short request lives."""
    rank, _ = ranks(tmp_path)
    rank.history.load()
    begins(rank)
    ends(rank, [1, 2, 3])
    rank.history.exchange()
    assert rank.take() == []
    assert rank.take(7) == []
    assert rank.drafter.history_summary()["rollouts"] == 1


def test_what_waits_to_be_taken_in_is_not_read_again(ranks, tmp_path):
    """A request of which nothing is kept ends, and another one of its problem begins before a step has taken it in."""
    rank, _ = ranks(tmp_path)
    rank.history.load()
    write(tmp_path, rollout(7))
    for _ in range(3):
        begins(rank)
        rank.history._folder.exchange()
        ends(rank, [1], keep=False)
    assert rank.take(7) == [(7, 0)]


def test_what_the_target_saw_is_kept_unless_it_is_not_wanted(ranks, tmp_path):
    said = np.array([5, 6, 7], np.int32)
    features = np.arange(3 * FEATURE_WORDS).reshape(3, FEATURE_WORDS)
    for has_features in (True, False):
        path = tmp_path / str(has_features)
        rank, _ = ranks(path, history_dir_features=has_features)
        rank.history.load()
        rank.history._folder.add([rollout(7)._replace(tokens=said, features=features)])
        rank.history._folder.exchange()
        (found,) = rollouts_in(path)
        assert found.tokens.tolist() == said.tolist()
        assert (found.features is not None) == has_features
    reader, _ = ranks(tmp_path / "True", history_dir_features=False)
    reader.history.load()
    assert reader.taken[0].features.tolist() == features.tolist(), "it reads what others have kept"


def test_shards_of_earlier_versions_are_named_and_left_alone(ranks, tmp_path, caplog):
    name, _ = write_shard(open_storage(tmp_path), [Entry(1, 0, rollout(7))], Origin())
    rank, _ = ranks(tmp_path)
    rank.history.load()
    (said,) = (record.getMessage() for record in caplog.records if "earlier version" in record.getMessage())
    assert name in said
    assert f"rollout-spec history convert {tmp_path}" in said
    assert rank.take(7) == []
    assert (tmp_path / name).exists()


def test_a_damaged_shard_of_one_problem_is_no_loss_to_others(ranks, tmp_path, caplog):
    write(tmp_path, rollout(1), rollout(2))
    (shard,) = (tmp_path / path_of(1)).glob("*.parquet")
    shard.write_bytes(shard.read_bytes()[:-1])
    rank, _ = ranks(tmp_path)
    rank.history.load()
    assert [r.problem_id for r in rank.taken] == [2]
    assert rank.history.stats()["shards_refused"] == 1
    assert repr(shard.name) in caplog.text
    assert path_of(1) in caplog.text


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
