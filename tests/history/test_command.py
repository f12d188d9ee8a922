"""`rollout-spec history`."""

import errno
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from rollout_spec.cli import main
from rollout_spec.history import command
from rollout_spec.history.folder import HistoryFolder
from rollout_spec.history.store import FIRST_TIME
from tests.history.made_up import ORIGIN, rollout, rollouts_in
from tests.history.test_logs import IDS, Tokenizer, write_lines, write_parquet


@pytest.fixture
def history(tmp_path, monkeypatch, capsys):
    """Runs a command and returns (exit status, what it printed, its errors)."""
    tokenizer = Tokenizer()
    tokenizer.get_vocab = lambda: {f"w{i}": i for i in range(100)}
    monkeypatch.setattr(command, "load_tokenizer", lambda name: tokenizer)

    def run(*arguments):
        status = main(["history", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


def test_logs_become_history_and_are_there_once_if_they_are_imported_again(history, tmp_path):
    first = write_lines(tmp_path / "first.jsonl", [{**IDS, "token_ids": [8, i], "step": i // 2} for i in range(6)])
    second = write_lines(tmp_path / "second.jsonl", [{"input": "w1 w2", "output": "w3 w4", "step": 1}, "bad"])
    for said in (
        "7 rollouts of 2 problems, 14 tokens, {} bytes; 0 were there already, 0 are copies, 1 lines left out",
        "0 rollouts of 2 problems, 0 tokens, 0 bytes; 7 were there already, 0 are copies, 1 lines left out",
    ):
        status, out, err = history("import", first, second, "--into", tmp_path / "a run", "--tokenizer", "x")
        assert status == 0
        num_bytes = sum(path.stat().st_size for path in (tmp_path / "a run").rglob("*.parquet"))
        assert out.strip() == said.format(f"{num_bytes:,}")
        assert err.startswith(f"{second}:2: Expecting value")
    kept = rollouts_in(tmp_path / "a run")
    assert sorted((r.order, r.tokens.tolist()) for r in kept) == [
        (0, [8, 0]), (0, [8, 1]), (1, [3, 4]), (1, [8, 2]), (1, [8, 3]), (2, [8, 4]), (2, [8, 5]),
    ]  # fmt: skip
    origin = ORIGIN._replace(tokenizer="another", vocab_size=100)
    assert HistoryFolder(str(tmp_path / "a run"), origin).load(100) == []


def test_copies_are_not_stored(history, tmp_path):
    rows = [{**IDS, "prompt_token_ids": [i // 2], "token_ids": [8, i]} for i in range(8)]
    logs = [write_lines(tmp_path / f"{n}.jsonl", [{**row, "step": n} for row in rows]) for n in range(3)]
    status, out, _ = history("import", *logs, logs[0], "--into", tmp_path / "h", "--tokenizer", "x")
    assert status == 0
    assert out.startswith("8 rollouts of 4 problems, 16 tokens")
    assert "24 are copies" in out
    assert {r.order for r in rollouts_in(tmp_path / "h")} == {0}


@pytest.mark.parametrize("damage", ["a page", "cut", "empty", "unreadable"])
def test_one_bad_file_does_not_end_an_import(history, tmp_path, monkeypatch, damage):
    logs = [write_parquet(tmp_path / f"{n}.parquet", [{**IDS, "token_ids": [8, n]}] * 2) for n in range(3)]
    data = bytearray(logs[1].read_bytes())
    if damage == "a page":
        data[4:30] = bytes(26)
    logs[1].write_bytes(data[: {"cut": 50, "empty": 0}.get(damage)])
    if damage == "unreadable":
        opened = Path.open

        def refuse(path, *args, **options):
            if path == logs[1]:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return opened(path, *args, **options)

        monkeypatch.setattr(Path, "open", refuse)
    status, out, err = history("import", *logs, "--into", tmp_path / "h", "--tokenizer", "x")
    assert status == 0
    assert out.startswith("4 rollouts of 1 problems")
    assert (str(logs[1]) in err) == (damage != "empty")


@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_a_damaged_file_in_the_folder_does_not_keep_others_out(history, tmp_path, damage):
    HistoryFolder(str(tmp_path / "h"), ORIGIN._replace(tokenizer=None)).write([rollout(1)])
    (bad,) = (tmp_path / "h").rglob("*.parquet")
    bad.write_bytes(bad.read_bytes()[: 40 if damage == "cut" else 0])
    log = write_lines(tmp_path / "log.jsonl", [IDS])
    status, out, _ = history("import", log, "--into", tmp_path / "h", "--tokenizer", "x")
    assert status == 0
    assert out.startswith("1 rollouts")


def test_two_tokenizers_are_not_mixed(history, tmp_path):
    HistoryFolder(str(tmp_path / "h"), ORIGIN).write([rollout(1)])
    log = write_lines(tmp_path / "log.jsonl", [IDS])
    status, _, err = history("import", log, "--into", tmp_path / "h", "--tokenizer", "x")
    assert status == 2
    assert "another tokenizer" in err
    assert len(rollouts_in(tmp_path / "h")) == 1


def test_large_logs_are_written_in_parts(history, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "BATCH_TOKENS", 20)
    log = write_lines(tmp_path / "log.jsonl", [{**IDS, "token_ids": [i]} for i in range(50)])
    assert history("import", log, "--into", tmp_path / "h", "--tokenizer", "x", "--version", 9)[0] == 0
    kept = rollouts_in(tmp_path / "h")
    assert sorted(r.tokens[0] for r in kept) == list(range(50))
    assert {r.order for r in kept} == {9}
    assert len(list((tmp_path / "h").rglob("*.parquet"))) > 5


def test_stats_and_prune(history, tmp_path):
    folder = HistoryFolder(str(tmp_path / "h"), ORIGIN)
    for order in (0, 7, FIRST_TIME, FIRST_TIME + 100_000):
        folder.write([rollout(order % 9, order=order), rollout(10, order=order)])
    (tmp_path / "h" / f"{7:016x}").mkdir()
    (tmp_path / "h" / f"{7:016x}" / f"{2:010d}-{0:016x}.parquet").write_bytes(b"damaged")
    status, out, err = history("stats", tmp_path / "h")
    assert status == 0
    first, second = out.splitlines()
    assert first.startswith("8 rollouts of 2 problems, 40 tokens; 5 files of ")
    assert second.startswith("4 imported or of rollout_spec 0.3, 4 sampled from 2001-09-")
    assert "cannot be used" in err

    assert history("prune", tmp_path / "h", "--max-bytes", "0")[1].startswith("removed 5 of 5 files")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats", "HERE/nothing"], "there is no history here"),
        (["prune", "HERE/nothing"], "the following arguments are required: --max-bytes"),
        (["prune", "HERE", "--max-bytes", "7 apples"], "'7 apples' is no size, such as 500MB or 2GB"),
        (["import", "HERE/none", "--into", "HERE/h", "--tokenizer", "x"], "No such file"),
        (["import", "HERE/empty", "--into", "HERE/h", "--tokenizer", "x"], "nothing was imported"),
        (["import", "HERE/empty", "--into", "HERE/h"], "--tokenizer"),
        (["import", "HERE", "--into", "HERE/h", "--tokenizer", "x"], "is a directory: name its files"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(history, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").write_text("")
    try:
        status, _, err = history(*(word.replace("HERE", str(tmp_path)) for word in arguments))
    except SystemExit as error:
        status, err = error.code, capsys.readouterr().err.splitlines()[-1] + "\n"
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "h").exists()


def test_a_tokenizer_that_is_not_there(tmp_path, capsys):
    (tmp_path / "x").touch()
    arguments = ["import", str(tmp_path / "x"), "--into", str(tmp_path), "--tokenizer", str(tmp_path / "none")]
    assert main(["history", *arguments]) == 2
    assert "--tokenizer" in capsys.readouterr().err


def test_without_pyarrow_the_command_names_the_remedy(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["history", "stats", str(tmp_path)]) == 2
    assert "pip install 'rollout-spec[history]'" in capsys.readouterr().err
