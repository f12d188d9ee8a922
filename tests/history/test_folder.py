"""A folder of history: what is written is read once by everybody, and what cannot be used costs drafts only."""

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from rollout_spec.features import FEATURE_WORDS
from rollout_spec.history import folder as module
from rollout_spec.history.folder import HistoryFolder, Origin, decode, encode, fingerprint, open_folder
from rollout_spec.history.store import CONTEXT_TOKENS, Rollout, Root
from tests.history.made_up import ORIGIN, numbers, plain, rollout

TOKENS = st.integers(0, ORIGIN.vocab_size - 1)
UINT64 = st.integers(0, 2**64 - 1)


@st.composite
def rollouts_of_a_problem(draw):
    problem, order, rollouts = draw(UINT64), draw(st.integers(0, 2**31 - 1)), []
    for _ in range(draw(st.integers(1, 3))):
        tokens = np.array(draw(st.lists(TOKENS, min_size=1, max_size=6)), np.int32)
        words = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=FEATURE_WORDS, max_size=FEATURE_WORDS)
        rows = draw(st.none() | st.lists(words, min_size=tokens.size, max_size=tokens.size))
        features = None if rows is None else np.array(rows, np.int64)
        context = np.array(draw(st.lists(TOKENS, max_size=CONTEXT_TOKENS)), np.int32)
        root = draw(st.none() | st.builds(Root, st.integers(0, 2**31 - 1), UINT64))
        rollouts.append(Rollout(problem, context, tokens, features, root, order))
    return rollouts


def open_again(path, **options):
    """As in another engine."""
    return HistoryFolder(str(path), options.pop("origin", ORIGIN), **options)


def files_in(path):
    return sorted(str(file.relative_to(path)) for file in Path(path).rglob("*") if file.is_file())


@settings(deadline=None, max_examples=60, derandomize=True)
@given(rollouts=rollouts_of_a_problem())
def test_a_file_gives_back_what_it_was_made_of(rollouts):
    problem, order = rollouts[0].problem_id, rollouts[0].order
    read = decode(encode(rollouts, ORIGIN), problem, order, ORIGIN)
    assert list(map(plain, read)) == list(map(plain, rollouts))
    assert encode(rollouts, ORIGIN) == encode(rollouts, ORIGIN)
    assert all(rollout.tokens.dtype == np.int32 for rollout in read)


@pytest.mark.parametrize(
    ("origin", "has_features"),
    [
        (ORIGIN._replace(vocab_size=9_999), True),  # a model may know more tokens than its tokenizer
        (ORIGIN._replace(model="another", states=None), True),
        (ORIGIN._replace(states="9 layers"), False),  # which cannot be compared
        (Origin(), True),
    ],
)
def test_rollouts_of_another_model_are_read(origin, has_features):
    (read,) = decode(encode([rollout(5)], ORIGIN), 1, 0, origin)
    assert (numbers([read]), read.features is not None) == ([5], has_features)


def test_rollouts_of_another_tokenizer_are_refused():
    for origin, message in (
        (ORIGIN._replace(tokenizer="another"), "another tokenizer"),
        (ORIGIN._replace(vocab_size=400), "outside of the vocabulary of 400"),
    ):
        with pytest.raises(ValueError, match=message):
            decode(encode([rollout(500)], ORIGIN), 1, 0, origin)


def test_fingerprints_tell_vocabularies_apart():
    assert fingerprint({"a": 0, "b": 1}) == fingerprint({"b": 1, "a": 0}) != fingerprint({"a": 1, "b": 0})


@pytest.mark.parametrize("change", ["a bit", "cut"])
def test_a_damaged_file_is_refused(change):
    """Whatever byte of it."""
    data = encode([rollout(i, size=40) for i in range(5)], ORIGIN)
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        if change == "a bit":
            damaged[place] ^= 1
        else:
            damaged = damaged[:place]
        try:
            read = decode(bytes(damaged), 1, 0, ORIGIN)
        except ValueError:
            continue
        assert change == "a bit"  # of what no reader needs, such as the writer's name
        assert numbers(read) == [0, 1, 2, 3, 4]


