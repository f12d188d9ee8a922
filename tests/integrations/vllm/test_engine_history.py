"""An engine's end of a folder of history; `tests/runners` shows that it lasts and is shared."""

import gc
import json
import pickle
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import vllm.tokenizers
from transformers import AutoTokenizer

from rollout_spec import RolloutSpecConfig, engine_kwargs
from rollout_spec.cli import main
from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.host.store import PAGE_TOKENS
from rollout_spec.history.exchange import FolderThread
from rollout_spec.history.folder import HistoryFolder, Origin, fingerprint
from rollout_spec.history.problems import Problems
from rollout_spec.history.store import FIRST_TIME, Rollout
from rollout_spec.integrations.vllm import engine_history
from rollout_spec.integrations.vllm.engine_history import STEPS_PER_SHARING, EngineHistory, origin_of
from tests.history.made_up import rollouts_in
from tests.integrations.engines import build, generate, history_of, mixed_params, session_of, verify_all

MODEL = SimpleNamespace(
    hf_text_config=SimpleNamespace(model_type="llama", num_hidden_layers=2),
    skip_tokenizer_init=True,
    model="model",
    get_hidden_size=lambda: 64,
    get_vocab_size=lambda: 100,
)


def rollout(number, order=0, size=5):
    """A rollout of `size` tokens that say which it is, as its problem does."""
    return Rollout(number, np.array([1, 2, 3], np.int32), np.full(size, number, np.int32), order=order)


def write(path, *rollouts):
    """Rollouts of another engine."""
    folder = HistoryFolder(str(path), Origin())
    for each in rollouts:
        folder.write([each])


class Rank:
    """A rank's history, and what it has taken in: `taken`."""

    def __init__(self, path, share=None, drafter_options=None, **options):
        self.taken = []
        self.drafter = build_drafter("history", **(drafter_options or {}))
        engine = SimpleNamespace(model_config=MODEL, parallel_config=SimpleNamespace(tensor_parallel_size=1))
        config = RolloutSpecConfig(history_dir=str(path), **options)
        self.problems = Problems()
        self.history = EngineHistory(config, engine, self.drafter, self.problems, share)
        add_rollouts = self.drafter.add_rollouts
        self.drafter.add_rollouts = lambda rollouts: (self.taken.extend(rollouts), add_rollouts(rollouts))

    def look(self):
        """What the thread does each time, at once."""
        thread = self.history._thread
        if thread is not None:
            with thread._lock:
                thread._watched = dict.fromkeys(thread._watched, 0.0)
            thread._write()
            thread._read()

    def take(self, *problem_ids):
        """Take in what others have said of problems, of each of which a request begins here, says nothing and ends.

        Returns:
            [(tokens' number, order)].
        """
        for problem_id in problem_ids:
            self.history.begin_request(problem_id)
        self.look()
        self.taken.clear()
        for _ in range(STEPS_PER_SHARING):
            self.history.exchange()
        for problem_id in problem_ids:
            self.history.end_request(problem_id)
        return [(int(rollout.tokens[0]), rollout.order) for rollout in self.taken]


@pytest.fixture
def ranks(monkeypatch):
    """Makes an engine's ranks, of which the first one is to be called first: `sent` is what the other is yet to get."""
    monkeypatch.setattr(FolderThread, "start", lambda thread: None)  # nothing is exchanged by itself
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


@pytest.mark.parametrize("count", [1, 2])
def test_rollouts_of_other_engines_come_in_the_order_that_they_have_there(ranks, tmp_path, count):
    *here, sent = ranks(tmp_path, count)
    for rank in here:
        rank.history.load()
    write(tmp_path, *(rollout(number, number) for number in (9, 3, 5)))
    for rank in here:
        assert rank.take(3, 5, 9) == [(3, 3), (5, 5), (9, 9)]
        assert len(sent) == (count == 2 and rank is here[0]), "told once in STEPS_PER_SHARING steps, and not in each"
        assert rank.drafter.history_summary()["rollouts"] == 3


