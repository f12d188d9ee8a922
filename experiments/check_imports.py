"""What the experiments need, by version: imported before anything else takes time.

python experiments/check_imports.py [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from rows import append, origin

NEEDED = ("numpy", "numba", "wrapt", "torch", "triton", "pyarrow")
FOR_ENGINES = ("transformers", "vllm")


def main(argv: list[str] | None = None) -> None:
    """Import everything, and print a line for each package.

    Raises:
        SystemExit: a package that every experiment needs is missing or broken.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append a row to this file")
    args = parser.parse_args(argv)
    missing = []
    for name in (*NEEDED, *FOR_ENGINES):
        try:
            print(f"{name} {importlib.import_module(name).__version__}")
        except Exception as error:  # a broken package may raise anything
            missing.append(name)
            print(f"{name}: {error!r}")
    append(args.out, {"benchmark": "imports", "missing": missing, **origin()})
    if any(name in missing for name in FOR_ENGINES):
        print("without these there are no engines: the stages forward-1.5b and forward-7b measure what steps cost")
    if any(name in missing for name in NEEDED):
        raise SystemExit(f"missing: {', '.join(missing)}")


if __name__ == "__main__":
    main()
