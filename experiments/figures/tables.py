"""The tables of measurements in README and docs: their rows, and how a line follows from them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.real_policy.report import summarise
from experiments.rows import RESULTS

NOTE = "Measured with earlier code"
Row = dict[str, Any]
Rows = list[Row]

ROOT = Path(__file__).parents[2]
DRAFTING = ("drafters/host", "rollout_spec/features", "rollout_spec/noise", "rollout_spec/replay")
VERIFYING = ("rollout_spec/verify", "rollout_spec/features", "rollout_spec/noise")
ENGINE = (
    "drafters", "integrations/vllm", "rollout_spec/budget", "rollout_spec/drafting.py", "rollout_spec/history/roots.py",
    "rollout_spec/jit", *VERIFYING,
)  # fmt: skip
SHARED = ("folder", "partitions", "problem", "roots", "shards", "storage")
SHARED_HISTORY = tuple(f"rollout_spec/history/{name}.py" for name in SHARED)
MEASURES = {
    "budget/simulated": ("rollout_spec/budget", *DRAFTING),
    "demo": ENGINE,
    "draft/cost": DRAFTING,
    "draft/quality": DRAFTING,
    "engines": ENGINE,
    "features": DRAFTING,
    "history/fleet": (*SHARED_HISTORY, *DRAFTING),
    "host": ENGINE,
    "model_drafters": ENGINE,
    "modes/simulated": ("rollout_spec/budget", *DRAFTING),
    "real_policy/run": ENGINE,
    "real_policy/step": ENGINE,
    "shared_history": (*SHARED_HISTORY, *ENGINE),
    "soak": ENGINE,
    "verify": VERIFYING,
}
"""Files and folders whose code the rows of a benchmark measure."""


def read(name: str, **fields: Any) -> Rows:
    """The rows of a file that have these values, oldest first."""
    rows = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    return [row for row in rows if all(row.get(field) == value for field, value in fields.items())]


def one(rows: Iterable[Row], **fields: Any) -> Row:
    """The newest of these rows that has these values."""
    return [row for row in rows if all(row.get(field) == value for field, value in fields.items())][-1]


def newest(rows: Rows) -> Rows:
    """Those of the last commit that any of these was measured with."""
    return [row for row in rows if row["git"] == rows[-1]["git"]]


def spread(row: Row) -> str:
    """A speedup and its interval. Rollouts of ours that differ are no figures for the docs."""
    assert row.get("identical") == row.get("rollouts") or row["dtype"] != "float32"
    return f"{row['speedup']:.2f} ({row['interval'][0]:.2f}–{row['interval'][1]:.2f})"


def lowest_and_highest(values: Sequence[float]) -> str:
    """Below 1, where losses are small, three digits."""
    low, high = (f"{value:.3f}" if 0.9 < value < 1 else f"{value:.2f}" for value in (min(values), max(values)))
    return f"{low}–{high}"


def geometric_mean(values: Iterable[float]) -> float:
    """Of speedups."""
    return float(np.exp(np.mean(np.log(list(values)))))


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        page: Below the repository's root.
        header: Its first line.
        rows: That it is made of.
        cells: Its lines from the third on, cell by cell.
    """

    page: str
    header: str
    rows: Rows
    cells: Callable[[Rows], list[list[str]]]

    def lines(self) -> list[str]:
        """What the page has below the table's two first lines."""
        return [f"| {' | '.join(cells)} |" for cells in self.cells(self.rows)]


def old_commits(rows: Rows) -> list[str]:
    """Commits of rows after which the code that they measure has changed."""
    measured = dict.fromkeys((row["git"].removesuffix("-dirty"), row["benchmark"]) for row in rows)
    return list(dict.fromkeys(commit for commit, name in measured if has_changed(commit, MEASURES[name])))


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What git says in this repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True)


def has_all_commits() -> bool:
    """Whether this is a whole repository: not a copy of its files, and no shallow clone."""
    return git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"