def test_files_say_when_a_generation_began(ranks, tmp_path, monkeypatch):
    """What was imported is older, whenever that was. A generation begins when no request is live, or after a while."""
    here, _ = ranks(tmp_path)
    here.history.load()
    write(tmp_path, rollout(7, order=FIRST_TIME - 1))
    now = [FIRST_TIME + 1000.5]
    monkeypatch.setattr(engine_history.time, "time", lambda: now[0])

    def sample(*problem_ids):
        for problem_id in problem_ids:
            here.history.begin_request(problem_id)
            here.drafter.start_request(str(problem_id), [1, 2, 3], problem_id=problem_id)
            here.drafter.extend(str(problem_id), [4, 5])
            now[0] += 1

    def end(*problem_ids):
        for problem_id in problem_ids:
            here.drafter.stop_request(str(problem_id))
            here.history.end_request(problem_id)

    sample(1, 2)
    end(1, 2)
    sample(3)  # the last generation's rollouts are recorded in this one
    here.history.exchange()
    now[0] += engine_history.LONGEST_GENERATION
    sample(4)
    end(3, 4)
    here.history.close()
    kept = {r.problem_id: r.order - FIRST_TIME for r in rollouts_in(tmp_path)}
    assert kept == {7: -1, 1: 1000, 2: 1000, 3: 1002, 4: 1003 + engine_history.LONGEST_GENERATION}


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_takes_in_some_of_what_has_come(ranks, tmp_path, monkeypatch, count):
    """All at once would make everyone wait for it."""
    for name in ("MAX_TOKENS_PER_STEP", "MAX_TOKENS_PER_SHARING"):
        monkeypatch.setattr(engine_history, name, 10)
    *here, _ = ranks(tmp_path, count)
    for rank in here:
        rank.history.load()
    write(tmp_path, *map(rollout, range(3)))  # of 8 tokens, contexts included
    for problem_id in range(3):
        here[0].history.begin_request(problem_id)
    here[0].look()
    for rank in here:
        for num_taken in (1, 2, 3, 3):
            for _ in range(1 if count == 1 else STEPS_PER_SHARING):
                rank.history.exchange()
            assert len(rank.taken) == num_taken


def test_rollouts_are_written_once_and_other_engines_recognise_their_prompts(ranks, tmp_path):
    one, _ = ranks(tmp_path)
    one.history.load()
    prompt = list(range(4, 24))
    problem_id = one.problems.start(np.array(prompt, np.int32)).problem_id
    one.history.begin_request(problem_id)
    one.drafter.start_request("a", prompt, problem_id=problem_id)
    one.drafter.extend("a", [1, 2, 3])
    one.drafter.stop_request("a", keep=True)
    one.history.end_request(problem_id)
    for _ in range(2):
        one.history.exchange()
    one.history.close()
    (found,) = rollouts_in(tmp_path)
    assert found.tokens.tolist() == [1, 2, 3]
    assert found.root == one.problems.root_of(problem_id)
    assert found.root.length == len(prompt)
    other, _ = ranks(tmp_path)
    other.history.load()
    assert other.problems.start(np.array([*prompt, 1, 2, 3, 50], np.int32)).problem_id == problem_id


def test_what_is_on_its_way_to_the_host_when_an_engine_ends_is_written(ranks, tmp_path, monkeypatch):
    """As from a GPU."""
    monkeypatch.setattr("rollout_spec.drafters.host.drafter._Request.arrive", lambda self, *, wait: wait)
    rank, _ = ranks(tmp_path)
    rank.history.load()
    rank.drafter.start_request("a", [1, 2], problem_id=7)
    rank.drafter.extend("a", [5])
    rank.drafter.stop_request("a")
    rank.history.exchange()
    rank.history.close()
    assert [found.tokens.tolist() for found in rollouts_in(tmp_path)] == [[5]]


def test_what_a_drafter_has_dropped_is_read_again_when_its_problem_comes_back(ranks, tmp_path):
    rank, _ = ranks(tmp_path, drafter_options={"max_history_tokens": 4 * PAGE_TOKENS})
    rank.history.load()
    write(tmp_path, rollout(1), rollout(2, size=3 * PAGE_TOKENS))
    assert rank.take(1) == [(1, 0)]
    assert rank.take(1) == []
    assert rank.take(2) == [(2, 0)]
    assert not rank.drafter.rollouts.knows(1)
    assert rank.take(1) == [(1, 0)]
    assert rank.drafter.rollouts.knows(1)
    assert rank.take(1) == []


