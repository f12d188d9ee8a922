"""`rollout-spec doctor` without a report: what of all that speculation needs is installed, and fits together."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import rollout_spec
from rollout_spec.config import plugin_fault
from rollout_spec.imports import INSTALL_VLLM, install
from rollout_spec.integrations.vllm import environment
from rollout_spec.jit import cache

Verdict = Literal["ok", "absent", "problem"]
"""Absent is what an extra brings and has not been asked for: no fault, as a replay needs no engine."""


def check_installation() -> Iterator[tuple[Verdict, str]]:
    """(verdict, what was found and what to do) of all that speculation needs."""
    logging.getLogger("vllm").setLevel(logging.ERROR)  # what it says while it is imported is no part of this
    yield "ok", f"rollout-spec {rollout_spec.__version__}, Python {sys.version.split()[0]}"
    entries = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "rollout_spec"]
    if not entries:
        yield "problem", "vLLM's entry point is missing: reinstall rollout-spec"
    else:
        yield _imports("vLLM's entry point", entries[0].load)
    fault = plugin_fault()
    yield _ok_if(fault is None), fault or "vLLM loads the plugin"
    try:
        wanted = environment.read()
    except ValueError as error:
        yield "problem", str(error)
    else:
        if wanted is not None:
            which = f"whose model matches one of {wanted.models}" if wanted.models else "that generate"
            yield "ok", f"{environment.VARIABLE} gives speculation to engines {which}"
    yield from _check_compiler()
    sound = True
    for verdict, line in _check_torch():
        sound &= verdict != "problem"
        yield verdict, line
    if sound:  # vLLM imports torch and transformers: their fault would be reported once more, as one of vLLM
        yield from _check_vllm()
    yield from _check_trl()
    if importlib.util.find_spec("pyarrow") is None:
        yield "absent", f"pyarrow; `rollout-spec replay` reads recordings with it: {install('replay')}"


def _ok_if(sound: bool) -> Verdict:
    return "ok" if sound else "problem"


def _imports(what: str, load: Callable[[], Any], hint: str = "") -> tuple[Verdict, str]:
    """Builds that do not fit each other fail in many ways."""
    try:
        load()
    except Exception as error:
        return "problem", f"{what} cannot be imported ({type(error).__name__}: {str(error)[:80]}){hint}"
    return "ok", f"{what} can be imported"


def _check_compiler() -> Iterator[tuple[Verdict, str]]:
    yield _imports("numba, which compiles the drafters,", lambda: importlib.import_module("numba").njit)
    chosen, folder = os.environ.get("NUMBA_CACHE_DIR"), cache.find_folder()
    if chosen and (folder is None or not folder.path.is_relative_to(chosen)):
        yield "problem", f"NUMBA_CACHE_DIR={chosen} cannot be written"
    if folder is None:
        yield (
            "problem",
            f"no folder can be written, so each process compiles the drafters anew: {cache.REMEDY}",
        )
    else:
        advice = f", which may be gone after a restart: {cache.REMEDY}" if folder.is_temporary else ""
        yield "ok", f"compiled drafters are kept in {folder.path}{advice}"


def _check_vllm() -> Iterator[tuple[Verdict, str]]:
    from rollout_spec.integrations.vllm.compat import check_version

    if importlib.util.find_spec("vllm") is None:
        yield "absent", f"vLLM; only engines need it: {INSTALL_VLLM}"
        return
    verdict, line = _imports("vLLM", lambda: importlib.import_module("vllm").LLM, f": {INSTALL_VLLM}")
    if verdict == "problem":
        yield verdict, line
        return
    vllm = importlib.import_module("vllm")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_version(vllm.__version_tuple__, vllm.__version__)
        except RuntimeError as error:
            yield "problem", str(error)
        else:
            yield "ok", str(caught[0].message) if caught else f"vLLM {vllm.__version__}"


def _check_torch() -> Iterator[tuple[Verdict, str]]:
    if importlib.util.find_spec("torch") is None:
        yield "absent", "torch; only engines need it, and vLLM brings it"
        return
    verdict, line = _imports("torch", lambda: importlib.import_module("torch"))
    if verdict == "problem":
        yield verdict, line
        return
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        yield "ok", f"torch {torch.__version__}, no GPU: engines run on the CPU"
    else:
        yield "ok", f"torch {torch.__version__}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    if importlib.util.find_spec("transformers") is not None:
        hint = ". Builds for another torch do that: pip uninstall torchvision torchaudio torchcodec"
        yield _imports("transformers", lambda: importlib.import_module("transformers.modeling_utils"), hint)


def _check_trl() -> Iterator[tuple[Verdict, str]]:
    try:
        trl = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        yield "absent", f"TRL; only trainers need it: {install('trl')}"
    else:
        release = [int(part) for part in re.findall(r"\d+", trl)[:2]]
        if release == [1, 12]:
            yield "ok", f"TRL {trl}, for PPOTrainer; other trainers need 1.16 or newer"
        else:
            recent = release >= [1, 16]
            yield _ok_if(recent), f"TRL {trl}" + ("" if recent else ": 1.16 or newer is needed, 1.12 for PPOTrainer")