def has_changed(commit: str, paths: Sequence[str]) -> bool:
    """Whether files have changed since a commit; True if there is no such commit."""
    return git("diff", "--quiet", commit, "--", *paths).returncode != 0


def note_of_age(commits: Sequence[str]) -> str:
    """What a section says whose rows are older than the code."""
    return f"{NOTE} ({', '.join(commits)})."


STEPS_PER_EPOCH = 8


def real_policy_epochs(rows: Rows) -> list[list[str]]:
    """A line per epoch."""
    lines = []
    for epoch, first in enumerate(range(0, len(rows), STEPS_PER_EPOCH)):
        found = summarise(rows[first : first + STEPS_PER_EPOCH])
        lines.append(
            [
                str(epoch), f"{found['reward']:.2f}", f"{found['tokens_per_step']:.2f}",
                f"{100 * found['accepted_tokens'] / found['draft_tokens']:.0f} %",
                f"{found['stock_over_on_per_token']:.2f}", f"{found['off_over_on']:.2f}",
            ]
        )  # fmt: skip
    return lines


SETS = ("rg_qwen3b", "codet_codegen16b", "tot_text_gpt4", "tau_airline_gpt4o", "r1v_grpo_log", "rg_llama_math")
DRAFTERS = ("vLLM n-gram", "Arctic", "ours", "ours, shared", "ours, n-gram")


def drafts(rows: Rows) -> list[list[str]]:
    """Tokens per step and draft tokens by set."""
    found = ([one(rows, set=name, drafter=drafter) for drafter in DRAFTERS[:4]] for name in SETS)
    return [
        [row[0]["set"], *(f"{cell['tokens_per_step']:.2f} ({cell['drafted_per_step']:.1f})" for cell in row)]
        for row in found
    ]


def drafting_cost(rows: Rows) -> list[list[str]]:
    """Microseconds and bytes by drafter."""
    found = [one(rows, drafter=drafter) for drafter in DRAFTERS]
    times = [f"{row['index_us_per_request_step'] + row['draft_us_per_request_step']:.0f}" for row in found]
    return [["µs", *times], ["bytes per history token", *(f"{row['bytes_per_history_token']:.0f}" for row in found)]]


BUDGETED = ("K=1", "K=2", "K=4", "K=8", "K=16", "all drafts", "ours")


def budgets(rows: Rows) -> list[list[str]]:
    """Lowest and highest of a curve's cells."""
    lines = []
    for curve, label in (
        ("1.5b", "1.5B on an H200's roofline"),
        ("7b", "7B on an H200's roofline"),
        ("flops", "every token costs the same"),
    ):
        cells = dict.fromkeys((row["set"], row["batch"]) for row in rows)
        ratios: list[list[float]] = [[], [], []]
        for name, batch in cells:
            mine = [row for row in rows if (row["curve"], row["set"], row["batch"]) == (curve, name, batch)]
            speedup = {row["policy"]: row["speedup"] for row in mine}
            best = max([1.0, *(value for policy, value in speedup.items() if policy.startswith("K="))])
            for values, base in zip(ratios, (1.0, best, speedup["all drafts"]), strict=True):
                values.append(speedup["ours"] / base)
        lines.append([label, *map(lowest_and_highest, ratios)])
    return lines


PICKED = ("stock", "ngram", "suffix", "off", "ours")


def engines(rows: Rows) -> list[list[str]]:
    """A line per batch size and epoch."""
    return [
        [str(batch), str(epoch), *(spread(one(rows, batch=batch, epoch=epoch, engine=name)) for name in PICKED[1:])]
        for batch, epoch in dict.fromkeys((row["batch"], row["epoch"]) for row in rows)
    ]


def wrong_drafts(rows: Rows) -> list[list[str]]:
    """A line per batch size: engines that speculate in vain, and ours."""
    return [
        [str(batch), *(spread(one(rows, batch=batch, engine=name)) for name in ("idle", "wrong", "ours"))]
        for batch in dict.fromkeys(row["batch"] for row in rows)
    ]