def test_what_waits_to_be_taken_in_is_not_read_again(ranks, tmp_path):
    """A request of which nothing is kept ends, and another one of its problem begins before a step has taken it in."""
    rank, _ = ranks(tmp_path)
    rank.history.load()
    write(tmp_path, rollout(7))
    for _ in range(3):
        rank.history.begin_request(7)
        rank.look()
        rank.history.end_request(7)
    assert rank.take(7) == [(7, 0)]


def test_rollouts_are_of_a_tokenizer_by_its_vocabulary(monkeypatch, caplog):
    model = SimpleNamespace(**{**vars(MODEL), "skip_tokenizer_init": False})
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    monkeypatch.setattr(vllm.tokenizers, "cached_tokenizer_from_config", lambda config: tokenizer)
    assert origin_of(model) == Origin(fingerprint({"a": 0, "b": 1}), 100, "model", "llama, 2 layers of 64")
    assert origin_of(MODEL).tokenizer is None
    monkeypatch.setattr(vllm.tokenizers, "cached_tokenizer_from_config", lambda config: 1 / 0)
    assert origin_of(model).tokenizer is None
    assert "files are not checked for it" in caplog.text


def test_an_engine_that_is_dropped_ends_its_thread_which_writes_what_there_is(tmp_path):
    rank = Rank(tmp_path)
    rank.history.load()
    rank.history.cycle = rank.history  # as in an engine, which is collected as garbage
    thread = rank.history._thread
    running = thread._thread
    thread.add([rollout(1)])
    del rank
    gc.collect()
    running.join(60)
    assert not running.is_alive()
    assert thread.folder.stats.rollouts_written == 1


# -- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_imported_text_is_found_by_its_prompt(tiny_model, tmp_path, capfd):
    lines = [{"prompt": "w1 w2 w3", "completion": " ".join(["w4 w5 w6 w7"] * 8), "step": 3}] * 2
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    folder = str(tmp_path / "history")
    arguments = ["--into", folder, "--tokenizer", str(tiny_model)]
    assert main(["history", "import", str(tmp_path / "rows.jsonl"), *arguments]) == 0
    assert "2 rollouts of 1 problems, 64 tokens" in capfd.readouterr().out
    llm = build(tiny_model, **verify_all(num_speculative_tokens=4, history_dir=folder))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = [tokenizer.encode(text) for text in ("w1 w2 w3", "w1 w2 w4", "w1 w2 w3")]
    generate(llm, mixed_params(3, 1), prompts)
    assert history_of(llm)["requests_with_history"] == 2
    session_of(llm).engine_history.close()
    assert len({rollout.problem_id for rollout in rollouts_in(folder)}) == 2


@pytest.mark.engine
def test_a_folder_that_cannot_be_used_costs_a_warning_and_not_the_run(tiny_model, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    llm = build(tiny_model, **engine_kwargs(history_dir=str(tmp_path / "file")))
    params = mixed_params(3)
    assert len(generate(llm, params)) == 3
    session_of(llm).engine_history.close()
    said = [record.levelname for record in caplog.records if "cannot be used" in record.message]
    assert said == ["WARNING"], "reading and writing fail for the same reason"
    assert history_of(llm)["folder"]["rollouts_lost"] == 3
    assert history_of(llm)["rollouts"] == 3


@pytest.mark.engine
def test_a_drafter_that_raises_in_the_end_keeps_nothing_from_being_written(tiny_model, tmp_path, monkeypatch):
    llm = build(tiny_model, **engine_kwargs(history_dir=str(tmp_path / "history")))
    generate(llm, mixed_params(3))
    session = session_of(llm)
    monkeypatch.setattr(session.drafter.rollouts, "take_recorded", lambda **options: 1 / 0)
    session.close()
    assert len(rollouts_in(tmp_path / "history")) == 3
    assert not session.is_drafter_alive