def test_what_one_engine_writes_another_reads_once_and_the_first_never(tmp_path):
    one, other = open_again(tmp_path / "with spaces"), open_again(tmp_path / "with spaces")
    one.write([rollout(1), rollout(2)])
    one.write([rollout(3, order=1)])
    one.write([rollout(4, problem=2**64 - 1)])
    assert numbers(other.read(1)) == [1, 2, 3]
    assert other.read(1) == one.read(1) == one.read(2**64 - 1) == other.read(7) == []
    other.write([rollout(5, order=1)])
    assert numbers(one.read(1)) == [5]
    assert numbers(other.read(2**64 - 1)) == [4]
    other.forget(1)
    assert sorted(numbers(other.read(1))) == [1, 2, 3, 5]
    assert one.stats.rollouts_written == 4
    assert one.stats.rollouts_read == 1


def test_an_engine_begins_with_the_newest_files(tmp_path):
    one = open_again(tmp_path)
    assert one.load(1000) == []
    for order in range(40):
        one.write([rollout(order, problem=order % 3, order=order, size=10)])
    other = open_again(tmp_path)
    loaded = numbers(other.load(260))
    assert loaded == sorted(loaded)
    assert loaded[-1] == 39
    assert 20 <= len(loaded) <= 20 + module.READERS
    num_tokens = rollout(0, size=10).num_tokens
    assert len(open_again(tmp_path).load((2 * module.READERS + 1) * num_tokens)) == 40, "read in three portions"
    read = [number for problem in range(3) for number in numbers(other.read(problem))]
    assert sorted([*loaded, *read]) == list(range(40))  # each once


def test_of_one_problem_the_newest_files_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_PROBLEM_TOKENS", 100)
    one, other = open_again(tmp_path), open_again(tmp_path)
    for order in range(30):
        one.write([rollout(order, order=order, size=10)])
    assert numbers(other.read(1)) == list(range(22, 30))
    assert other.read(1) == []


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "foreign"])
def test_a_file_that_cannot_be_read_is_left_out_with_one_line(tmp_path, caplog, damage):
    one, other = open_again(tmp_path), open_again(tmp_path)
    for number in range(4):
        (open_again(tmp_path, origin=Origin("another")) if damage == "foreign" and number < 2 else one).write(
            [rollout(number, order=number)]
        )
    bad = sorted(tmp_path.rglob("*.parquet"))[:2]
    for path in bad:
        if damage == "gone":
            path.unlink()
        elif damage != "foreign":
            path.write_bytes(path.read_bytes()[:50] if damage == "cut" else b"")
    assert numbers(other.read(1)) == [2, 3]
    assert other.read(1) == []
    assert len(caplog.records) == (0 if damage == "gone" else 1)
    assert other.stats.files_refused == (0 if damage == "gone" else 2)


def test_other_files_are_left_alone(tmp_path):
    one = open_again(tmp_path)
    one.write([rollout(1)])
    (tmp_path / "notes.txt").write_text("mine")
    for name in (".env", "0000000000000001/.env", f".{5:016x}", f"x/.{5:016x}"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "0000000000000001" / "notes.parquet").write_text("mine")
    assert numbers(open_again(tmp_path).load(1000)) == [1]
    one.prune(0)
    assert len(files_in(tmp_path)) == 6


def refusing(function, paths, error=errno.EACCES):
    """A function of `os` that may not do its work for some paths."""

    def refuse(path, *args, **options):
        if str(path) in paths:
            raise OSError(error, os.strerror(error), str(path))
        return function(path, *args, **options)

    return refuse


@pytest.mark.parametrize("error", [errno.EACCES, errno.ESTALE])
def test_what_cannot_be_listed_is_left_out_and_the_bound_is_kept(tmp_path, monkeypatch, caplog, error):
    """`lost+found`, another user's problem, a link to its own parent, a stale handle; as root we may list all."""
    one = open_again(tmp_path)
    for order in range(6):
        one.write([rollout(order, problem=order % 3, order=order)])
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / f"{8:016x}").symlink_to(tmp_path)
    (tmp_path / f"{9:016x}").write_text("no folder")
    unlisted = {str(tmp_path / name) for name in ("lost+found", f"{2:016x}")}
    monkeypatch.setattr(os, "scandir", refusing(os.scandir, unlisted, error))
    other = open_again(tmp_path)
    assert numbers(other.load(10**6)) == [0, 1, 3, 4]
    assert other.read(2) == []
    (record,) = caplog.records
    assert f"{2:016x} is left out" in record.getMessage()
    size = max(file.size for file in one.files())
    assert len(one.prune(2 * size)) == 2
    assert [file.order for file in sorted(one.files())] == [3, 4]


