"""What each kind of recording becomes, and what is left out of damaged ones."""

from __future__ import annotations

import bz2
import gzip
import json
import random

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.features.format import FEATURE_WORDS, no_features
from rollout_spec.history import importers, recordings
from rollout_spec.history.contents import Contents
from rollout_spec.history.importers import Converter, import_recordings
from rollout_spec.history.partitions import path_of, problems_by_text
from rollout_spec.history.recordings import Bad, Recording, exported_line
from rollout_spec.history.shards import Origin, read_shard
from rollout_spec.history.text import text_key
from tests.history.made_up import MemoryStorage, chat_tokenizer, plain, rollouts, stored

ROW = {"prompt_token_ids": [1, 2], "token_ids": [3, 4, 5], "reward": 0.5, "step": 7}
MESSAGES = [{"role": "user", "content": "What is the sum?"}]


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("trl")
    return chat_tokenizer("qwen3", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])


def imported(path, *, format="auto", tokenizer=None, version=None, storage=None):
    """(rollouts, lines that were left out, report)."""
    storage = MemoryStorage() if storage is None else storage
    bad = []
    report = import_recordings(
        [Recording(path, format)],
        Converter(tokenizer, version),
        storage,
        Origin(),
        on_bad=lambda _, line: bad.append(line),
    )
    return stored(storage), bad, report


def by_problem(some):
    """In the order of their problems, and as they are within each."""
    return sorted(some, key=lambda rollout: rollout.problem_id)


