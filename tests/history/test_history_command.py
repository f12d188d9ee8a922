"""`rollout-spec history` from end to end: what it prints, writes and refuses."""

from __future__ import annotations

import json
import sys

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from rollout_spec.cli import main
from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.features.format import MAX_CODE, no_features, pack, unpack
from rollout_spec.history import command, recordings
from rollout_spec.history.contents import Contents
from rollout_spec.history.partitions import path_of, problem_ids, problems_by_text, write_rollouts
from rollout_spec.history.rollout import Rollout, Root
from rollout_spec.history.shards import Entry, Origin, read_shard, write_shard
from rollout_spec.history.storage import LocalStorage, open_storage
from rollout_spec.history.traces import read_traces
from tests.history.made_up import chat_tokenizer, plain, stored
from tests.test_cli import run_without_numba


def history(*arguments):
    return main(["history", *map(str, arguments)])


@pytest.fixture
def recording(tmp_path):
    """Twelve rollouts of three problems under versions 0 to 3, and a line that cannot be used."""
    rows = [{"prompt_token_ids": [i % 3], "token_ids": [i] * 10, "reward": i / 2, "step": i // 3} for i in range(12)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:5]) + "{\n")
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows[5:]))
    return path


@pytest.fixture
def folder(tmp_path, recording, capsys):
    path = tmp_path / "history"
    assert history("import", recording, "--into", path) == 0
    capsys.readouterr()
    return path


def test_formats_are_those_of_recordings():
    assert command.FORMATS == recordings.FORMATS


def test_import(tmp_path, recording, capsys):
    into = tmp_path / "history"
    assert history("import", recording, "--into", into) == 0
    out, err = capsys.readouterr()
    assert out.startswith("12 rollouts of 3 problems, 120 tokens (")
    assert out.endswith("bytes per token; 1 lines left out\n")
    assert err == f"{recording}:6: Expecting property name enclosed in double quotes: line 2 column 1 (char 2)\n"
    assert len(stored(open_storage(into))) == 12
    files = sorted(into.rglob("*"))
    assert len(shards_in(into)) == 3, "one for each problem"
    assert history("import", recording, "--into", into) == 0
    assert capsys.readouterr().out == f"{recording}: already imported (--again imports what has been pruned since)\n"
    assert sorted(into.rglob("*")) == files
    assert history("prune", into, "--max-bytes", "0", "--yes") == 0
    assert history("import", recording, "--into", into, "--again") == 0
    assert history("import", recording, "--into", into, "--again") == 0
    assert len(stored(open_storage(into))) == 12


def test_a_strict_import_writes_all_or_nothing(tmp_path, recording, capsys):
    into = tmp_path / "history"
    good = tmp_path / "good.jsonl"
    good.write_text(json.dumps({"prompt": [1], "response": [2]}))
    assert history("import", good, recording, "--into", into, "--strict") == 2
    assert "nothing was imported: 1 lines cannot be used" in capsys.readouterr().err
    assert not into.exists()
    assert history("import", good, "--into", into, "--strict") == 0
    assert len(stored(open_storage(into))) == 1


@pytest.mark.parametrize(("num_bad", "status"), [(0, 0), (3, 0), (4, 1), (30, 1)])
def test_an_import_of_which_most_lines_are_left_out_fails_unless_it_may(tmp_path, num_bad, status, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps({"prompt": [1], "response": [2]}) + "\n") * 3 + "x\n" * num_bad)
    assert history("import", path, "--into", tmp_path / "a") == status
    out, err = capsys.readouterr()
    assert out.startswith("3 rollouts of 1 problems")
    assert len(stored(open_storage(tmp_path / "a"))) == 3
    assert (f"{num_bad} of {num_bad + 3} lines cannot be used" in err) == bool(status)
    assert ("--lenient" in err) == bool(status)
    assert history("import", path, "--into", tmp_path / "b", "--lenient") == 0
    assert len(stored(open_storage(tmp_path / "b"))) == 3
    assert "--lenient" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        history("import", path, "--into", tmp_path / "b", "--lenient", "--strict")