def modes(rows: Rows) -> list[list[str]]:
    """Geometric means by number of requests, and the lowest cell."""
    columns = [(model, policy) for model in ("1.5b", "8b") for policy in ("K=8", "192 tokens", "host")]
    found = [[row for row in rows if (row["model"], row["policy"]) == column] for column in columns]
    lines = [
        [
            str(batch),
            *(f"{geometric_mean(row['speedup'] for row in mine if row['batch'] == batch):.2f}" for mine in found),
        ]
        for batch in sorted({row["batch"] for row in rows})
    ]
    return [*lines, ["lowest", *(f"{min(row['speedup'] for row in mine):.2f}" for mine in found)]]


HOST = ("ours", "ours, indexing late", "ours V2", "ours V2, indexing late", "ngram", "suffix")


def host_path(rows: Rows) -> list[list[str]]:
    """Microseconds by number of requests."""

    def cell(batch: int, proposer: str) -> str:
        times = [row["us_per_request"][1] for row in rows if (row["batch"], row["proposer"]) == (batch, proposer)]
        return f"{times[-1]:.{0 if times[-1] >= 10 else 1}f}" if times else "–"

    return [
        [f"{batch:,}", *(cell(batch, proposer) for proposer in HOST)]
        for batch in sorted({row["batch"] for row in rows})
    ]


def verifier(rows: Rows) -> list[list[str]]:
    """Microseconds by vocabulary, requests and K."""
    shapes = [(49_152, 1, 0), (49_152, 1, 8), (49_152, 16, 8), (151_936, 1, 8), (151_936, 16, 8)]
    plain = {"logprobs": True, "logits": "peaked", "dtype": "float32", "top_p": 1.0, "ragged": False}
    found = [(shape, one(rows, vocab=shape[0], batch=shape[1], k=shape[2], **plain)) for shape in shapes]
    return [
        [f"{vocab:,}", f"{batch}, {k}", *(f"{row[name][1]:,.0f}" for name in ("ours", "features", "vllm_v1"))]
        for (vocab, batch, k), row in found
    ]


def shared_history(rows: Rows) -> list[list[str]]:
    """Tokens per step by epoch."""
    return [
        [
            str(number),
            *(
                ", ".join(f"{value:.2f}" for value in one(rows, engines=number, mode=mode)["tokens_per_step"])
                for mode in ("alone", "shared", "one")
            ),
        ]
        for number in (2, 4)
    ]


def model_drafters(rows: Rows) -> list[list[str]]:
    """Tokens per step by temperature and drafter; in brackets, of the first repetition."""

    def mean(row: Row) -> str:
        return f"{sum(row['tokens']) / sum(row['request_steps']):.2f}"

    lines = []
    for temperature in (0.6, 1.0):
        mine = [row for row in rows if row["temperature"] == temperature]
        history = one(mine, mode="history")
        for method, label in (("draft_model", "separate model"), ("mtp", "MTP layer")):
            vllms = [mean(one(mine, mode=f"{how}:{method}")) for how in ("greedy", "probabilistic", "coupled")]
            both = one(mine, mode=f"both:{method}")
            lines.append(
                [
                    str(temperature), label, *vllms, f"{mean(history)} ({history['tokens_per_step'][0]:.2f})",
                    f"**{mean(both)}** ({both['tokens_per_step'][0]:.2f})",
                ]
            )  # fmt: skip
    return lines


def fleet(rows: Rows) -> list[list[str]]:
    """A line per routing: bytes read, and tokens per step over those of one engine that knows all at once."""

    def across(values: Sequence[float], form: str) -> str:
        low, high = (format(value, form) for value in (min(values), max(values)))
        return low if low == high else f"{low} to {high}"

    def epochs(rows: Rows) -> str:
        ratios = [
            [mine / all_ for mine, all_ in zip(r["tokens_per_step"], r["all_at_once"], strict=True)] for r in rows
        ]
        return ", ".join(across(of_epoch, ".2f") for of_epoch in zip(*ratios, strict=True))

    lines = []
    for routing, label in (
        ("sticky", "a problem's groups to one engine"),
        ("groups", "whole groups to any engine"),
        ("rollouts", "each rollout to any engine"),
    ):
        mine = [
            row for row in rows if row["routing"] == routing and row["engines"] > 1 and row["transport"] == "folder"
        ]
        now, before = ([row for row in mine if row["layout"] == layout] for layout in ("by problem", "before"))
        read_bytes = [across([row["bytes in per token"] for row in some], ",.0f") for some in (now, before)]
        lines.append([label, *read_bytes, epochs(now), epochs([row for row in before if row["engines"] == 1024])])
    return lines