def of_rows(tmp_path, *rows, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return imported(path, **options)


# -- what enters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["prompt_token_ids", "prompt_ids", "prompt"])
@pytest.mark.parametrize("completion", ["token_ids", "completion_ids", "response_ids", "output_token_ids", "response"])
@pytest.mark.parametrize(("reward", "version"), [("reward", "step"), ("score", "version")])
def test_token_ids_under_any_name(tmp_path, prompt, completion, reward, version):
    row = {prompt: list(range(50)), completion: [7, 8], reward: 2, version: 3, "other": {"a": []}}
    ((rollout,), bad, report) = of_rows(tmp_path, row)
    assert rollout.problem_id == problem_of_prompt(range(50))
    assert rollout.context == list(range(18, 50))
    assert (rollout.tokens, rollout.version, rollout.reward) == ([7, 8], 3, 2.0)
    assert (rollout.by_text, rollout.features) == (False, None)
    assert not bad
    assert (report.rollouts, report.tokens, len(report.problems)) == (1, 2, 1)
    assert report.num_bytes > 0


def test_token_ids_come_before_text(tmp_path):
    row = {"prompt": "text", "completion": "text", **ROW}
    ((rollout,), _, _) = of_rows(tmp_path, row)
    assert (rollout.problem_id, rollout.tokens) == (problem_of_prompt([1, 2]), [3, 4, 5])


@pytest.mark.parametrize(
    ("reward", "known"),
    [(True, 1.0), ([0.25, 0.5], 0.75), ([], 0.0), ("good", None), (float("nan"), None), (1e300, None), (10**400, None)],
)
def test_what_is_no_reward_is_not_known(tmp_path, reward, known):
    ((rollout,), bad, _) = of_rows(tmp_path, {**ROW, "reward": reward})
    assert rollout.reward == known
    assert not bad


def test_the_version_is_the_option_or_the_step_or_zero(tmp_path):
    rows = [{**ROW, "step": 3.0}, {"prompt": [1], "response": [2]}]
    for option, expected in ((None, {3: 3, 2: 0}), (9, {3: 9, 2: 9})):
        found = of_rows(tmp_path, *rows, version=option)[0]
        assert {rollout.tokens[0]: rollout.version for rollout in found} == expected


def test_dumps_of_verl(tmp_path, tokenizer):
    """The fields that verl's `RayPPOTrainer._dump_generations` writes; text is decoded without special tokens."""
    prompt_ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    text = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    row = {"input": text, "output": "<think>\nHm</think> two", "gts": "2", "score": 1.0, "step": 4, "acc": True}
    ((rollout,), bad, _) = of_rows(tmp_path, row, tokenizer=tokenizer, format="verl")
    assert not bad
    assert rollout.by_text
    assert rollout.problem_id == text_key(tokenizer, prompt_ids)
    assert rollout.tokens == tokenizer.encode("<think>\nHm</think> two", add_special_tokens=False)
    assert rollout.context == tokenizer.encode(text, add_special_tokens=False)[-32:]
    assert (rollout.version, rollout.reward) == (4, 1.0)


def test_dumps_of_skyrl(tmp_path, tokenizer):
    """Text with special tokens, and a reward per token."""
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    row = {"input_prompt": text, "output_response": "two<|im_end|>", "score": [0.0, 0.0, 1.0], "stop_reason": "stop"}
    ((rollout,), _, _) = of_rows(tmp_path, row, tokenizer=tokenizer)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert rollout.problem_id == text_key(tokenizer, token_ids)
    assert rollout.tokens[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (rollout.reward, rollout.context) == (1.0, token_ids[-32:])


def trl_table(prompts, completions, **columns):
    """A table with the columns, in the order, that `GRPOTrainer.log` of TRL 1.16 writes with `log_completions`: those
    of reward functions have their names, and what `log_extra` was given comes before the advantage."""
    pandas = pytest.importorskip("pandas")
    size = len(prompts)
    table = {"step": [5] * size, "prompt": prompts, "completion": completions, **columns, "advantage": [0.5] * size}
    return pandas.DataFrame(table)


def test_completions_of_trl(tmp_path, tokenizer):
    path = tmp_path / "completions_00005.parquet"
    rewards = {"accuracy_reward": [1.0, 0.0, None], "format_reward": [0.5, None, None], "answer": ["2", "3", "4"]}
    trl_table(["What is"] * 3, ["the sum", "two", "is"], **rewards).to_parquet(path)
    found, bad, _ = imported(path, tokenizer=tokenizer)
    assert not bad
    assert [rollout.reward for rollout in found] == [1.5, 0.0, None]
    assert {rollout.version for rollout in found} == {5}
    assert {rollout.problem_id for rollout in found} == {text_key(tokenizer, tokenizer.encode("What is"))}
    assert [tokenizer.decode(rollout.tokens) for rollout in found] == ["the sum", "two", "is"]


def test_conversations_of_trl(tmp_path, tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    with_tool = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    completions = [[{"role": "assistant", "content": "two"}], with_tool]
    path = tmp_path / "completions_00005.parquet"
    trl_table([MESSAGES] * 2, completions, reward=[1.0, 0.0]).to_parquet(path)
    found, bad, _ = imported(path, tokenizer=tokenizer)
    assert not bad
    prompt_ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert {rollout.problem_id for rollout in found} == {text_key(tokenizer, prompt_ids)}
    assert found[0].tokens == tokenizer.encode("two")
    assert '"name": "add"' in tokenizer.decode(found[1].tokens)
    assert "<tool_response>\n2\n</tool_response>" in tokenizer.decode(found[1].tokens)
    whole = tokenizer.apply_chat_template([*MESSAGES, *with_tool], return_dict=False)
    assert prompt_ids + found[1].tokens == whole


@pytest.mark.slow
@pytest.mark.parametrize("is_chat", [False, True])
def test_what_trl_itself_writes(tmp_path, tiny_model, is_chat):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer

    from tests.integrations.trainers import reward_short

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = (
        "{% for m in messages %}<bos> {{ m.content }} <eos> {% endfor %}{% if add_generation_prompt %}<bos> {% endif %}"
    )
    texts = ["w1 w2 w3", "w4 w5"]
    prompts = [[{"role": "user", "content": text}] for text in texts] if is_chat else texts
    seen = []

    class Watched(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            out = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            seen.extend(zip(prompt_ids, out[0], strict=True))
            return out

    options = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 12, "max_steps": 1}
    config = trl.GRPOConfig(
        output_dir=str(tmp_path), log_completions=True, logging_steps=1, use_cpu=True, report_to=[], **options
    )
    dataset = Dataset.from_dict({"prompt": prompts})
    Watched(str(tiny_model), reward_short, config, train_dataset=dataset, processing_class=tokenizer).train()
    found, bad, _ = imported(tmp_path / "completions" / "completions_00001.parquet", tokenizer=tokenizer)
    special = {0, 1, 2, 3}  # they are not in the recorded text
    assert len(found) + len(bad) == len(seen) == 4
    expected = [(text_key(tokenizer, p), [t for t in map(int, c) if t not in special]) for p, c in seen]
    assert sorted((r.problem_id, r.tokens) for r in found) == sorted((p, c) for p, c in expected if c)
    assert all(rollout.version == 1 and rollout.reward is not None for rollout in found)


def test_recordings_of_replay(tmp_path):
    size = 4
    rows = {
        "prompt_id": ["a", "a", "b"],
        "sample_id": [0, 1, 0],
        "epoch": [1, 2, 2],
        "prompt_tokens": [[1, 2], [1, 2], []],
        "completion_tokens": [[5] * size] * 3,
        "gen_runs": [[], [2, 1, 1], []],
        "top_ids": [[1, 2, 3] * size] * 3,
        "top_logprobs": [[-0.5, -1.0, -2.0] * size] * 3,
        "signatures": [bytes(range(16)) * size] * 3,
    }
    path = tmp_path / "traces.parquet"
    parquet.write_table(arrow.table(rows), path)
    found, bad, _ = imported(path)
    assert bad == [Bad(3, "the prompt is empty (prompt 'b')")]
    assert [(r.problem_id, r.version, r.tokens) for r in found] == [
        (problem_of_prompt([1, 2]), version, [5] * size) for version in (1, 2)
    ]
    known = np.array([any(words) for words in found[1].features])
    assert known.tolist() == [True, True, False, True]  # nothing is known of what an environment gave


@settings(deadline=None, derandomize=True)
@given(st.lists(rollouts(), min_size=1, max_size=5))
def test_exported_lines_are_read_back_exactly(tmp_path_factory, made):
    path = tmp_path_factory.mktemp("exported") / "rows.jsonl"
    path.write_text("".join(exported_line(rollout) + "\n" for rollout in made))
    found, bad, _ = imported(path)
    assert not bad
    assert by_problem(found) == by_problem(map(plain, made))


# -- files -----------------------------------------------------------------------------------------------------------


def in_two_members(data):
    return gzip.compress(data[:9]) + gzip.compress(data[9:])


@pytest.mark.parametrize("pack", [bytes, gzip.compress, in_two_members, bz2.compress])
@pytest.mark.parametrize("lines", [b"%s\n%s\n", b"\xef\xbb\xbf%s\r\n%s\r\n", b"\n%s\n \n\t\n%s"])
def test_compression_and_line_ends(tmp_path, pack, lines):
    path = tmp_path / "rows"
    line = json.dumps({**ROW, "text": "Ünïcode \u2028 🙂"}, ensure_ascii=False).encode()
    path.write_bytes(pack(lines % (line, line)))
    found, bad, _ = imported(path)
    assert len(found) == 2
    assert not bad


def test_zstd(tmp_path):
    path = tmp_path / "rows.jsonl.zst"
    with arrow.output_stream(path, compression="zstd") as file:
        file.write(json.dumps(ROW).encode())
    assert len(imported(path)[0]) == 1


def test_a_cut_archive_gives_its_beginning(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    line = json.dumps({**ROW, "noise": random.Random(0).randbytes(100).hex()}).encode() + b"\n"
    data = gzip.compress(line * 2000)
    path.write_bytes(data[: len(data) // 2])
    found, bad, _ = imported(path)
    assert 0 < len(found) < 2000
    assert "damaged from here on" in bad[-1].reason


def test_a_long_line_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(recordings, "MAX_LINE_BYTES", 1000)
    long = {**ROW, "text": "x" * 5000}
    found, bad, _ = of_rows(tmp_path, ROW, long, ROW, {**ROW, "text": "x" * 1980}, ROW)
    assert len(found) == 3
    assert bad == [Bad(2, "longer than 1,000 bytes"), Bad(4, "longer than 1,000 bytes")]


@pytest.mark.parametrize(
    ("content", "format", "message"),
    [
        (b"\xff\xfe{\x00", "auto", "this is UTF-16"),
        (b"PAR1 and no more", "auto", "this is no whole Parquet file"),
        (b"{}", "trl", "this is no Parquet file, which format 'trl' does not fit"),
        (b"{}", "traces", "this is no Parquet file, which format 'traces' does not fit"),
    ],
)
def test_files_of_another_kind(tmp_path, content, format, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Recording(path, format)


def test_other_parquet_files(tmp_path):
    path = tmp_path / "file.parquet"
    parquet.write_table(arrow.table({"a": [1]}), path)
    with pytest.raises(ValueError, match="no columns prompt and completion; found a"):
        Recording(path)
    with pytest.raises(ValueError, match="this is a Parquet file, which format 'verl' does not fit"):
        Recording(path, "verl")
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(OSError):
            Recording(path)


def test_a_damaged_parquet_file_gives_what_is_whole(tmp_path):
    path = tmp_path / "file.parquet"
    rng = np.random.default_rng(0)
    rows = {"prompt": [[1]] * 4000, "completion": rng.integers(0, 10**6, (4000, 20)).tolist()}
    parquet.write_table(arrow.table(rows), path, row_group_size=1000, compression="zstd")
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 20_000] = bytes(20_000)
    path.write_bytes(data)
    found, bad, _ = imported(path)
    assert 1000 <= len(found) < 4000
    assert "damaged from here on" in bad[-1].reason


# -- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_ids": []}, "the completion is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"token_ids": [1, True]}, "the completion must be a list of token ids"),
        ({"token_ids": [1.0]}, "the completion must be a list of token ids"),
        ({"token_ids": [[1]]}, "the completion must be a list of token ids"),
        ({"token_ids": [1, {}]}, "the completion must be a list of token ids"),
        ({"token_ids": [-1]}, "the completion must hold token ids in [0, 2**31), got -1 to -1"),
        ({"prompt_token_ids": [2**31]}, "the prompt must hold token ids in [0, 2**31), got 2147483648 to 2147483648"),
        ({"token_ids": None}, "no completion, which is text or a list under one of: token_ids, "),
        ({"prompt_token_ids": 5}, "no prompt, which is text or a list under one of: prompt_token_ids, "),
        ({"step": -1}, "the policy version must be an integer in [0, 2**31), got -1"),
        ({"step": "3"}, "the policy version must be an integer in [0, 2**31), got '3'"),
        ({"step": 0.5}, "the policy version must be an integer in [0, 2**31), got 0.5"),
        ({"step": True}, "the policy version must be an integer in [0, 2**31), got True"),
        ({"step": float("inf")}, "the policy version must be an integer in [0, 2**31), got inf"),
        ({"token_ids": "\ud800"}, "'utf-8' codec can't encode character"),
        ({"token_ids": "text"}, "text needs --tokenizer NAME_OR_PATH"),
        ({"prompt_token_ids": "text"}, "text needs --tokenizer NAME_OR_PATH"),
    ],
)
def test_bad_values(tmp_path, change, reason):
    found, ((where, found_reason),), _ = of_rows(tmp_path, ROW, {**ROW, **change}, ROW)
    assert len(found) == 2
    assert where == 2
    assert found_reason.startswith(reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"problem_id": -1}, "problem_id must be a number of 64 bits, got -1"),
        ({"problem_id": True}, "problem_id must be a number of 64 bits, got True"),
        ({"by_text": 1}, "by_text must be true or false, got 1"),
        ({"isolated": 1}, "isolated must be true or false, got 1"),
        ({"context": [1] * 33}, "context must be at most 32 tokens, got 33"),
        ({"token_ids": []}, "the completion is empty"),
        ({"version": None}, "the policy version must be an integer"),
        ({"root": [1, 2, 3]}, "root must be a length and a number of 64 bits, got [1, 2, 3]"),
        ({"root": [2**31, 2]}, "root must be a length"),
        ({"features": "AAAA"}, "features do not fit 2 tokens"),
        ({"features": "$"}, "features do not fit 2 tokens"),
        ({"features": 3}, "features do not fit 2 tokens"),
    ],
)
def test_bad_values_of_exported_lines(tmp_path, change, reason):
    rollout = importers.Rollout(1, 2, np.array([3], np.int32), np.array([4, 5], np.int32), no_features(2))
    row = json.loads(exported_line(rollout))
    assert len(row["features"]) == -(-2 * FEATURE_WORDS * 8 // 3) * 4
    found, (bad,), _ = of_rows(tmp_path, row, {**row, **change})
    assert found == [plain(rollout)]
    assert bad.reason.startswith(reason)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[]", "this must be an object, got list"),
        (b"nonsense", "Expecting value: line 1"),
        (b"\xff", "'utf-8' codec can't decode"),
        (b"[" * 100_000, "maximum recursion depth"),
        (b'{"token_ids": 1' + b"0" * 5000 + b"}", "Exceeds the limit"),
        (b"\0", "Expecting value"),
    ],
)
def test_what_is_no_json(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line + b"\n" + json.dumps(ROW).encode())
    found, (bad,), _ = imported(path)
    assert len(found) == 1
    assert bad.where == 1
    assert reason in bad.reason


