"""Each figure in a table of README or docs has its row in `experiments/results`: part of `make check`.

Below a table of the docs its page names the commits that the rows are of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from experiments.rows import RESULTS

Rows = list[dict[str, Any]]
PAGES = ("README.md", "docs/benchmarks.md", "docs/history.md", "docs/model-drafters.md", "docs/target-features.md",
         "docs/gpu.md", "docs/frameworks.md")  # fmt: skip
LABELS = {
    "", "requests at once", "Stage", "Minutes", "What", "Ran on", "requests", "requests, real model", "epoch", "set",
    "Engine", "Engines", "Drafts", "You run", "Its vLLM", "T", "Drafter, 3 tokens", "rollouts", "Framework", "vLLM",
    "Runner, drafter",
}  # fmt: skip
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def read(name: str, **wanted: Any) -> Rows:
    """The rows of a file that have these values, oldest first."""
    rows = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    return [row for row in rows if all(row.get(field) == value for field, value in wanted.items())]


def measured_phases() -> Rows:
    """The phases that ran on an H100, of the recording that is used unless another is named."""
    return read("bench_phase", benchmark="phase", device="NVIDIA H100 80GB HBM3", rollouts="rg_llama_math.parquet")


def fields(rows: Rows, *names: str) -> list[float]:
    """The numbers in these fields, which may be lists and dicts of numbers."""
    return [float(number) for row in rows for name in names for number in NUMBER.findall(json.dumps(row[name]))]


def modes(rows: Rows) -> Iterator[float]:
    """Each mode's geometric mean by number of requests, without and with history, and its lowest cell."""
    names = "benchmark", "gpu", "model", "policy"
    for mode in {tuple(row[name] for name in names) for row in rows}:
        mine = [row for row in rows if tuple(row[name] for name in names) == mode]
        for cell in {(row["batch"], row["history"]) for row in mine}:
            of_cell = [np.log(row["speedup"]) for row in mine if (row["batch"], row["history"]) == cell]
            yield float(np.exp(np.mean(of_cell)))
        yield min(row["speedup"] for row in mine)


def on_gpu(phases: Rows, simulated: Rows) -> Iterator[float]:
    """Of phases on a GPU: seconds without drafts and with them, tokens per step, times as fast, as it was estimated."""
    names = "shape", "batch", "phase"
    for with_drafts in (row for row in phases if row["mode"] == "device"):
        cell = tuple(with_drafts[name] for name in names)
        took = [row["seconds"] for row in phases if (*(row[name] for name in names), row["mode"]) == (*cell, "none")]
        same = [row for row in simulated if tuple(row[name] for name in names) == cell]
        estimated = {row["mode"]: row["simulated"]["seconds"] for row in same}
        yield from (np.mean(took), with_drafts["seconds"], with_drafts["tokens_per_step"])
        yield from (with_drafts["times_as_fast"], estimated["none"] / estimated["device"])


def tables() -> Iterator[tuple[str, Rows, Iterable[float]]]:
    """(how a table's first line begins, its rows, what figures they give)."""
    demos, engines = read("bench_demo"), read("bench_engines", policy="demo")
    run = read("real_policy/run", benchmark="real_policy/run")
    drafts = [row for row in read("bench_draft", regime="inflight") if row["drafter"] != "ours, n-gram"]
    features = read("bench_features", history=16)
    for start, rows, names in (
        ("| requests | epoch ", [row for row in engines if row["epochs"] > 1], ("speedup", "interval")),
        ("| requests, real model ", read("bench_engines", policy="real-policy"), ("speedup", "interval")),
        ("| set | ", drafts, ("tokens_per_step", "drafted_per_step")),
        ("| rollouts | words ", features, ("tokens_per_step", "gains")),
    ):
        yield start, rows, fields(rows, *names)
    first = [len(demos), *(sum(fields(demos, name)) for name in ("rollouts_identical", "rollouts_total"))]
    first += [*fields(demos, "generation_speedup"), *fields(engines, "speedup")]
    first += fields(run, "stock_over_on_per_token", "off_over_on", "identical", "rollouts")
    phases = measured_phases()
    simulated = read("modes_simulated", benchmark="modes/phases", gpu="h100")
    yield "| requests at once | ", [*phases, *simulated], on_gpu(phases, simulated)
    yield "| What | Ran on ", [*demos, *engines, *run], first
    rows = read("real_policy/run", benchmark="real_policy/epoch")
    epochs = fields(rows, "reward", "tokens_per_step", "stock_over_on_per_token", "off_over_on")
    yield "| epoch | mean reward ", rows, epochs
    rows = [row for row in read("bench_model_drafters") if "request_steps" in row]
    of_all_epochs = [sum(row["tokens"]) / sum(row["request_steps"]) for row in rows]
    of_each = [t / s for row in rows for t, s in zip(row["tokens"], row["request_steps"], strict=True)]
    yield "| T | Drafter", rows, [*of_all_epochs, *of_each]
    rows = [
        *read("modes_simulated", benchmark="modes/simulated"),
        *read("modes_simulated", benchmark="modes/sub_steps"),
    ]
    for start in ("| Engine | Drafts ", "| You run | ", "| Framework | "):
        yield start, rows, modes(rows)


def missing(table: str, figures: list[float]) -> list[str]:
    """The numbers of a table that are none of these rounded to as many digits, those of labels left out."""
    header, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    cells = [cell for line in lines for name, cell in zip(header, line, strict=True) if name not in LABELS]
    shown = NUMBER.findall(" ".join(cells))
    return [text for text in shown if text not in {f"{one:,.{len(text.partition('.')[2])}f}" for one in figures}]


def main() -> int:
    """Print what no row gives; returns 1 where there is something."""
    known, wrong = {start: (rows, list(figures)) for start, rows, figures in tables()}, []
    for page in PAGES:
        for table, below in re.findall(r"\n\n((?:\|.*\n)+)(?:\n(.*))?", (RESULTS.parents[1] / page).read_text()):
            start = next((start for start in known if table.startswith(start)), "")
            rows, figures = known.pop(start, ([], []))
            wrong += [f"{page}: no row gives {text}" for text in missing(table, figures) if start or "." in text]
            note = f"Rows of {', '.join(dict.fromkeys(row['git'].removesuffix('-dirty') for row in rows))}."
            if start and page != "README.md" and below != note:
                wrong.append(f"{page}: below {start} it does not say: {note}")
    wrong += [f"there is no table {start}" for start in known]
    print("\n".join(wrong) or "each figure in a table has its row")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