TARGETS = {
    "smollm2_sft_chain_sum_t10": "chain_sum, fine-tuned, T = 1",
    "samples-step0040-t1": "trained policy, T = 1",
    "samples-step0040-t0.6": "trained policy, T = 0.6",
    "samples-step0000-t1": "warmed-up policy, T = 1",
    "samples-step0000-t0.6": "warmed-up policy, T = 0.6",
    "smollm2_gsm_symbolic_t10": "gsm_symbolic, the model as it comes, T = 1",
    "smollm2_gsm_symbolic_t06": "gsm_symbolic, the model as it comes, T = 0.6",
}


def features(rows: Rows) -> list[list[str]]:
    """Tokens per step by set of rollouts."""
    lines = []
    for target, label in TARGETS.items():
        row = one(rows, target=target)
        gain, low, high = row["gains"]["features / words"]
        per_step = [f"{row['tokens_per_step'][way]:.2f}" for way in ("words", "features", "tree")]
        lines.append([label, *per_step, f"{gain:.2f} ({low:.2f}–{high:.2f})"])
    return lines


def readme(rows: Rows) -> list[list[str]]:
    """What a visitor sees first."""
    runs = [row for row in rows if row["benchmark"] == "demo"]
    demos = sorted(row["generation_speedup"] for row in runs)
    identical, total = (sum(row[name] for row in runs) for name in ("rollouts_identical", "rollouts_total"))
    real = one(rows, benchmark="real_policy/run")
    last = max(row["epoch"] for row in rows if row["benchmark"] == "engines")

    def by_batch(engine: str) -> str:
        found = [one(rows, benchmark="engines", engine=engine, batch=batch, epoch=last) for batch in (1, 16, 64)]
        return " / ".join(f"{row['speedup']:.2f}" for row in found)

    per_step = {
        name: [one(rows, set=set_, drafter=name)["tokens_per_step"] for set_ in SETS]
        for name in ("ours, shared", "Arctic")
    }
    ours, arctic = (f"{min(values):.2f} to {max(values):.2f}" for values in per_step.values())
    return [
        [
            "GRPO demo's rollouts, against stock vLLM", "two-layer Llama, batch 16",
            f"{demos[len(demos) // 2]:.2f} times as fast, {demos[0]:.2f} to {demos[-1]:.2f} in {len(demos)} runs; "
            f"{identical:,} of {total:,} rollouts identical",
        ],
        [
            f"[Prompts that come a {ORDINALS[last]} time](docs/benchmarks.md#engines), against stock vLLM",
            "two-layer Llama, batch 1 / 16 / 64",
            f"{by_batch('ours')} times as fast; vLLM's `ngram` {by_batch('ngram')}, its `suffix` {by_batch('suffix')}",
        ],
        [
            "GRPO's rollouts, against stock vLLM", "SmolLM2-135M in float32, batch 24",
            f"{real['stock_over_on_per_token']:.2f} times as fast per token; "
            f"{real['identical']} of {real['rollouts']} identical",
        ],
        [
            "Tokens per step, at most 16 drafted", "six sets of recorded rollouts, simulated",
            f"{ours}; vLLM's `suffix` method {arctic}",
        ],
    ]  # fmt: skip


ORDINALS = ("first", "second", "third", "fourth", "fifth")

BENCHMARKS = "docs/benchmarks.md"
PAGES = ("README.md", BENCHMARKS, "docs/history.md", "docs/model-drafters.md", "docs/target-features.md")
"""Whose tables of measurements must all be listed here."""


