"""A GGUF file made into the hub's layout; the sandbox of `phalanx.models.unpickle` runs it on files of others."""

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from phalanx.errors import ModelError
from phalanx.models.hub_files import GENERATION, architecture_of
from phalanx.models.quiet import quiet_transformers

SUFFIX = ".gguf"
_FACTORS = "rope_freqs.weight"
_FETCH = "it would become another model; fetch it in the hub's layout"


def rewrite_gguf(source: Path, out: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as config.json, safetensors and tokenizer.json.

    Quantised numbers are written as the float32 that they stand for, which is not their value before quantisation.
    """
    try:
        with quiet_transformers():
            here = {"gguf_file": source.name, "local_files_only": True, "trust_remote_code": False}
            reader = _open_file(source)
            read = _with_width_of_heads(AutoConfig.from_pretrained(source.parent, **here), reader)
            _scale_rotations(read, reader)
            model, report = AutoModelForCausalLM.from_pretrained(
                source.parent, config=read, dtype=torch.float32, output_loading_info=True, **here
            )
            _check_tensors(model, reader, report["missing_keys"])
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


def _open_file(source: Path) -> Any:
    from gguf import GGUFReader  # noqa: PLC0415 - an extra, which `phalanx.models.imported` asks for

    return GGUFReader(source)


def _stated(reader: Any, key: str) -> Any:
    """Return what the file states under a key of its architecture; None where it is silent."""
    architecture = reader.get_field("general.architecture")
    stated = reader.get_field(f"{architecture.contents()}.{key}") if architecture else None
    return None if stated is None else stated.contents()


def _with_width_of_heads(config: PreTrainedConfig, reader: Any) -> PreTrainedConfig:
    """Give the config the width of a head that the file states; for some families transformers takes its default."""
    # Gemma 4 has two widths: where transformers reads the key itself, its reading stands
    read_by_transformers = GGUF_CONFIG_MAPPING.get(config.model_type, {})
    if "attention.key_length" in read_by_transformers or "head_dim" not in config.to_dict():
        return config
    stated = _stated(reader, "attention.key_length")
    if stated is not None:
        config.head_dim = int(stated)
    elif "head_dim" not in read_by_transformers.values():
        # what llama.cpp takes where a file is silent
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def _scale_rotations(config: Any, reader: Any) -> None:
    """Give the config the scaling of Llama 3, of which a file has the factors alone; transformers reads no scaling."""
    rope, base = getattr(config, "rope_parameters", None) or {}, _stated(reader, "rope.freq_base")
    thetas = [part["rope_theta"] for part in (rope, *rope.values()) if isinstance(part, dict) and "rope_theta" in part]
    kind = _stated(reader, "rope.scaling.type") or "none"
    if kind != "none" or (base is not None and thetas and not any(math.isclose(base, theta) for theta in thetas)):
        raise ModelError(f"rope.scaling.type = {kind} and rope.freq_base = {base} are not read: {_FETCH}")
    stored = next((torch.tensor(part.data) for part in reader.tensors if part.name == _FACTORS), None)
    if stored is None:
        return
    config.rope_parameters = rope | {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = rope["rope_theta"] ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    if stored.shape != plain.shape or not torch.allclose(plain / scaled, stored, rtol=1e-4):
        raise ModelError(f"{_FACTORS} has other factors than Llama 3's: {_FETCH}")


def _check_tensors(model: Any, reader: Any, missing: Collection[str]) -> None:
    """Refuse a file that lacks tensors, which transformers would draw, or has some that it passes over."""
    if missing:
        raise ModelError(f"the file lacks {', '.join(sorted(missing))}"[:300] + "; fetch it again")
    # a tied head may be there twice
    unread = {_FACTORS, *(("output.weight",) if model.config.tie_word_embeddings else ())}
    stored = sum(int(part.n_elements) for part in reader.tensors if part.name not in unread)
    used = sum(parameter.numel() for parameter in model.parameters())
    if stored > used:
        raise ModelError(f"{stored - used} of its {stored} numbers, such as biases, are not read: {_FETCH}")


def _own_parameters(model: Any) -> dict[str, torch.Tensor]:
    """Each parameter once, with memory of its own; a tied head is its embedding."""
    return {
        name: parameter.detach().clone(memory_format=torch.contiguous_format)
        for name, parameter in model.named_parameters(remove_duplicate=True)
    }
