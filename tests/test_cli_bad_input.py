"""The `rollout-spec` command with files and options of any kind: one line that names file and reason, no traceback."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_spec import cli
from rollout_spec.files import MAX_JSON_BYTES, write_whole
from rollout_spec.history.partitions import path_of
from tests.test_doctor import a_report

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

HUGE_BYTES = 5 << 30
ROW = {"prompt_id": "a", "sample_id": 0, "prompt_tokens": [1, 2], "completion_tokens": [3, 4]}
COST = {"name": "curve", "tokens": [1, 8], "seconds": [0.1, 0.2]}


def refused(capsys, *arguments: object) -> str:
    """The one line with which a command refuses its input."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert said.startswith("rollout-spec")
    assert "Traceback" not in said
    return said


def table(path: Path, rows: list[dict], schema=None) -> Path:
    parquet.write_table(arrow.Table.from_pylist(rows, schema), path)
    return path


def make_files(folder: Path) -> dict[str, Path]:
    """Files that no command can use, by what is wrong with them."""
    contents = {
        "empty": b"",
        "blank": b"\n \n",
        "binary": bytes(range(256)) * 40,
        "zeros": bytes(10_000),
        "latin": "Überraschung".encode("latin-1"),
        "utf16": '{"a": 1}'.encode("utf-16"),
        "csv": b"prompt,completion\na,b\n",
        "list": b"[1, 2]",
        "number": b"3",
        "foreign": b'{"a": 1}\n{"b": [1, {"c": null}]}\n',
        "brackets": b"[" * 200_000,
        "digits": b"9" * 10_000,
        "cut": json.dumps(a_report()).encode()[:500],
        "gzip": gzip.compress(b'{"prompt": [1], "completion": [2]}\n' * 1000)[:60],
        "magic": b"PAR1" + bytes(100) + b"PAR1",
    }
    files = {name: folder / name for name in contents}
    for name, content in contents.items():
        files[name].write_bytes(content)
    files["missing"] = folder / "missing"
    files["folder"] = folder / "folder"
    files["folder"].mkdir()
    files["unreadable"] = Path("/proc/self/mem")  # also for root: reading at 0 is an error
    files["parquet"] = table(folder / "foreign.parquet", [{"a": 1, "b": None}])
    whole = table(folder / "whole.parquet", [ROW] * 50).read_bytes()
    files["cut parquet"] = folder / "cut.parquet"
    files["cut parquet"].write_bytes(whole[:-30])
    return files


