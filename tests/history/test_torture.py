"""Two writers, two readers and a pruner of a folder, killed at any moment: nothing is lost, twice or wrong."""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from rollout_spec.history.folder import HistoryFolder
from tests.history.made_up import ORIGIN, rollout

ORIGIN_OF_NUMBERS = ORIGIN._replace(vocab_size=2**31 - 1)
PROBLEMS, KEPT_BYTES, NUM_ROUNDS = 4, 3_000_000, 20


def made(number, problem, order):
    return rollout(number, problem=problem, order=order, size=1 + number % 50)


def write(folder, notes, first, began):
    """Write rollouts numbered from `first` on, and note each file once the folder has it."""
    number = int(first)
    while True:
        problem, order = random.randrange(PROBLEMS), int(time.time() - began)
        group = [made(number + i, problem, order) for i in range(random.randrange(1, 4))]
        folder.write(group)
        notes.writelines(f"{number + i} {problem} {order}\n" for i in range(len(group)))
        notes.flush()
        number += len(group)
        time.sleep(0.002)


def read(folder, notes):
    """Read each problem again and again: each rollout comes once, and as it was written."""
    met = Counter()
    while True:
        print("read" if met else "", file=notes, flush=True)
        for problem in range(PROBLEMS):
            for found in folder.read(problem):
                expected = made(int(found.tokens[0]), problem, found.order)
                met[int(found.tokens[0])] += 1
                is_right = all((a == b).all() for a, b in zip(found[1:4], expected[1:4], strict=True))
                if not is_right or met[int(found.tokens[0])] > 1 or folder.stats.files_refused:
                    print("wrong", found, file=notes, flush=True)
        time.sleep(0.01)


def prune(folder, notes):
    while True:
        folder.prune(KEPT_BYTES)
        time.sleep(0.2)


if __name__ == "__main__":
    role, path, log, *arguments = sys.argv[1:]
    with open(log, "a") as notes:
        {"write": write, "read": read, "prune": prune}[role](
            HistoryFolder(path, ORIGIN_OF_NUMBERS), notes, *map(float, arguments)
        )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_killed_at_any_moment(tmp_path):
    path, began = tmp_path / "a history", time.time()
    root, starts = Path(__file__).parents[2], Counter()

    def start(role):
        name, log = role.split(), tmp_path / f"{role}.{starts[role]}.log"
        arguments = [str(path), str(log)]
        if name[0] == "write":
            arguments += [str(starts.total() * 10_000), str(began)]
        starts[role] += 1
        command = [sys.executable, "-m", "tests.history.test_torture", name[0], *arguments]
        return subprocess.Popen(command, cwd=root, stderr=(tmp_path / f"{role}.err").open("a"))

    roles = ["write 0", "write 1", "read 0", "read 1", "prune"]
    running = {role: start(role) for role in roles}
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / f"{role}.0.log").exists() for role in roles) and time.monotonic() < deadline:
            time.sleep(0.1)
        for _ in range(NUM_ROUNDS):
            time.sleep(2)
            for role in random.sample(roles, 3):
                assert running[role].poll() is None, (tmp_path / f"{role}.err").read_text()
                running[role].send_signal(signal.SIGKILL)
                running[role].wait()
                running[role] = start(role)
        time.sleep(2)
        for role, process in running.items():
            assert process.poll() is None, (tmp_path / f"{role}.err").read_text()
    finally:
        for process in running.values():
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert {line for log in tmp_path.glob("read *.log") for line in log.read_text().split("\n")} == {"", "read"}
    written = {}
    for log in tmp_path.glob("write *.log"):
        *lines, _ = log.read_text().split("\n")  # the last one is empty, or was cut
        for line in lines:
            number, problem, order = map(int, line.split())
            written[number] = problem, order
    folder = HistoryFolder(str(path), ORIGIN_OF_NUMBERS)
    held = {}
    for problem in range(PROBLEMS):
        for found in folder.read(problem):
            assert int(found.tokens[0]) not in held
            held[int(found.tokens[0])] = problem, found.order
    oldest = min(order for _, order in held.values())
    expected = {number: about for number, about in written.items() if about[1] > oldest}
    assert len(expected) > 20
    assert expected.items() <= held.items()
    assert folder.stats.files_refused == 0