def tables() -> list[Table]:
    """All of them."""
    host = read("bench_host", benchmark="host", k=8, trace="rg_llama_math.parquet")
    quality = [
        row
        for row in read("bench_draft", benchmark="draft/quality", regime="inflight")
        if row["drafter"] in DRAFTERS[:4]
    ]
    demo_engines = read("bench_engines", benchmark="engines", policy="demo")
    real_engines = read("bench_engines", benchmark="engines", policy="real-policy")
    gains = read("bench_features", history=16, k=8, drafter="history")
    run = read("real_policy/run_features", benchmark="real_policy/run")
    columns = " | ".join(f"`{name}`" if name in ("ngram", "suffix") else name for name in PICKED[1:])
    return [
        Table(
            "README.md", "| What | Ran on | Result |",
            [*newest(read("bench_demo")), *demo_engines, *run, *quality], readme,
        ),
        Table(
            BENCHMARKS, f"| requests | epoch | {columns} |",
            [row for row in demo_engines if row["epochs"] > 1], engines,
        ),
        Table(
            BENCHMARKS, f"| requests, real model | epoch | {columns} |", real_engines, engines,
        ),
        Table(
            BENCHMARKS,
            "| epoch | mean reward | tokens per step | acceptance rate | time per token, stock vLLM / ours "
            "| ours, drafts off / on |",
            read("real_policy/run_features", benchmark="real_policy/step"), real_policy_epochs,
        ),
        Table(
            BENCHMARKS, '| set | vLLM n-gram | Arctic | `"suffix"` | `"history"` |',
            quality, drafts,
        ),
        Table(
            BENCHMARKS, '| | vLLM n-gram | Arctic | `"suffix"` | `"history"` | `"ngram"` |',
            read("bench_draft", benchmark="draft/cost", set="rg_llama_math", batch=64), drafting_cost,
        ),
        Table(
            BENCHMARKS, "| cost of a step | against no drafts | against the best of K = 0 to 16 | against all drafts |",
            [row for row in read("budget_simulated") if row["policy"] in BUDGETED],
            budgets,
        ),
        Table(
            BENCHMARKS, "| requests | no drafts, of a drafter | drafts that are always wrong | ours |",
            [row for row in demo_engines if row["baseline"] == "off"], wrong_drafts,
        ),
        Table(
            BENCHMARKS,
            "| requests | 1.5B: device, K = 8 | 1.5B: by requests | 1.5B: host, budget "
            "| 8B: device, K = 8 | 8B: by requests | 8B: host, budget |",
            read("modes_simulated", benchmark="modes/simulated"), modes,
        ),
        Table(
            BENCHMARKS, "| requests | V1 | V1, device | V2 | V2, device | vLLM's `ngram` | `suffix` (Arctic) |",
            newest(host), host_path,
        ),
        Table(
            BENCHMARKS, "| vocabulary | requests, K | ours | with features | vLLM |",
            read("bench_verify"), verifier,
        ),
        Table(
            "docs/history.md",
            "| A router sends | Bytes read per generated token, 2 to 1,024 engines | if all read all "
            "| Tokens per step in epochs 1 to 3, relative to one engine that sees all rollouts "
            "| if all read all, 1,024 engines |",
            read("fleet_simulated"), fleet,
        ),
        Table(
            "docs/history.md", "| Engines | alone | with a folder | one engine instead |",
            [row for row in read("bench_shared_history") if row.get("engines")],
            shared_history,
        ),
        Table(
            "docs/model-drafters.md",
            "| T | Drafter, 3 tokens | vLLM, greedy | vLLM, `probabilistic` | with our noise "
            "| history alone, K = 8 | both, K = 8 |",
            read("bench_model_drafters", train_steps=500, model_k=3), model_drafters,
        ),
        Table(
            "docs/target-features.md", "| rollouts | words | features | tree | features / words |",
            gains, features,
        ),
    ]  # fmt: skip