FILES = (
    *("empty", "blank", "binary", "zeros", "latin", "utf16", "csv", "list", "number", "foreign", "brackets", "digits"),
    *("cut", "gzip", "magic", "missing", "folder", "unreadable", "parquet", "cut parquet"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    made = make_files(tmp_path_factory.mktemp("files"))
    assert tuple(made) == FILES
    return made


@pytest.fixture
def traces(tmp_path):
    return table(tmp_path / "traces.parquet", [ROW, {**ROW, "sample_id": 1}])


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FILES)
def test_reports(kind, files, capsys):
    assert str(files[kind]) in refused(capsys, "doctor", files[kind])


@pytest.mark.parametrize("kind", FILES)
def test_recordings(kind, files, capsys):
    assert str(files[kind]) in refused(capsys, "replay", files[kind])


@pytest.mark.parametrize("kind", FILES)
def test_cost_curves(kind, files, capsys, traces):
    assert str(files[kind]) in refused(capsys, "replay", traces, "--engine-cost", files[kind])


@pytest.mark.parametrize("kind", FILES)
def test_recordings_as_history(kind, files, capsys, tmp_path):
    """Lines that cannot be used are named each; the last line says that nothing was imported."""
    assert cli.main(["history", "import", str(files[kind]), "--into", str(tmp_path / "history")]) == 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert last.startswith("rollout-spec history: ")
    assert all(line.startswith((f"{files[kind]}:", "... and")) for line in lines)
    assert str(files[kind]) in last or lines or "no rollouts found" in last
    assert not (tmp_path / "history").exists()


@pytest.mark.parametrize("command", [("stats",), ("show",), ("prune", "--keep-versions", "1"), ("export",)])
@pytest.mark.parametrize("kind", ["missing", "folder", "csv"])
def test_folders_that_hold_no_history(kind, command, files, capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    said = refused(capsys, "history", *command, files[kind], *([out] if command == ("export",) else []))
    assert str(files[kind]) in said
    assert not out.exists()


def test_history_without_a_name(capsys, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"prompt_ids": [1, 2], "completion_ids": [3]}\n')
    assert "folder is empty" in refused(capsys, "history", "import", path, "--into", "")


def huge(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(HUGE_BYTES)  # sparse: takes no room
    return path


def test_huge_files_are_refused_unread(capsys, tmp_path, traces):
    path = huge(tmp_path / "huge")
    history = tmp_path / "history"
    problem = history / path_of(1)
    problem.mkdir(parents=True)
    huge(problem / "foreign.parquet")
    cli.main(["replay", str(path)])  # imports before memory is measured
    capsys.readouterr()
    tracemalloc.start()
    try:
        assert f"larger than {MAX_JSON_BYTES:,} bytes" in refused(capsys, "doctor", path)
        assert "larger than" in refused(capsys, "replay", traces, "--engine-cost", path)
        assert "not a Parquet file" in refused(capsys, "replay", path)
        assert cli.main(["history", "stats", str(history)]) == 0
        assert "foreign.parquet cannot be used" in capsys.readouterr().err
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_JSON_BYTES
    finally:
        tracemalloc.stop()


# -- foreign contents --------------------------------------------------------------------------------------------------

BAD_ROWS = {
    "a null prompt": ([ROW, {**ROW, "prompt_id": None}], None, "prompt_id is null in row 1"),
    "a prompt of numbers": ([{**ROW, "prompt_id": 0.5}], None, "column prompt_id must hold strings or integers"),
    "a prompt of lists": ([{**ROW, "prompt_id": [1]}], None, "column prompt_id must hold strings or integers"),
    "tokens of text": ([{**ROW, "prompt_tokens": "abc"}], None, "column prompt_tokens must hold lists of integers"),
    "tokens of floats": ([{**ROW, "prompt_tokens": [0.5]}], None, "column prompt_tokens must hold lists of integers"),
    "negative tokens": ([{**ROW, "completion_tokens": [-1]}], None, "column completion_tokens must hold tokens in"),
    "large tokens": ([{**ROW, "completion_tokens": [2**31]}], None, "column completion_tokens must hold tokens in"),
    "null tokens": ([{**ROW, "completion_tokens": [1, None]}], None, "completion_tokens holds a null"),
    "samples of text": ([{**ROW, "sample_id": "x"}], None, "column sample_id must hold integers"),
    "runs of text": ([{**ROW, "gen_runs": "ab"}], None, "column gen_runs must hold lists of integers"),
    "runs of one number": ([{**ROW, "gen_runs": 5}], None, "column gen_runs must hold lists of integers"),
    "runs that do not sum": ([{**ROW, "gen_runs": [1]}], None, "gen_runs of prompt 'a'"),
    "null runs": ([{**ROW, "gen_runs": [None, 2]}], None, "gen_runs of prompt 'a'"),
    "negative runs": ([{**ROW, "gen_runs": [3, -1]}], None, "gen_runs of prompt 'a'"),
    "seeds of 65 bits": (
        [{**ROW, "seed": 2**63}],
        [("prompt_id", arrow.string()), ("sample_id", arrow.int64()), ("seed", arrow.uint64())],
        "column seed must hold integers of 64 bits",
    ),
    "features alone": ([{**ROW, "top_ids": [1]}], None, "belong together"),
    "NaN": (
        [{**ROW, "top_ids": [1] * 6, "top_logprobs": [float("nan")] * 6, "signatures": bytes(32)}],
        None,
        "column top_logprobs holds NaN",
    ),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_rows_of_other_types(kind, capsys, tmp_path):
    rows, types, message = BAD_ROWS[kind]
    tokens = arrow.list_(arrow.int64())
    schema = types and arrow.schema([*types, ("prompt_tokens", tokens), ("completion_tokens", tokens)])
    said = refused(capsys, "replay", path := table(tmp_path / "rows.parquet", rows, schema))
    assert message in said
    assert str(path) in said


def test_columns_of_one_name(capsys, tmp_path):
    columns = {**{name: [value] for name, value in ROW.items()}, "more": [1]}
    names = [name if name != "more" else "sample_id" for name in columns]
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_arrays([arrow.array(v) for v in columns.values()], names), path)
    assert "several columns are named sample_id" in refused(capsys, "replay", path)


@settings(derandomize=True, deadline=None, database=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_parquet(data, capsys, tmp_path):
    """Whatever pyarrow makes of it: it is refused in one line, or read as what it now says."""
    path = table(tmp_path / "rows.parquet", [ROW] * 20)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    from rollout_spec.replay.traces import read_traces

    try:
        read_traces(path)
    except ValueError as error:
        message = str(error)
        assert str(path) in message
        assert "\n" not in message


NUMBERS = (0, -1, 1, 2, 0.5, 1e308, 5e-324, 10**400, float("nan"), float("inf"), True, None, "x", [], {})


def places(value: object, path: tuple = ()) -> list[tuple]:
    """Paths to everything in plain data."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def with_changes(values: dict, data: st.DataObject) -> dict:
    changed = json.loads(json.dumps(values))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from([place for place in places(changed) if place]))
        owner = changed
        for key in place[:-1]:
            owner = owner[key]
        if data.draw(st.booleans()) and isinstance(owner, dict):
            del owner[place[-1]]
        else:
            owner[place[-1]] = data.draw(st.sampled_from(NUMBERS))
    return changed


@settings(derandomize=True, deadline=None, database=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_reports_with_other_values(data, capsys, tmp_path):
    """They are explained, or refused in one line."""
    path = tmp_path / "report.json"
    report = {**a_report(), "global_step": 3, "num_processes": 2}
    path.write_text(json.dumps(with_changes(report, data)))
    status = cli.main(["doctor", str(path)])
    said = capsys.readouterr().err
    assert (status, said.count("\n")) in ((0, 0), (2, 1)), said


@settings(derandomize=True, deadline=None, database=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_cost_curves_with_other_values(data, tmp_path):
    from rollout_spec.replay.cost import read_cost

    path = tmp_path / "cost.json"
    path.write_text(json.dumps(with_changes({**COST, "drafted_seconds": 0.1, "draft_seconds": 0.0}, data)))
    try:
        cost = read_cost(path)
    except ValueError as error:
        message = str(error)
        assert str(path) in message
        assert "\n" not in message
    else:
        assert np.isfinite(cost.steps(np.array([1, 5, 100]))).all()


# -- options -----------------------------------------------------------------------------------------------------------

NONSENSE = [
    (("replay", "{traces}", "-k", "0"), "-k must be between 1 and 128"),
    (("replay", "{traces}", "--batch", "0"), "--batch must be at least 1"),
    (("replay", "{traces}", "--prompts", "-1"), "--prompts must be at least 1"),
    (("replay", "{traces}", "--drafter", "histori"), "did you mean 'history'"),
    (("replay", "{traces}", "--drafter", ".."), "unknown drafter '..'"),
    (("replay", "{traces}", "--drafter", "device"), "runs on the device"),
    (("replay", "{traces}", "--option", "min_survival"), "--option must be NAME=JSON"),
    (("replay", "{traces}", "--option", "min_survival=" + "9" * 5000), "--option must be NAME=JSON"),
    (("replay", "{traces}", "--option", "min_survival=" + "[" * 100_000), "--option must be NAME=JSON"),
    (("replay", "{traces}", "--option", 'min_survival="a"'), "min_survival must be a number"),
    (("replay", "{traces}", "--option", "min_survival=NaN"), "min_survival must be in [0, 1)"),
    (("replay", "{traces}", "--option", "max_draft_tokens=1000000000"), "max_draft_tokens must be from 1"),
    (("replay", "{traces}", "--option", "name=3"), "does not take these drafter_options"),
    (("replay", "{traces}", "--option", "own_only=1"), "own_only must be a bool"),
    (("replay", "{traces}", "--json", "/dev/null/x"), "/dev/null/x"),
    (("doctor", "{tmp}"), "No such file or directory"),
    (("doctor", "--url", "localhost"), "must be a URL"),
    (("demo", "--steps", "1", "--out", "{tmp}/d"), "steps must be at least 2"),
    (("demo", "--seed", "-1", "--out", "{tmp}/d"), "seed must be from 0 to 4294967295"),
    (("history", "show", "{tmp}", "--limit", "0"), "--limit must be at least 1"),
    (("history", "prune", "{tmp}"), "prune needs --max-bytes, --keep-versions or --problem"),
    (("history", "export", "{tmp}", "{tmp}/x.txt"), "must end in .jsonl or .parquet"),
]


@pytest.mark.parametrize(("arguments", "message"), NONSENSE, ids=lambda value: "")
def test_options_with_values_that_are_none(arguments, message, capsys, traces, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    places = {"{traces}": traces, "{tmp}": tmp_path}
    for name, path in places.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    said = refused(capsys, *arguments)
    assert message in said
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "d"] == before


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("history",),
        ("history", "nonsense"),
        ("replay",),
        ("serve", "m"),
        ("doctor", "x", "--device"),
        ("doctor", "x", "y"),
        ("replay", "x", "-k", "many"),
        ("replay", "x", "-k", "9" * 5000),
        ("demo", "--steps", "0.5"),
        ("history", "prune", "x", "--max-bytes", "9" * 400),
        ("history", "prune", "x", "--max-bytes", "-1"),
        ("history", "show", "x", "--problem", "zz"),
    ],
)
def test_words_that_are_no_command(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    assert end.value.code == 2
    *usage, last = capsys.readouterr().err.splitlines()
    assert usage[0].startswith("usage: rollout-spec")
    assert "error: " in last


# -- output ------------------------------------------------------------------------------------------------------------


def run(*arguments: object, before: str = "", **options) -> subprocess.CompletedProcess:
    code = f"import sys\n{before}\nfrom rollout_spec.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(a_report()))
    return path


def test_nobody_reads_what_is_printed(report):
    reader, writer = os.pipe()
    os.close(reader)
    done = run("doctor", report, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_full_disk(report):
    with open("/dev/full", "w") as full:
        done = run("doctor", report, stdout=full)
    assert done.returncode == 2
    assert done.stderr == "rollout-spec: [Errno 28] No space left on device\n"


def test_a_full_disk_leaves_the_old_file(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("old")

    def write_bytes(path, content):
        path.open("wb").close()
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_looking_whether_a_dangling_link_can_be_written_keeps_it(tmp_path):
    from rollout_spec.files import check_writable

    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    check_writable(link)
    assert link.is_symlink()
    assert not link.exists()


def test_a_link_to_itself(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write_whole(link, "new")


@pytest.mark.parametrize("method", ["touch", "replace"])
def test_a_file_that_can_only_be_written_in_place(monkeypatch, method, tmp_path):
    """In a folder that takes no new files, or where it is mounted, as into a container."""
    file = tmp_path / "file"
    file.write_text("old and longer")
    file.chmod(0o600)

    def refuse(*args, **kwargs):
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(Path, method, refuse)
    write_whole(file, "new")
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    file.chmod(0o640)
    write_whole(file, "new")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o640)


def test_ctrl_c(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.doctor, "run", interrupted)
    assert cli.main(["doctor"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "rollout-spec: interrupted\n"


# -- packages that are missing -----------------------------------------------------------------------------------------

WITHOUT = """
import importlib.machinery, importlib.metadata
def hide(original):
    return staticmethod(lambda name, *args: None if name.split(".")[0] == MISSING else original(name, *args))
finder = importlib.machinery.PathFinder
finder.find_spec = hide(finder.find_spec)
version = importlib.metadata.version
def hidden(name):
    if name.split("-")[0] == MISSING:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = hidden
"""


@pytest.mark.parametrize(
    ("missing", "arguments", "remedy"),
    [
        ("pyarrow", ("replay", "{report}"), "pip install 'rollout-spec[replay]'"),
        ("pyarrow", ("history", "stats", "x"), "pip install 'rollout-spec[history]'"),
        ("transformers", ("history", "show", "{history}", "--tokenizer", "x"), "pip install transformers"),
        *(
            (name, ("demo", "--out", "{tmp}"), "pip install 'rollout-spec[demo]'")
            for name in ("transformers", "rich", "matplotlib", "datasets")
        ),
    ],
)
@pytest.mark.slow
def test_packages_that_are_missing(missing, arguments, remedy, report, tmp_path, capsys):
    rollouts, history = tmp_path / "rollouts.jsonl", tmp_path / "history"
    rollouts.write_text('{"prompt_ids": [1, 2], "completion_ids": [3]}\n')
    assert cli.main(["history", "import", str(rollouts), "--into", str(history)]) == 0
    places = {"report": report, "history": history, "tmp": tmp_path}
    done = run(*(a.format(**places) for a in arguments), before=f"MISSING = {missing!r}\n{WITHOUT}", stdout=-1)
    assert done.returncode == 2, done.stderr
    assert remedy in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.slow
def test_the_callback_without_its_packages():
    code = f"MISSING = 'accelerate'\n{WITHOUT}\nfrom rollout_spec import RolloutSpecGenerator"
    last = run(before=code, stdout=-1).stderr.splitlines()[-1]
    assert last.startswith("ImportError: RolloutSpecGenerator needs TRL")
    assert "pip install 'rollout-spec[trl]'" in last