def test_text_that_cannot_be_used(tmp_path, tokenizer):
    half = [{"role": "user", "content": "\ud800"}]
    rows = [
        {"prompt": " \n", "completion": "a"},
        {"prompt": "a", "completion": ""},
        {"prompt": half, "completion": "a"},
        {"prompt": MESSAGES, "completion": half},
        {"prompt": "a", "completion": [*MESSAGES, *MESSAGES]},
        {"prompt": [{"content": {"a": [1]}}], "completion": [{"role": 3}]},
        {"prompt": [1], "completion": [len(tokenizer)]},
        {"prompt": [len(tokenizer)], "completion": "a"},
        {"prompt": "a", "completion": "b"},
    ]
    found, bad, _ = of_rows(tmp_path, *rows, tokenizer=tokenizer)
    assert [line.where for line in bad] == list(range(1, 9))
    assert [tokenizer.decode(rollout.tokens) for rollout in found] == ["b"]
    assert bad[6].reason == f"token {len(tokenizer)} is none of the tokenizer's {len(tokenizer)}"
    assert bad[4].reason.startswith("a completion of several messages")


NAMES = ["prompt_token_ids", "prompt", "reward", "step", "problem_id", "by_text", "context", "root", "features"]
LINES = [json.dumps({**ROW, "token_ids": [i, i + 1]}).encode() for i in range(6)]
# Rows without a completion, which is what "token_ids" would be.
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*NAMES, "other"]), inner),
    max_leaves=6,
)


