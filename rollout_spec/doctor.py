"""`rollout-spec doctor`: checks the installation, or explains a run's report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import rollout_spec
from rollout_spec.config import plugin_fault
from rollout_spec.installation import INSTALL_VLLM, REMEDY, find_folder, install, installed_versions
from rollout_spec.integrations.vllm.compat import check_version
from rollout_spec.integrations.vllm.config import VARIABLE, read_environment
from rollout_spec.report import explain, read_report
from rollout_spec.types import VerifyMethod

PACKAGES = (  # name, what needs it if it may be absent, what to do if it cannot be used
    ("numba", "", "reinstall rollout-spec"),
    ("pyarrow", f"history_dir and estimates need it: {install('history')}", f"reinstall it: {install('history')}"),
    ("torch", "engines need it, and vLLM brings it", INSTALL_VLLM),
    ("transformers", "engines need it, and vLLM brings it", "pip uninstall torchvision torchaudio torchcodec"),
    ("vllm", f"engines need it: {INSTALL_VLLM}", INSTALL_VLLM),
    ("trl", f"trainers need it: {install('trl')}", install("trl")),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    one = parser.add_mutually_exclusive_group()
    one.add_argument("report", nargs="?", type=Path, help="a run's report, or the folder of the trainer that wrote it")
    one.add_argument("--device", action="store_true", help="check the kernels on this machine's GPU")


def run(args: Namespace) -> int:
    """Check or explain, and print. Returns the exit code: 1 if a check finds a fault, 2 for bad input."""
    if args.device:
        return check_device()
    if args.report is None:
        return check_installation()
    try:
        report = read_report(args.report)
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    try:
        print(explain(report))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return _refuse(f"the report in {args.report} is damaged: {error!r}")
    return 0


def _refuse(reason: str) -> int:
    print("rollout-spec:", " ".join(reason.splitlines()), file=sys.stderr)
    return 2


def check_installation() -> int:
    """Print what is ok, what is a problem, and what is absent, which is no fault. Returns 1 if there is a problem."""
    verdicts = set()
    for verdict, line in look_around():
        verdicts.add(verdict)
        print(f"{verdict:8} {line}")
    print("There are problems." if "problem" in verdicts else "All is well.")
    return int("problem" in verdicts)


def look_around() -> Iterator[tuple[str, str]]:
    """(verdict, what was found and what to do) of all that speculation needs."""
    logging.getLogger("vllm").setLevel(logging.ERROR)  # what it says while it is imported is no part of this
    yield "ok", f"rollout-spec {rollout_spec.__version__}, Python {sys.version.split()[0]}"
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    yield _tried(
        "vLLM's entry point", lambda: f"is {entries['rollout_spec'].load().__module__}", "reinstall rollout-spec"
    )
    fault = plugin_fault()
    yield "problem" if fault else "ok", fault or "vLLM loads the plugin"
    yield _tried(VARIABLE, lambda: f"is {'set' if read_environment() else 'not set'}", "correct it")
    folder = find_folder()
    fault = None if folder else f"no folder can be written, so each process compiles the drafters anew: {REMEDY}"
    yield "problem" if fault else "ok", fault or f"compiled drafters are kept in {folder}"
    for package, needed_by, remedy in PACKAGES:
        if needed_by and importlib.util.find_spec(package) is None:
            yield "absent", f"{package}; {needed_by}"
            continue
        if package == "trl" and (old := unsupported_trl()):
            yield "absent", f"trl 1.16 or newer, or 1.12 for PPOTrainer, and {old} is installed; {needed_by}"
            continue
        verdict, line = _tried(package, partial(_version_of, package), remedy)
        yield verdict, line
        if verdict == "problem":  # those that follow import it, and would be reported for its fault
            break


def _tried(what: str, check: Callable[[], str], remedy: str) -> tuple[str, str]:
    try:
        return "ok", f"{what} {check()}"
    except Exception as error:  # builds that do not fit each other fail in many ways
        return "problem", f"{what} cannot be used ({type(error).__name__}: {str(error)[:200]}): {remedy}"


def _version_of(package: str) -> str:
    """Import a package as far as engines and trainers do. Raises whatever keeps it from being used."""
    module = importlib.import_module(package)
    version = str(module.__version__)
    if package == "torch":
        return f"{version}, {module.cuda.get_device_name() if module.cuda.is_available() else 'no GPU'}"
    if package == "transformers":
        importlib.import_module("transformers.modeling_utils")
    if package == "vllm":
        assert module.LLM  # is imported by being asked for
        check_version(module.__version_tuple__, version)
    return version


def unsupported_trl() -> str | None:
    """The installed TRL, if our callback does not work with it: no fault, as images of other frameworks bring one."""
    version = installed_versions(("trl",)).get("trl")
    release = tuple(map(int, re.findall(r"\d+", version or "")[:2]))
    return None if release >= (1, 16) or release == (1, 12) else version


def check_device(device: Any = None, vocab_size: int = 151_936) -> int:
    """Check the verifier's kernels on a GPU, as engines do at their start, by default for Qwen's vocabulary.

    Returns the exit code: 1 if something is wrong, 2 without a GPU.
    """
    torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    if device is None and (torch is None or not torch.cuda.is_available()):
        return _refuse("torch finds no GPU on this machine, and on a CPU no kernels run")
    import triton

    from rollout_spec.verify import self_check

    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device
    print(f"{name}, Triton {triton.__version__}, torch {torch.__version__}")
    status = 0
    for method, dtype in product(get_args(VerifyMethod), (torch.bfloat16, torch.float16, torch.float32)):
        fault = self_check.find_fault(
            device, vocab_size=vocab_size, dtype=dtype, num_speculative_tokens=8, method=method
        )
        status |= fault is not None
        print(f"problem  {method}: {fault}" if fault else f"ok       {method}, {dtype}")
    return status
