"""Logs that others have written become rollouts; what cannot be used is named by its line."""

import json
import math
import os
import threading

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet as parquet

from rollout_spec.history.logs import Copies, read
from rollout_spec.history.problems import Problems, problem_of_prompt
from rollout_spec.history.store import CONTEXT_TOKENS, FIRST_TIME


class Tokenizer:
    """Words `w<id>`; messages are rendered with the role's number first, and an answer is asked for by w90."""

    def __len__(self):
        return 100

    def __call__(self, text, add_special_tokens, verbose):
        assert add_special_tokens is False
        if "\ud800" in text:
            raise TypeError("TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]")
        return {"input_ids": [int(word[1:]) for word in text.split()]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
        roles = {"user": "w91", "assistant": "w90", "tool": "w92"}
        told = [[message[name] for name in ("content", "tool_calls") if name in message] for message in messages]
        words = [" ".join([roles[message["role"]], *said]) for message, said in zip(messages, told, strict=True)]
        return " ".join(words + (["w90"] if add_generation_prompt else []))


def write_lines(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def write_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def read_all(path, tokenizer=None, **options):
    bad = []
    found = list(read(path, tokenizer, lambda *about: bad.append(about), **options))
    assert all(rollout.context.tolist() == prompt[-CONTEXT_TOKENS:].tolist() for rollout, prompt in found)
    return [rollout for rollout, _ in found], bad


IDS = {"prompt_token_ids": [5, 6, 7], "token_ids": [8, 9]}
USER = [{"role": "user", "content": "w5 w6"}]
CALL = {"role": "assistant", "content": "w7", "tool_calls": "w8"}
ANSWER = {"role": "assistant", "content": "w8 w9"}


@pytest.mark.parametrize(
    ("row", "prompt", "tokens", "order"),
    [
        (IDS, [5, 6, 7], [8, 9], 0),
        ({"prompt_ids": [5], "completion_ids": [8], "step": 4}, [5], [8], 4),
        ({**IDS, "prompt": "w1", "completion": "w2", "version": 3.0}, [5, 6, 7], [8, 9], 3),
        ({**IDS, "step": 2**31 - 1}, [5, 6, 7], [8, 9], FIRST_TIME - 1),  # still older than what a run samples
        ({"input": "w5 w6", "output": "w8 w9", "step": 2, "score": 1.0}, [5, 6], [8, 9], 2),  # verl
        ({"prompt": "w5", "completion": "w8", "step": 7, "advantage": 0.1}, [5], [8], 7),  # TRL
        ({"prompt": USER, "completion": "w8 w9"}, [91, 5, 6, 90], [8, 9], 0),
        ({"prompt": USER, "completion": [ANSWER], "step": 2}, [91, 5, 6, 90], [8, 9], 2),
        ({"prompt": USER, "completion": [{**ANSWER, "tool_calls": None}]}, [91, 5, 6, 90], [8, 9], 0),
        # In Parquet each message has the fields of all.
        ({"prompt": [CALL, *USER], "completion": "w8"}, [90, 7, 8, 91, 5, 6, 90], [8], 0),
        ({"prompt": "w5", "completion": "w8 \ufffd\ufffd"}, [5], [8], 0),  # it ended within a character
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_logs_of_frameworks_are_read(tmp_path, row, prompt, tokens, order, kind):
    path = tmp_path / "log"
    if kind == "parquet":
        write_parquet(path, [row, row])
    else:
        write_lines(path, [row, "", row])
    rollouts, bad = read_all(path, Tokenizer())
    assert bad == []
    assert len(rollouts) == 2
    for rollout in rollouts:
        assert (rollout.tokens.tolist(), rollout.order) == (tokens, order)
        assert rollout.context.tolist() == prompt[-CONTEXT_TOKENS:]
        assert rollout.problem_id == problem_of_prompt(prompt)
        assert rollout.tokens.dtype == rollout.context.dtype == np.int32


def test_an_engine_recognises_the_prompts(tmp_path):
    prompt = list(range(40))
    (rollout,), _ = read_all(write_lines(tmp_path / "log", [{"prompt_token_ids": prompt, "token_ids": [8]}]))
    problems = Problems()
    problems.add_root(rollout.problem_id, rollout.root)
    later = np.array([*prompt, 8, 50, 51], np.int32)
    assert problems.start(later).problem_id == rollout.problem_id


def test_a_problem_may_be_named_and_a_step_given(tmp_path):
    path = write_lines(tmp_path / "log", [{**IDS, "problem_id": 2**64 - 1, "step": 3}])
    (rollout,), _ = read_all(path, step=5)
    assert (rollout.problem_id, rollout.order, rollout.root) == (2**64 - 1, 5, None)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "Expecting property name"),
        ("[1]", "must be an object, got list"),
        ({"prompt_token_ids": [1]}, "no prompt and completion under one of these pairs of names: prompt_token_ids and"),
        ({**IDS, "token_ids": []}, "the completion is empty"),
        ({**IDS, "prompt_token_ids": []}, "the prompt is empty"),
        ({**IDS, "token_ids": [1, 100]}, "the completion has tokens 1 to 100, and there are 100"),
        ({**IDS, "prompt_token_ids": [-1]}, "the prompt has tokens -1 to -1"),
        ({**IDS, "token_ids": [2**31]}, "token ids have 31 bits"),
        ({**IDS, "token_ids": [True]}, "must be text or a list of token ids"),
        ({**IDS, "token_ids": 7}, "must be text or a list of token ids"),
        ({**IDS, "step": -1}, "the step must be an integer of 31 bits, got -1"),
        ({**IDS, "step": 1.5}, "the step must be an integer"),
        ({**IDS, "step": math.inf}, "the step must be an integer"),
        ({**IDS, "problem_id": 2**64}, "problem_id must be an integer of 64 bits"),
        ({"prompt": [{"role": "nobody", "content": ""}], "completion": "w5"}, "chat template cannot render it"),
        ({"prompt": "w5", "completion": "\ufffd w5"}, "the completion's text has U+FFFD"),
        ({"prompt": "w5", "completion": USER}, "the completion must be an assistant's text, got {'content': 'w5 w6'"),
        ({"prompt": "w5", "completion": [ANSWER, CALL]}, "the completion has 2 messages, as with tools"),
        ({"prompt": "w5", "completion": [CALL]}, "the completion is more than text: it has tool_calls"),
        ({"prompt": "w5", "completion": [{**ANSWER, "content": [{"text": "w5"}]}]}, "must be an assistant's text"),
        ({"prompt": "w5", "completion": 7}, "completion must be text or a list of token ids, got 7"),
        ({"prompt": "w5", "completion": "w5 \ud800"}, "the tokenizer cannot encode completion: TextEncodeInput"),
        ({"prompt": "w5 \ud800", "completion": "w5"}, "the tokenizer cannot encode prompt: TextEncodeInput"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_and_left_out(tmp_path, row, reason):
    rollouts, bad = read_all(write_lines(tmp_path / "log", [IDS, row, IDS]), Tokenizer())
    assert len(rollouts) == 2
    ((number, said),) = bad
    assert number == 2
    assert reason in said


def test_text_needs_a_tokenizer(tmp_path):
    rollouts, bad = read_all(write_lines(tmp_path / "log", [{"prompt": "a", "completion": "b"}, IDS]))
    assert len(rollouts) == 1
    assert bad == [(1, "text needs --tokenizer NAME_OR_PATH")]


def test_a_log_that_ends_in_the_middle_gives_what_there_is(tmp_path):
    path = write_lines(tmp_path / "log", [IDS] * 1000)
    path.write_bytes(path.read_bytes()[:-9])
    rollouts, bad = read_all(path)
    assert (len(rollouts), [number for number, _ in bad]) == (999, [1000])
    path = write_parquet(path, [IDS])
    path.write_bytes(path.read_bytes()[:-3])
    rollouts, ((_, reason),) = read_all(path)
    assert rollouts == []
    assert reason.startswith("this is no whole Parquet file")


def test_of_a_parquet_file_only_what_counts_is_read(tmp_path):
    """Values that Python has no type for, in columns that nobody asked for and in one that counts."""
    long_ago = pyarrow.array([-(2**62)] * 3, pyarrow.timestamp("us"))
    columns = {name: [value] * 3 for name, value in IDS.items()}
    others = {"when": long_ago, "took": long_ago.cast(pyarrow.int64()).cast(pyarrow.duration("us"))}
    parquet.write_table(pyarrow.table({**columns, **others}), tmp_path / "log")
    assert [len(found) for found in read_all(tmp_path / "log")] == [3, 0]
    parquet.write_table(pyarrow.table({**columns, "step": long_ago}), tmp_path / "log")
    rollouts, bad = read_all(tmp_path / "log")
    assert (rollouts, [number for number, _ in bad]) == ([], [1, 2, 3])
    parquet.write_table(pyarrow.table(others), tmp_path / "log")
    rollouts, bad = read_all(tmp_path / "log")
    assert (rollouts, len(bad)) == ([], 3)
    assert "no prompt and completion" in bad[0][1]


def test_a_damaged_page_costs_its_row_group(tmp_path):
    rows = [{**IDS, "token_ids": [number % 100] * 50} for number in range(300)]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "log", row_group_size=100, compression="zstd", use_dictionary=False)
    group = parquet.ParquetFile(tmp_path / "log").metadata.row_group(1)
    data = bytearray((tmp_path / "log").read_bytes())
    start = group.column(1).data_page_offset
    data[start : start + group.column(1).total_compressed_size] = bytes(group.column(1).total_compressed_size)
    (tmp_path / "log").write_bytes(data)
    rollouts, ((number, reason),) = read_all(tmp_path / "log")
    assert (len(rollouts), number) == (200, 101)
    assert reason.startswith("rows 101 to 200 are damaged")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_log_may_come_from_a_pipe(tmp_path, kind):
    log, pipe = tmp_path / "log", tmp_path / "pipe"
    (write_parquet if kind == "parquet" else write_lines)(log, [IDS] * 3)
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(log.read_bytes()), daemon=True)
    writer.start()
    if kind == "jsonl":
        assert [len(found) for found in read_all(pipe)] == [3, 0]
    else:
        with pytest.raises(OSError, match="is a pipe, and Parquet is only read from a file"):
            read_all(pipe)
    writer.join(10)


# -- what logs have twice counts once, and what was said twice in truth stays -----------------------------------------


def find(*steps):
    """Of each step the problems whose groups are copies. Texts are numbers."""
    copies = Copies()
    arrays = [{p: [np.array([text], np.int32) for text in group] for p, group in step.items()} for step in steps]
    found = [copies.find(step) for step in arrays]
    assert copies.num_dropped == sum(len(step[p]) for step, some in zip(steps, found, strict=True) for p in some)
    return found[1:]


STEP = {1: [10, 11, 12, 11], 2: [20, 20, 20, 20], 3: [30, 31, 32, 33]}
NEXT = {4: [40, 41], 1: [10, 11, 13, 11]}


@pytest.mark.parametrize(
    ("later", "copied"),
    [
        ([STEP], [{1, 2, 3}]),
        ([{p: group[::-1] for p, group in reversed(STEP.items())}], [{1, 2, 3}]),
        ([STEP, STEP], [{1, 2, 3}] * 2),
        ([NEXT, STEP, NEXT], [set(), {1, 2, 3}, {1, 4}]),
        ([{1: STEP[1], 2: STEP[2], 5: [50]}, {5: [50]}], [{1, 2}, {5}]),  # logs that overlap
        ([{3: STEP[3]}], [{3}]),
        ([{1: STEP[1][2:], 2: STEP[2], 3: STEP[3]}], [{1, 2, 3}]),  # a log that begins within a group
        ([{1: STEP[1], 2: STEP[2], 3: [30, 31, 32, 34]}], [set()]),  # a prompt that both have says something else
        ([{2: STEP[2], 5: [50]}], [set()]),  # one prompt of several: it may always be answered so
        ([{1: [10, 11, 12, 11, 11], 2: STEP[2], 3: STEP[3]}], [set()]),  # more than the earlier step has
    ],
)
def test_a_group_is_a_copy_where_all_that_two_steps_share_is_equal(later, copied):
    assert find(STEP, *later) == copied


def test_a_policy_that_often_says_the_same_loses_nothing():
    rng = np.random.default_rng(0)
    steps = [
        {int(p): rng.choice(2, 4, p=[0.9, 0.1]).tolist() for p in rng.permutation(40)[:8]}  # shuffled epochs
        for _ in range(40)
    ]
    assert not any(find({}, *steps))