def test_the_first_errors_are_named(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("x\n" * 50)
    assert history("import", path, "--into", tmp_path / "history") == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == command.MAX_ERRORS + 2
    assert err[-2] == "... and 30 more lines"
    assert err[-1] == "rollout-spec history: nothing was imported: 50 lines cannot be used"


def test_inputs_that_cannot_be_imported(tmp_path, recording, capsys):
    empty, foreign, text = tmp_path / "empty", tmp_path / "foreign.parquet", tmp_path / "text.jsonl"
    empty.write_text("")
    parquet.write_table(arrow.table({"a": [1]}), foreign)
    text.write_text(json.dumps({"input": "a", "output": "b"}))
    into = tmp_path / "history"
    for arguments, message in (
        ([tmp_path / "none"], "No such file or directory"),
        ([tmp_path], "Is a directory"),
        ([empty], "no rollouts found"),
        ([foreign], "no columns prompt and completion"),
        ([text], f"{text}:1: text needs --tokenizer NAME_OR_PATH"),
        ([text, "--tokenizer", tmp_path / "none"], "--tokenizer "),
        ([recording, "--format", "trl"], "this is no Parquet file"),
        ([recording, "--version", "-1"], "--version must be in [0, 2**31), got -1"),
        ([recording, empty, foreign], "no columns prompt and completion"),  # before anything is written
    ):
        assert history("import", *arguments, "--into", into) == 2
        err = capsys.readouterr().err
        assert err.startswith("rollout-spec history: ")
        assert message in err
        assert err.count("\n") == 1
        assert not into.exists()
    assert history("import", recording, "--into", recording) == 2
    assert "Not a directory" in capsys.readouterr().err
    assert history("import", recording, "--into", "nothing://there") == 2
    assert "cannot be used" in capsys.readouterr().err


def test_import_of_text(tmp_path, capsys):
    pytest.importorskip("trl")
    tokenizer = tmp_path / "tokenizer"
    chat_tokenizer("qwen3", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]).save_pretrained(tokenizer)
    path, into = tmp_path / "1.jsonl", tmp_path / "history"
    path.write_text(json.dumps({"input": "What is", "output": "the sum", "score": 1.0, "step": 1}))
    assert history("import", path, "--into", into, "--tokenizer", tokenizer) == 0
    (rollout,) = stored(open_storage(into))
    assert rollout.by_text
    capsys.readouterr()
    assert history("show", into, "--problem", f"{rollout.problem_id:x}", "--tokenizer", tokenizer) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 rollouts, found by the text of their prompt\n")
    assert out.endswith('  "the sum"\n')
    assert history("stats", into, "--json") == 0
    ((origin),) = json.loads(capsys.readouterr().out)["origins"]
    assert len(origin["tokenizer"]) == 32
    assert (origin["model"], origin["vocab_size"], origin["shards"]) == (str(tokenizer), None, 1)