@st.composite
def damaged(draw):
    """Lines that are cut, doubled, out of order or random."""
    cut = st.tuples(st.sampled_from(LINES), st.integers(0, 80)).map(lambda pair: pair[0][: pair[1]])
    junk = JUNK.map(lambda value: json.dumps(value).encode())
    lines = draw(st.lists(st.sampled_from(LINES) | cut | junk | st.binary(max_size=20), max_size=12))
    data = draw(st.sampled_from([b"\n", b"\r\n"])).join(lines)
    return data[: max(len(data) - draw(st.integers(0, 100)), 0)] if draw(st.booleans()) else data


@settings(deadline=None, derandomize=True)
@given(damaged())
def test_intact_lines_enter_and_nothing_else(tmp_path_factory, data):
    assume(not data.startswith((b"\xff\xfe", b"\xfe\xff", b"PAR1", b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd")))
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.write_bytes(data)
    found, bad, report = imported(path)
    lines = [line.strip() for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    assert [r.tokens for r in found] == [json.loads(line)["token_ids"] for line in lines if line in LINES]
    assert report.bad == len(bad) == sum(line not in LINES for line in lines)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys((*NAMES, "token_ids"), JUNK)), min_size=1, max_size=5))
def test_no_line_stops_an_import(tmp_path_factory, rows):
    found, bad, _ = of_rows(tmp_path_factory.mktemp("lines"), *rows)
    assert len(found) + len(bad) == len(rows)


# -- batches and files that are imported twice -----------------------------------------------------------------------


def write_many(path, count):
    path.write_text("".join(json.dumps({**ROW, "token_ids": [i] * 10}) + "\n" for i in range(count)))
    return path


def test_a_file_is_imported_once(tmp_path, monkeypatch):
    monkeypatch.setattr(importers, "BATCH_TOKENS", 100)
    storage = MemoryStorage()
    path = write_many(tmp_path / "a.jsonl", 35)
    found, _, report = imported(path, storage=storage)
    folder = storage.folder(path_of(problem_of_prompt([1, 2])))
    assert (len(found), len(folder.sizes()), report.known) == (35, 4, [])
    assert len(storage.files) == 5, "shards, and how far it has been imported"
    files = dict(storage.files)
    other_name = tmp_path / "b.jsonl"
    other_name.write_bytes(path.read_bytes())
    for again in (path, other_name):
        _, _, report = imported(again, storage=storage)
        assert (report.rollouts, report.known) == (0, [again])
        assert storage.files == files
    write_many(path, 36)
    found, _, report = imported(path, storage=storage)
    assert report.rollouts == 36


def test_a_file_that_is_named_twice_is_imported_once(tmp_path):
    storage = MemoryStorage()
    path = write_many(tmp_path / "a.jsonl", 3)
    recordings = [Recording(path), Recording(path)]
    report = import_recordings(recordings, Converter(), storage, Origin())
    assert (report.rollouts, report.known) == (3, [path])


@pytest.mark.parametrize(("num_files", "num_again"), [(0, 35), (1, 35), (2, 25), (3, 25), (4, 15)])
def test_an_import_that_was_interrupted_goes_on(tmp_path, monkeypatch, num_files, num_again):
    """After each file: a shard may be there of which it was not noted that it is."""
    monkeypatch.setattr(importers, "BATCH_TOKENS", 100)
    path = write_many(tmp_path / "a.jsonl", 35)
    whole, _, _ = imported(path)

    class Full(MemoryStorage):
        def write(self, name, data):
            if len(self.files) == num_files:
                raise OSError("disk full")
            super().write(name, data)

    storage = Full()
    with pytest.raises(OSError, match="disk full"):
        imported(path, storage=storage)
    assert len(stored(storage)) < 35
    found, _, report = imported(path, storage=MemoryStorage(storage.files))
    assert report.rollouts == num_again
    assert sorted(found, key=lambda r: r.tokens) == sorted(whole, key=lambda r: r.tokens)


def test_another_tokenizer_makes_another_writer(tmp_path):
    recording = Recording(write_many(tmp_path / "a.jsonl", 3))
    assert recording.writer(Origin()) == recording.writer(Origin(model="a"))
    assert recording.writer(Origin()) != recording.writer(Origin(tokenizer="a"))


def test_small_files_share_a_shard_of_their_problem(tmp_path):
    storage = MemoryStorage()
    recordings = [Recording(write_many(tmp_path / f"{i}.jsonl", i + 1)) for i in range(5)]
    report = import_recordings(recordings, Converter(), storage, Origin())
    assert (report.rollouts, len(storage.folder(path_of(problem_of_prompt([1, 2]))).sizes())) == (15, 1)
    assert Contents(storage).num_bytes == report.num_bytes
    report = import_recordings(recordings, Converter(), storage, Origin())
    assert (report.rollouts, len(report.known)) == (0, 5)


@pytest.mark.parametrize("mark", [b"", b"one", b"\xff"])
def test_what_says_how_far_an_import_came_may_be_damaged(tmp_path, mark):
    """Then it begins anew, and what history has it has once."""
    storage = MemoryStorage()
    path = write_many(tmp_path / "a.jsonl", 3)
    whole, _, _ = imported(path, storage=storage)
    (name,) = (name for name in storage.files if name.startswith("imports/"))
    storage.files[name] = mark
    found, _, report = imported(path, storage=storage)
    assert (report.rollouts, report.known) == (3, [])
    assert found == whole


def test_each_problem_has_a_folder_and_those_of_text_are_named(tmp_path, tokenizer):
    storage = MemoryStorage()
    rows = [ROW, {**ROW, "prompt_token_ids": [9]}, {"prompt": "What is", "completion": "the sum"}, ROW]
    found, _, _ = of_rows(tmp_path, *rows, storage=storage, tokenizer=tokenizer)
    of_text = text_key(tokenizer, tokenizer.encode("What is"))
    ids = [problem_of_prompt([1, 2]), problem_of_prompt([9]), of_text]
    assert sorted(r.problem_id for r in found) == sorted([*ids, ids[0]])
    for problem_id in ids:
        folder = storage.folder(path_of(problem_id))
        (name,) = folder.sizes()
        assert {entry.rollout.problem_id for entry in read_shard(folder, name, Origin())[1]} == {problem_id}
    assert problems_by_text(storage) == {of_text}


def test_a_dry_import_writes_nothing_and_finds_the_same_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("nonsense\n" + json.dumps(ROW))
    report = import_recordings([Recording(path)], Converter(), None, Origin())
    assert (report.bad, report.rollouts, report.num_bytes) == (1, 1, 0)


def test_only_the_first_record_is_read_to_see_whether_text_needs_a_tokenizer(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("nonsense\n" + json.dumps({"prompt": "a", "response": "b"}))
    with pytest.raises(ValueError, match=r"rows.jsonl:2: text needs --tokenizer"):
        Converter().check(Recording(path))
    path.write_text(json.dumps(ROW))
    Converter().check(Recording(path))
