"""What history costs outside of the engine's steps.

    python experiments/bench_history.py [--only import] [--tokenizer NAME_OR_PATH] --out FILE

Rollouts are made of real text, the source files of Python's standard library, in slices of 500 tokens: sixteen to a
prompt, which is a slice too. Without `--tokenizer` a token is a byte, and recordings of text are left out.

- `import`: tokens per second of `rollout-spec history import`, by kind of recording, reading, tokenizing, writing and
  fsync included; and the bytes per token that it leaves on disk. Gate: history holds exactly the recorded tokens.

Reported: p20/p50/p80 over the repetitions, after one that is not counted.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rows import append, origin, quantiles

SAMPLES, LENGTH = 16, 500


class Texts(NamedTuple):
    """Rollouts of real text."""

    prompts: list[list[int]]
    """One per rollout."""
    completions: list[list[int]]
    tokenizer: Any
    """None: tokens are bytes."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the completions."""
        return sum(map(len, self.completions))


def real_texts(num_tokens: int, tokenizer: Any) -> Texts:
    """Rollouts of about so many tokens."""
    wanted = num_tokens * (1 + 1 / SAMPLES)
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            text = path.read_text(errors="replace")
            tokens += text.encode() if tokenizer is None else tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) >= wanted:
            break
    slices = [tokens[i : i + LENGTH] for i in range(0, int(wanted), LENGTH)]
    prompts, completions = slices[:: SAMPLES + 1], [s for i, s in enumerate(slices) if i % (SAMPLES + 1)]
    return Texts([prompts[i // SAMPLES] for i in range(len(completions))], completions, tokenizer)


def write_ids(texts: Texts, path: Path) -> None:
    """JSONL of token ids."""
    with path.open("w") as file:
        for prompt, completion in zip(texts.prompts, texts.completions, strict=True):
            file.write(json.dumps({"prompt_token_ids": prompt, "token_ids": completion, "step": 1}) + "\n")


def decoded(texts: Texts) -> Iterator[tuple[str, str]]:
    """(prompt, completion) as text without special tokens."""
    for both in zip(texts.prompts, texts.completions, strict=True):
        prompt, completion = (texts.tokenizer.decode(ids, skip_special_tokens=True) for ids in both)
        yield prompt, completion


def write_verl(texts: Texts, path: Path) -> None:
    """JSONL as verl dumps it."""
    with path.open("w") as file:
        for prompt, completion in decoded(texts):
            row = {"input": prompt, "output": completion, "gts": None, "score": 1.0, "step": 1}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_trl(texts: Texts, path: Path) -> None:
    """Parquet as TRL logs it."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    prompts, completions = zip(*decoded(texts), strict=True)
    size = len(prompts)
    columns = {"step": [1] * size, "prompt": prompts, "completion": completions, "reward": [1.0] * size}
    parquet.write_table(arrow.table({**columns, "advantage": [0.5] * size}), path)


def measure_import(args: argparse.Namespace, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Import each kind of recording."""
    from rollout_spec.history.contents import Contents, each_once
    from rollout_spec.history.importers import Converter, Recording, import_recordings
    from rollout_spec.history.shards import Origin
    from rollout_spec.history.storage import LocalStorage

    kinds: dict[str, Callable[[Texts, Path], None]] = {"JSONL of token ids": write_ids}
    if tokenizer is not None:
        kinds.update({"JSONL of text": write_verl, "Parquet of text": write_trl})
    texts = real_texts(args.tokens, tokenizer)
    for kind, write in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "recording"
            write(texts, path)
            per_second = []
            for repetition in range(args.repetitions + 1):
                storage = LocalStorage(Path(folder) / str(repetition))
                report = import_recordings([Recording(path)], Converter(tokenizer), storage, Origin())
                if repetition:
                    per_second.append(report.tokens / report.seconds)
            rollouts = sorted(each_once(Contents(storage)), key=lambda rollout: rollout.tokens.tolist())
            found = [rollout.tokens.tolist() for rollout in rollouts]
            if kind == "JSONL of token ids":
                assert found == sorted(texts.completions), "history does not hold what was recorded"
            else:
                assert sorted(map(tokenizer.decode, found)) == sorted(completion for _, completion in decoded(texts))
            yield {
                "measurement": "import",
                "input": kind,
                "tokens": report.tokens,
                "input_bytes": path.stat().st_size,
                "tokens_per_second": quantiles(per_second),
                "bytes_per_token": round(report.num_bytes / report.tokens, 3),
            }


MEASUREMENTS: dict[str, Callable[[argparse.Namespace, Any], Iterator[dict[str, Any]]]] = {"import": measure_import}
"""Each gives rows, which `main` prints and writes."""


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MEASUREMENTS, action="append", help="may be repeated")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tokenizer", metavar="NAME_OR_PATH")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    args = parser.parse_args(argv)
    tokenizer = None
    if args.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, model_max_length=10**9)
    for name in args.only or MEASUREMENTS:
        for row in MEASUREMENTS[name](args, tokenizer):
            append(args.out, {"benchmark": "history", **row, **origin(packages=("pyarrow", "transformers"))})
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