def test_what_cannot_be_deleted_stays_and_others_go(tmp_path, monkeypatch, caplog):
    one = open_again(tmp_path)
    for order in range(5):
        one.write([rollout(order, order=order)])
    files = sorted(one.files())
    monkeypatch.setattr(os, "remove", refusing(os.remove, {files[0].path}))
    assert [file.order for file in one.prune(2 * max(file.size for file in files))] == [1, 2, 3]
    assert [file.order for file in sorted(one.files())] == [0, 4]
    assert "cannot be deleted" in caplog.text


def test_a_file_that_cannot_be_read_now_keeps_no_other_from_being_read(tmp_path, monkeypatch, caplog):
    one, other = open_again(tmp_path), open_again(tmp_path)
    for number in range(4):
        one.write([rollout(number, order=number)])
    cat_file, bad = other._fs.cat_file, [file.path for file in one.files() if file.order in (1, 3)]

    def refuse(path):
        if path in bad:
            raise PermissionError(errno.EACCES, "no", path)
        return cat_file(path)

    monkeypatch.setattr(other._fs, "cat_file", refuse)
    assert numbers(other.load(10**6)) == [0, 2]
    assert other.read(1) == []
    assert len(caplog.records) == 2
    bad.clear()
    assert numbers(other.read(1)) == [1, 3]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_what_cannot_be_written_raises_and_leaves_nothing(tmp_path, monkeypatch, error):
    one = open_again(tmp_path)
    one.write([rollout(1)])

    def fail(*args):
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match=os.strerror(error)):
            one.write([rollout(2)])
    assert len(files_in(tmp_path)) == 1
    one.write([rollout(2)])
    assert sorted(numbers(open_again(tmp_path).read(1))) == [1, 2]


def test_pruning_keeps_the_newest_files(tmp_path):
    one = open_again(tmp_path)
    for order in range(10):
        for problem in range(3):
            one.write([rollout(order, problem=problem, order=order)])
    size = max(file.size for file in one.files())
    kept = lambda: sorted({file.order for file in one.files()})  # noqa: E731
    one.prune(6 * size)
    assert kept()[0] >= 7
    assert sum(file.size for file in one.files()) <= 6 * size
    assert one.prune(10**9) == []
    half_written, dead = (tmp_path / f"{problem:016x}" / f".{5:016x}" for problem in (1, 2))
    for path in (half_written, dead):
        path.write_bytes(b"half")
    os.utime(dead, (0, 0))
    assert open_again(tmp_path).prune(0)
    assert kept() == []
    assert [path for path in tmp_path.rglob("*") if path != half_written.parent] == [half_written]


def test_a_full_folder_is_pruned_by_those_who_write(tmp_path):
    one, other = (open_again(tmp_path, max_bytes=60_000) for _ in range(2))
    most, state = 0, random.getstate()
    for order in range(200):
        for folder in (one, other):
            folder.prune_by_chance(folder.write([rollout(order, problem=order % 5, order=order, size=200)]).size)
        most = max(most, sum(file.size for file in one.files()))
    assert 60_000 < most < 90_000
    assert max(file.order for file in one.files()) == 199
    assert random.getstate() == state  # a trainer in this process may have seeded it


def test_a_folder_may_be_on_any_file_system():
    one, other = (open_again("memory://history/of a run") for _ in range(2))
    one.write([rollout(1)])
    assert one.is_remote
    assert numbers(other.read(1)) == [1]
    assert numbers(open_again("memory://history/of a run").load(100)) == [1]
    assert len(one.prune(0)) == 1
    assert list(other.files()) == []


@pytest.mark.parametrize("name", ["a::1/h", "a::2", "file:x", "s3:x", "memory::a"])
def test_a_path_is_taken_as_it_is(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for path in (name, str(tmp_path / name)):
        open_again(path).write([rollout(1)])
    assert len(files_in(tmp_path)) == len(files_in(tmp_path / name)) == 1


@pytest.mark.parametrize("url", ["nowhere://bucket/history", "s3:/x://y"])
def test_an_unknown_file_system_is_refused(url):
    with pytest.raises(ValueError, match="history_dir"):
        open_folder(url)
