"""The options of `rollout-spec replay`, in a module of their own so that `--help` imports neither numba nor pyarrow."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollout_spec.drafters import DRAFTERS
from rollout_spec.replay.simulate import REGIMES

ABOUT_REGIMES = (
    "what a request drafts from. own: its own text; finished: also samples of its problem that have ended; inflight: "
    "also those that are generated together with it; epoch: its own text and those of an earlier epoch (default: all)"
)
ABOUT_THE_TABLE = (
    "In the table, noise: whether the drafter knew the noise that the tokens were sampled with (known), as engines do, "
    "for which files need a column seed; limit: the drafter's min_survival, which --frontier varies."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = ABOUT_THE_TABLE
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="Parquet files of rollouts, as `history export` writes them"
    )
    parser.add_argument("--drafter", default="history", help=f"one of {', '.join(DRAFTERS)}, or a dotted path")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="option of the drafter")
    parser.add_argument("--regime", choices=[*REGIMES, "all"], default="all", help=ABOUT_REGIMES)
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=16, metavar="K")
    parser.add_argument("--batch", type=int, default=64, help="requests that advance together")
    parser.add_argument("--prompts", type=int, help="only the first so many prompts of each file")
    parser.add_argument("--samples", type=int, help="replayed samples per prompt")
    parser.add_argument("--history", type=int, help="earlier samples per prompt in the epoch regime")
    parser.add_argument("--frontier", action="store_true", help="replay at several thresholds of min_survival")
    parser.add_argument(
        "--engine-cost",
        type=Path,
        metavar="FILE",
        help="simulate whole rollout phases with this cost curve (JSON: name, tokens, seconds) and compare budgets",
    )
    parser.add_argument(
        "--policy",
        choices=["recorded", "synthetic"],
        default="recorded",
        help="synthetic: fresh rollouts of a policy made from the recorded ones, with known noise",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
