"""Tiny models that draft for the tiny model: drafts are right often enough to be chosen, and wrong often enough."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

METHODS = ("draft_model", "eagle", "mtp")
WEIGHTS = "model.safetensors"


def model_drafters(target: Path, folder: Path) -> dict[str, tuple[Path, dict[str, object]]]:
    """By vLLM's method: (the target's path, `speculative_config` without the number of tokens)."""
    with_mtp = write_mtp_target(target, folder / "mtp")
    return {
        "draft_model": (target, {"method": "draft_model", "model": str(write_draft_model(target, folder / "draft"))}),
        "eagle": (target, {"method": "eagle", "model": str(write_eagle_head(target, folder / "eagle"))}),
        "mtp": (with_mtp, {"method": "mtp"}),
    }


def write_draft_model(target: Path, path: Path) -> Path:
    """The target's weights with noise."""
    shutil.copytree(target, path)
    weights, generator = load_file(path / WEIGHTS), torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if weight.dim() > 1:
            weights[name] = weight + 0.15 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, path / WEIGHTS, {"format": "pt"})
    return path


def write_eagle_head(target: Path, path: Path) -> Path:
    """The target's last layer, over the mean of the target's state and the next token's embedding."""
    path.mkdir()
    config = _read_config(target)
    config["num_hidden_layers"] = 1
    (path / "config.json").write_text(json.dumps(config))
    weights = {
        name.replace("model.layers.1.", "layers.0."): weight
        for name, weight in load_file(target / WEIGHTS).items()
        if "layers.1." in name and "input_layernorm" not in name
    }
    weights["fc.weight"] = _mean_of_two(config["hidden_size"])
    save_file(weights, path / WEIGHTS)
    return path


def write_mtp_target(target: Path, path: Path) -> Path:
    """The target as a MiMo model, with one MTP layer that is a copy of its last layer."""
    shutil.copytree(target, path)
    config = _read_config(target)
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    weights, size = load_file(target / WEIGHTS), config["hidden_size"]
    for name, weight in list(weights.items()):
        if name.startswith("model.layers.1."):
            weights[name.replace("model.layers.1.", "model.mtp_layers.0.")] = weight.clone()
    for name, weight in list(weights.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):  # Qwen's attention has biases
            weights[name.replace("weight", "bias")] = torch.zeros(weight.shape[0])
    weights["model.mtp_layers.0.input_proj.weight"] = _mean_of_two(size)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"model.mtp_layers.0.{norm}.weight"] = torch.ones(size)
    save_file(weights, path / WEIGHTS, {"format": "pt"})
    return path


def _read_config(path: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((path / "config.json").read_text())
    return config


def _mean_of_two(size: int) -> torch.Tensor:
    """A linear map [size, 2 size], nearly the mean of its two inputs."""
    generator = torch.Generator().manual_seed(3)
    mean = torch.cat((torch.eye(size), torch.eye(size)), 1) / 2
    return mean + 0.02 * torch.randn(size, 2 * size, generator=generator)