def test_stats(folder, capsys):
    of_problem = shards_in(folder)[0].parent
    foreign = of_problem / "foreign.parquet"
    foreign.write_bytes(b"PAR1")
    damaged = of_problem / f"v{'1'.zfill(10)}-{'0' * 32}.parquet"
    damaged.write_bytes(b"")
    names = {str(path.relative_to(folder)) for path in (foreign, damaged)}
    for path in (of_problem, folder, folder / "problems", of_problem.parent):
        (path / "other file").write_bytes(b"is left alone")
    (folder / "problems" / "other folder").mkdir()
    assert history("stats", folder) == 0
    out, err = capsys.readouterr()
    assert out.startswith("12 rollouts of 3 problems, 120 tokens\n")
    assert "5 shards of " in out
    assert "3 shards of unknown origin" in out
    assert "versions 0 to 3" in out
    assert "         3          3           30\n" in out
    assert {line.split(" cannot be used: ")[0] for line in err.splitlines()} == names
    assert history("stats", folder, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    size = sum(path.stat().st_size for path in shards_in(folder))
    assert (figures["bytes"], figures["bytes_per_token"]) == (size, size / 120)
    assert (figures["rollouts"], figures["problems"], figures["tokens"], figures["shards"]) == (12, 3, 120, 5)
    assert figures["versions"][1] == {"version": 1, "rollouts": 3, "tokens": 30}
    assert figures["refused"].keys() == names


def test_show(folder, capsys):
    assert history("show", folder) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 4
    problem = f"{problem_of_prompt([1]):016x}"
    assert f"{problem}          4" in out
    assert history("show", folder, "--limit", 1) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert history("show", folder, "--problem", problem, "--limit", 2) == 0
    assert capsys.readouterr().out.splitlines() == [
        "4 rollouts",
        "   version   tokens   reward  begins with",
        "         3       10        5  10 10 10 10 10 10 10 10 10 10",
        "         2       10      3.5  7 7 7 7 7 7 7 7 7 7",
    ]
    assert history("show", folder, "--problem", "12") == 2
    assert "there is no history of problem 0000000000000012 here" in capsys.readouterr().err
    assert history("show", folder, "--limit", 0) == 2


def versions(folder):
    return sorted(rollout.version for rollout in stored(open_storage(folder)))


def shards_in(folder):
    """Paths of all problems' shards."""
    return sorted(folder.glob("problems/*/*/*.parquet"))


def a_problem(folder, problem_id=1):
    """A problem's folder in a history."""
    return open_storage(folder).folder(path_of(problem_id))


def test_prune_by_versions_and_problem(folder, capsys):
    files = shards_in(folder)
    assert history("prune", folder, "--keep-versions", 2, "--dry-run") == 0
    assert capsys.readouterr().out.startswith("would remove 6 rollouts, 60 tokens, about ")
    assert shards_in(folder) == files
    assert len(versions(folder)) == 12
    assert history("prune", folder, "--keep-versions", 2) == 0
    assert versions(folder) == [2] * 3 + [3] * 3
    assert history("prune", folder, "--problem", f"{problem_of_prompt([0]):x}") == 0
    left = stored(open_storage(folder))
    assert {rollout.problem_id for rollout in left} == {problem_of_prompt([1]), problem_of_prompt([2])}
    assert len(left) == 4
    assert history("prune", folder, "--keep-versions", 9) == 0
    assert len(versions(folder)) == 4


@pytest.mark.parametrize("first_token", range(8))  # which decides in what order shards are read
def test_what_was_pruned_can_be_imported_again_and_what_stayed_is_there_once(tmp_path, first_token):
    rows = [{"prompt_token_ids": [1, 2], "token_ids": [first_token, i], "step": i} for i in range(4)]
    recording, folder = tmp_path / "rows.jsonl", tmp_path / "history"
    recording.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert history("import", recording, "--into", folder) == 0
    assert history("prune", folder, "--keep-versions", 2) == 0
    assert versions(folder) == [2, 3]
    for _ in range(2):
        assert history("import", recording, "--into", folder, "--again") == 0
        assert versions(folder) == [0, 1, 2, 3]


def test_an_import_that_is_repeated_and_interrupted_can_be_continued(tmp_path, monkeypatch, capsys):
    files, folder = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "history"
    for token, file in enumerate(files):  # rollouts of one problem, whose shard both share
        rows = [{"prompt_token_ids": [1, 2], "token_ids": [token, i], "step": i} for i in range(4)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert history("import", *files, "--into", folder) == 0
    assert history("prune", folder, "--keep-versions", 2) == 0

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("rollout_spec.history.importers.write_rollouts", fail)
    assert history("import", files[0], "--into", folder, "--again") == 2
    assert versions(folder) == [2, 3], "of the other file"
    monkeypatch.undo()
    assert history("import", files[0], "--into", folder) == 0
    assert versions(folder) == [0, 1, 2, 2, 3, 3]


def test_a_repeated_import_of_what_cannot_be_used_removes_nothing(tmp_path, folder, recording, capsys):
    recording.write_text("{\n")
    assert history("import", recording, "--into", folder, "--again") == 2
    assert len(versions(folder)) == 12


def test_prune_by_bytes(folder, capsys):
    size = sum(path.stat().st_size for path in shards_in(folder))
    assert history("prune", folder, "--max-bytes", size) == 0
    assert len(versions(folder)) == 12
    assert history("prune", folder, "--max-bytes", size * 4 // 5) == 0
    assert versions(folder) == [1] * 3 + [2] * 3 + [3] * 3
    assert history("prune", folder, "--max-bytes", "0kB") == 2
    assert "nothing would be left" in capsys.readouterr().err
    assert len(versions(folder)) == 9
    assert history("prune", folder, "--max-bytes", "0GB", "--yes") == 0
    assert not shards_in(folder)


def test_the_oldest_versions_go_first_wherever_they_are(tmp_path):
    made = [Rollout(1, version, np.zeros(0, np.int32), np.zeros(9, np.int32)) for version in (5, 2, 9, 1)]
    for batch, some in enumerate((made[:2], made[2:])):
        write_shard(a_problem(tmp_path), [Entry(1, batch, rollout) for rollout in some], Origin())
    size = sum(path.stat().st_size for path in shards_in(tmp_path))
    assert history("prune", tmp_path, "--max-bytes", size // 2) == 0
    assert sorted(versions(tmp_path)) == [5, 9]


def test_what_is_in_two_shards_counts_once(tmp_path):
    """Such as a shard of several batches, and one of them that was not deleted after they were merged."""
    made = [
        Entry(1, batch, Rollout(1, batch, np.zeros(0, np.int32), np.full(9, batch, np.int32))) for batch in range(3)
    ]
    write_shard(a_problem(tmp_path), made[:2], Origin())
    write_shard(a_problem(tmp_path), made[1:], Origin())
    assert sorted(versions(tmp_path)) == [0, 1, 2]


def test_what_stays_of_a_shard_is_of_the_same_tokenizer(tmp_path):
    made = [Rollout(1, version, np.zeros(0, np.int32), np.zeros(9, np.int32)) for version in (1, 2)]
    origin = Origin("tokenizer", 10, "model", "states")
    write_shard(a_problem(tmp_path), [Entry(1, 0, rollout) for rollout in made], origin)
    assert history("prune", tmp_path, "--keep-versions", 1) == 0
    (shard,) = Contents(open_storage(tmp_path))
    assert (shard.info.origin, len(shard.entries)) == (origin, 1)


def test_prune_leaves_alone_what_it_cannot_read(folder):
    foreign = shards_in(folder)[0].with_name("foreign.parquet")
    foreign.write_bytes(b"PAR1")
    assert history("prune", folder, "--max-bytes", 0, "--yes") == 0
    assert foreign.read_bytes() == b"PAR1"


def test_prune_loses_nothing_when_it_is_interrupted(folder, monkeypatch, capsys):
    before = versions(folder)

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("rollout_spec.history.contents.write_shard", fail)
    assert history("prune", folder, "--keep-versions", 1) == 2
    assert "disk full" in capsys.readouterr().err
    assert versions(folder) == before
    monkeypatch.undo()
    monkeypatch.setattr("rollout_spec.history.storage.LocalStorage.delete", fail)
    assert history("prune", folder, "--keep-versions", 1) == 2
    assert versions(folder).count(3) == 3  # in two shards, and taken once


def test_prune_waits_for_others(folder, capsys):
    with open_storage(folder).tidying() as is_ours:
        assert is_ours
        assert history("prune", folder, "--keep-versions", 1) == 2
    assert "another process removes shards" in capsys.readouterr().err
    assert len(versions(folder)) == 12


@pytest.mark.parametrize("options", [[], ["--keep-versions", "0"]])
def test_prune_needs_to_know_what(folder, options, capsys):
    assert history("prune", folder, *options) == 2
    assert "--keep-versions" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--max-bytes", "2XB"], ["--max-bytes", "-1"], ["--problem", "xyz"]])
def test_values_that_are_none(folder, option):
    with pytest.raises(SystemExit):
        history("prune", folder, *option)


def test_sizes():
    assert command._num_bytes("2GB") == 2 * 10**9
    assert command._num_bytes("1.5M") == 1_500_000
    assert command._num_bytes("12") == 12


def a_history(path, features=None):
    rollout = Rollout(2**64 - 1, 5, np.array([1], np.int32), np.array([2, 3], np.int32), features)
    other = rollout._replace(version=6, root=Root(4, 2**64 - 1), by_text=True, reward=0.1)
    origin = Origin("tokenizer", 10, "model", "states")
    write_rollouts(open_storage(path), [Entry(1, 0, rollout), Entry(1, 0, other)], origin)
    return [rollout, other]


def test_an_export_is_imported_as_it_was(tmp_path):
    a_history(tmp_path / "a", no_features(2) + 7)
    assert history("export", tmp_path / "a", tmp_path / "rows.jsonl") == 0
    assert history("import", tmp_path / "rows.jsonl", "--into", tmp_path / "b", "--strict") == 0
    assert stored(open_storage(tmp_path / "b")) == stored(open_storage(tmp_path / "a"))
    assert history("import", tmp_path / "rows.jsonl", "--into", tmp_path / "c", "--version", 9) == 0
    assert versions(tmp_path / "c") == [9, 9]


def test_an_export_can_be_replayed(tmp_path, capsys):
    ids, logprobs = np.array([[1, 2, 3], [4, 5, 6]], np.int32), np.array([[-0.5, -1, -2], [-0.25, -3, -4]])
    features = pack(np.arange(4, dtype=np.uint64).reshape(2, 2), ids, logprobs)
    made = a_history(tmp_path / "a", features)
    path = tmp_path / "traces.parquet"
    assert history("export", tmp_path / "a", path) == 0
    rollouts = read_traces(path)
    assert [r.policy_version for r in rollouts] == [5, 6]
    for rollout, expected in zip(rollouts, made, strict=True):
        assert rollout.prompt_token_ids.tolist() == expected.context.tolist()
        assert rollout.token_ids.tolist() == expected.tokens.tolist()
        assert rollout.features.tolist() == features.tolist()
    a_history(tmp_path / "b")
    assert history("export", tmp_path / "b", path) == 0
    assert "without what the target saw" in capsys.readouterr().out
    assert read_traces(path)[0].features is None
    assert main(["replay", str(path), "-k", "4"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == ["own", "finished", "inflight", "epoch"]


def test_what_tenants_said_is_no_replay(tmp_path, capsys):
    """Imported again, it would serve every request."""
    rollout = Rollout(7, 5, np.array([1], np.int32), np.array([2, 3], np.int32))
    origin = Origin("tokenizer", 10, "model", "states")
    entries = [Entry(1, i, rollout._replace(isolated=isolated)) for i, isolated in enumerate([False, True])]
    write_rollouts(open_storage(tmp_path / "a"), entries, origin)
    path = tmp_path / "traces.parquet"
    assert history("export", tmp_path / "a", path) == 0
    assert "1 rollouts" in (said := capsys.readouterr().out)
    assert "1 of requests with a cache_salt are left out" in said
    assert len(read_traces(path)) == 1


def test_tokens_of_which_nothing_is_known_are_exported_as_improbable(tmp_path):
    a_history(tmp_path / "a", no_features(2))
    path = tmp_path / "traces.parquet"
    assert history("export", tmp_path / "a", path) == 0
    _, _, codes = unpack(read_traces(path)[0].features)
    assert (codes == MAX_CODE).all()


def test_exports_that_cannot_be_written(folder, tmp_path, capsys):
    for name, message in (("file.txt", "must end in .jsonl or .parquet"), ("none/file.jsonl", "No such file")):
        assert history("export", folder, tmp_path / name) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["stats"], ["show"], ["prune", "--keep-versions", "1"], ["export", "x.jsonl"]])
def test_folders_that_are_none(tmp_path, arguments, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, *rest = arguments
    for folder in (tmp_path, tmp_path / "none"):
        assert history(name, folder, *rest) == 2
        assert capsys.readouterr().err == f"rollout-spec history: {folder}: there is no history here\n"
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_named(tmp_path, recording, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert history("import", recording, "--into", tmp_path / "h", "--tokenizer", "name") == 2
    assert "pip install transformers" in capsys.readouterr().err
    for name in ("tqdm", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
        assert history("stats", tmp_path) == 2
        err = capsys.readouterr().err
        assert err.startswith("rollout-spec history: history needs pyarrow and tqdm (")
        assert err.endswith("pip install 'rollout-spec[history]'\n")


def test_damaged_tokenizers_are_named(tmp_path, recording, capsys):
    (tmp_path / "tokenizer.json").write_text("{")
    assert history("import", recording, "--into", tmp_path / "h", "--tokenizer", tmp_path) == 2
    assert f"--tokenizer {tmp_path}: " in capsys.readouterr().err


def test_history_needs_no_numba(folder):
    done = run_without_numba("history", "--help")
    assert done.returncode == 0, done.stderr
    done = run_without_numba("history", "stats", folder)
    assert done.returncode == 0, done.stderr
    assert "12 rollouts" in done.stdout


# -- what earlier versions have written ------------------------------------------------------------------------------


@pytest.fixture
def flat(tmp_path):
    """A folder as earlier versions have left it: shards of several problems, all in one folder."""
    path, origin = tmp_path / "flat", Origin("tokenizer", 100, "model", "states")
    for batch in range(3):
        entries = []
        for problem_id in (5, 6, 2**64 - 1):
            tokens = np.array([batch, problem_id % 100], np.int32)
            features = no_features(2) + batch if problem_id == 5 else None
            root, by_text, isolated = Root(1, 2**64 - 1), problem_id == 6, batch == 1
            rollout = Rollout(problem_id, batch, tokens[:1], tokens, features, root, by_text, batch / 2, isolated)
            entries.append(Entry(7, batch, rollout))
        write_shard(open_storage(path), entries, origin)
    (path / "learned.npz").write_bytes(b"is left alone")
    return path


def rollouts_of_flat(path):
    """What `convert` is to make of it."""
    storage = open_storage(path)
    entries = [entry for name in storage.sizes() for entry in read_shard(storage, name, Origin())[1]]
    return in_order(plain(entry.rollout) for entry in entries)


def in_order(rollouts):
    return sorted(rollouts, key=lambda rollout: (rollout.problem_id, rollout.version))


def test_convert(flat, capsys):
    expected = rollouts_of_flat(flat)
    assert len(expected) == 9
    assert history("convert", flat) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("3 shards: 9 rollouts of 3 problems\n", "")
    storage = open_storage(flat)
    assert in_order(stored(storage)) == expected
    assert set(problem_ids(storage)) == {5, 6, 2**64 - 1}
    assert problems_by_text(storage) == {6}
    assert storage.sizes() == {}
    assert {shard.info.origin for shard in Contents(storage)} == {Origin("tokenizer", 100, "model", "states")}
    assert (flat / "learned.npz").read_bytes() == b"is left alone"
    files = {path: path.read_bytes() for path in flat.rglob("*") if path.is_file()}
    assert history("convert", flat) == 0
    assert capsys.readouterr().out == "0 shards: 0 rollouts of 0 problems\n"
    assert {path: path.read_bytes() for path in flat.rglob("*") if path.is_file()} == files


def test_convert_can_be_repeated_after_each_step_that_fails(flat, monkeypatch, capsys):
    """Nothing is lost, and nothing is there twice."""
    expected, write, delete = rollouts_of_flat(flat), LocalStorage.write, LocalStorage.delete
    left = 0

    def failing(call):
        def limited(*arguments):
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError("disk full")
            call(*arguments)

        return limited

    for num_steps in range(20):
        left = num_steps
        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "write", failing(write))
            patched.setattr(LocalStorage, "delete", failing(delete))
            status = history("convert", flat)
        if status == 0:
            break
        assert "disk full" in capsys.readouterr().err
        assert len(rollouts_of_flat(flat)) + len(stored(open_storage(flat))) >= 9
    assert num_steps > 3
    assert in_order(stored(open_storage(flat))) == expected


def test_convert_leaves_damaged_shards_where_they_are(flat, capsys):
    damaged, *others = sorted(flat.glob("*.parquet"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])
    (flat / "foreign.parquet").write_bytes(b"PAR1")
    assert history("convert", flat) == 0
    out, err = capsys.readouterr()
    assert out == "2 shards: 6 rollouts of 3 problems\n"
    assert err == f"{damaged.name} cannot be used: it was cut or changed: its content does not agree with its name\n"
    assert damaged.read_bytes() == whole[:-1]
    assert (flat / "foreign.parquet").read_bytes() == b"PAR1"
    assert not any(path.exists() for path in others)
    assert versions(flat) == [1] * 3 + [2] * 3
    damaged.write_bytes(whole)
    assert history("convert", flat) == 0
    assert versions(flat) == [0] * 3 + [1] * 3 + [2] * 3


def test_what_is_not_converted_is_named(flat, capsys):
    said = f"{flat}: 3 shards are of an earlier version: `rollout-spec history convert {flat}`"
    for arguments in (["stats"], ["show"], ["prune", "--keep-versions", "1"]):
        assert history(arguments[0], flat, *arguments[1:]) == 2
        assert capsys.readouterr().err == f"rollout-spec history: {said}\n"
    assert len(list(flat.glob("*.parquet"))) == 3
    a_history(flat)
    assert history("stats", flat) == 0
    out, err = capsys.readouterr()
    assert out.startswith("2 rollouts of 1 problems")
    assert err == f"{said}\n"


def test_folders_that_cannot_be_converted(tmp_path, recording, capsys):
    assert history("convert", recording) == 2
    assert "Not a directory" in capsys.readouterr().err
    assert history("convert", "nothing://there") == 2
    assert "cannot be used" in capsys.readouterr().err
    assert history("convert", tmp_path / "none") == 0
    assert capsys.readouterr().out == "0 shards: 0 rollouts of 0 problems\n"
    assert not (tmp_path / "none").exists()
