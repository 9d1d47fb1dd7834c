"""A GGUF file made into the hub's layout; the sandbox of `phalanx.models.unpickle` runs it on files of others."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.integrations import GGUF_CONFIG_MAPPING

from phalanx.errors import ModelError
from phalanx.models.hub_files import GENERATION, architecture_of
from phalanx.models.quiet import quiet_transformers

SUFFIX = ".gguf"


def rewrite_gguf(source: Path, out: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as config.json, safetensors and tokenizer.json.

    Quantised numbers are written as the float32 that they stand for, which is not their value before quantisation.
    """
    try:
        with quiet_transformers():
            here = {"gguf_file": source.name, "local_files_only": True, "trust_remote_code": False}
            read = _with_width_of_heads(AutoConfig.from_pretrained(source.parent, **here), source)
            model = AutoModelForCausalLM.from_pretrained(source.parent, config=read, dtype=torch.float32, **here)
            tokenizer = AutoTokenizer.from_pretrained(source.parent, **here)
            tokenizer.save_pretrained(out)
    except Exception as exc:  # transformers raises whatever its parsers do
        raise ModelError(f"{source.name}: transformers reads no model of it: {exc}") from exc
    config: dict[str, Any] = model.config.to_dict()
    # it would say that the weights are still in the file's form
    config.pop("quantization_config", None)
    config |= {"architectures": [architecture_of(config["model_type"])], "dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True), encoding="utf-8")
    if model.generation_config is not None:
        (out / GENERATION).write_text(model.generation_config.to_json_string(), encoding="utf-8")
    save_file(_own_parameters(model), out / "model.safetensors", {"format": "pt"})


def _with_width_of_heads(config: PreTrainedConfig, source: Path) -> PreTrainedConfig:
    """Give the config the width of a head that the file states; for some families transformers takes its default."""
    # Gemma 4 has two widths: where transformers reads the key itself, its reading stands
    read_by_transformers = GGUF_CONFIG_MAPPING.get(config.model_type, {})
    if "attention.key_length" in read_by_transformers or "head_dim" not in config.to_dict():
        return config
    from gguf import GGUFReader  # noqa: PLC0415 - an extra, which `phalanx.models.imported` asks for

    reader = GGUFReader(source)
    architecture = reader.get_field("general.architecture")
    stated = reader.get_field(f"{architecture.contents()}.attention.key_length") if architecture else None
    if stated is not None:
        config.head_dim = int(stated.contents())
    elif "head_dim" not in read_by_transformers.values():
        # what llama.cpp takes where a file is silent
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def _own_parameters(model: Any) -> dict[str, torch.Tensor]:
    """Each parameter once, with memory of its own; a tied head is its embedding."""
    return {
        name: parameter.detach().clone(memory_format=torch.contiguous_format)
        for name, parameter in model.named_parameters(remove_duplicate=True)
    }
