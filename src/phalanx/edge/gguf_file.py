"""A model directory as one GGUF file, by the names and blocks of the gguf package."""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.chat import model_template
from phalanx.data.tokenizers import read_json
from phalanx.edge.gguf_vocabulary import GgufVocabulary, read_vocabulary
from phalanx.errors import ModelError
from phalanx.models import ModelSource, parameter_names
from phalanx.models.hub_files import GENERATION

_MAX_F16 = 65504.0
_BLOCK = 32
"""Numbers that share a scale in Q8_0 and Q4_0."""

Array = NDArray[np.float32]


@dataclass(frozen=True)
class _GgufFamily:
    """How llama.cpp wants the numbers of a family.

    Attributes:
        activation: The one that llama.cpp computes with.
        is_interleaved: Whether rows of queries and keys are stored with rotary pairs side by side.
        transposed: Ends of the names of matrices that transformers stores as ``[in, out]``.
    """

    architecture: str
    activation: str
    is_interleaved: bool = False
    transposed: tuple[str, ...] = ()


_GPT2_MATRICES = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
GGUF_FAMILIES = {
    "gpt2": _GgufFamily("gpt2", "gelu_new", transposed=_GPT2_MATRICES),
    "llama": _GgufFamily("llama", "silu", is_interleaved=True),
    "mistral": _GgufFamily("llama", "silu", is_interleaved=True),
    "qwen2": _GgufFamily("qwen2", "silu"),
    "qwen3": _GgufFamily("qwen3", "silu"),
}
"""Families that are written; SmolLM and SmolLM2 are of the family llama."""
GGUF_PRECISIONS = ("f32", "f16", "q8_0", "q4_0")


def describe_gguf(precision: str) -> dict[str, str | int]:
    """Return program and settings that `write_gguf` rounds by, as a statement holds them."""
    tables = "q8_0" if precision == "q4_0" else precision
    kinds = {"matrices": precision, "tables": tables, "vectors": "f32"}
    return {"tool": f"gguf {importlib.metadata.version('gguf')}", **kinds} | (
        {"block": _BLOCK} if "q" in precision else {}
    )


def write_gguf(directory: Path, path: Path, precision: str) -> GgufVocabulary:
    """Write weights, vocabulary and chat template of a model directory into one file.

    Args:
        precision: Precision of the matrices; vectors stay float32. In ``q4_0`` embedding and head are ``q8_0``, and a
            matrix whose rows are no multiple of 32 numbers is float16.

    Raises:
        ModelError: The family, its config or its tokenizer has no form in GGUF here, a number is not finite or too
            large for float16, or the gguf package is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("--format gguf: needs gguf, which is not installed; install phalanx-train[gguf]")
    import gguf  # noqa: PLC0415 - an extra

    source = ModelSource(directory)
    config = source.hub_config_dict
    family = _check_family(config, directory)
    ends = _ends(directory, config)
    vocabulary = read_vocabulary(directory / "tokenizer.json", source.vocab_size, config.get("bos_token_id"), ends[0])
    writer = gguf.GGUFWriter(str(path), family.architecture)
    _write_metadata(writer, config, family, precision)
    _write_vocabulary(writer, vocabulary, ends)
    template = model_template(directory)
    if template is not None:
        writer.add_chat_template(template.source)
    quantize: Callable[[Array, str], tuple[NDArray[Any], Any]] = _quantizer(precision)
    for name, values in _named_tensors(source, family, config):
        data, kind = quantize(values, name)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return vocabulary


def _check_family(config: Mapping[str, Any], directory: Path) -> _GgufFamily:
    """Refuse what llama.cpp would compute in another way.

    Raises:
        ModelError: Names the key of config.json.
    """
    model_type = str(config.get("model_type"))
    family = GGUF_FAMILIES.get(model_type)
    where = f"{directory / 'config.json'}"
    if family is None:
        raise ModelError(
            f"{where}: model_type: found {model_type!r}; GGUF is written for {', '.join(sorted(GGUF_FAMILIES))}; "
            "export it as ONNX, or with llama.cpp's convert_hf_to_gguf.py and without these checks"
        )
    activation = config.get("hidden_act", config.get("activation_function"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = set(config.get("layer_types") or [])
    refusals = {
        "hidden_act": activation if activation != family.activation else None,
        "rope_parameters.rope_type": rope.get("rope_type") if rope.get("rope_type", "default") != "default" else None,
        "rope_parameters.partial_rotary_factor": (
            rope.get("partial_rotary_factor") if rope.get("partial_rotary_factor", 1.0) != 1.0 else None
        ),
        "sliding_window": config.get("sliding_window") if model_type == "mistral" else None,
        "layer_types": sorted(kinds) if kinds - {"full_attention"} else None,
        "scale_attn_by_inverse_layer_idx": config.get("scale_attn_by_inverse_layer_idx") or None,
    }
    for key, value in refusals.items():
        if value is not None:
            raise ModelError(f"{where}: {key}: found {value!r}; GGUF is not written for it; export it as ONNX")
    return family


def _ends(directory: Path, config: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text and a turn, by generation_config.json or else config.json."""
    path = directory / GENERATION
    ends = (read_json(path) if path.is_file() else {}).get("eos_token_id", config.get("eos_token_id"))
    listed = [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
    if not listed:
        raise ModelError(f"{directory / 'config.json'}: eos_token_id: missing; a text would never end")
    return listed


def _write_metadata(writer: Any, config: Mapping[str, Any], family: _GgufFamily, precision: str) -> None:
    import gguf  # noqa: PLC0415 - an extra

    first = config.get
    hidden: int = first("hidden_size") or config["n_embd"]
    heads: int = first("num_attention_heads") or config["n_head"]
    writer.add_name("phalanx export")
    writer.add_block_count(first("num_hidden_layers") or config["n_layer"])
    writer.add_context_length(first("max_position_embeddings") or config["n_positions"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(first("intermediate_size") or first("n_inner") or 4 * hidden)
    writer.add_head_count(heads)
    if family.architecture == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        head_dim = first("head_dim") or hidden // heads
        writer.add_head_count_kv(first("num_key_value_heads") or heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        rope = first("rope_parameters") or {}
        writer.add_rope_freq_base(float(rope.get("rope_theta") or first("rope_theta") or 10000.0))
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    file_type = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}[precision]
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write_vocabulary(writer: Any, vocabulary: GgufVocabulary, ends: list[int]) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.kinds))
    if vocabulary.scores:
        writer.add_token_scores(list(vocabulary.scores))
    if vocabulary.merges:
        writer.add_token_merges(list(vocabulary.merges))
    if vocabulary.bos_id is not None:
        writer.add_bos_token_id(vocabulary.bos_id)
    if vocabulary.unknown_id is not None:
        writer.add_unk_token_id(vocabulary.unknown_id)
    writer.add_eos_token_id(ends[0])
    if len(ends) > 1:
        writer.add_eot_token_id(ends[1])
    # said in so many words: what llama.cpp takes where a file is silent differs by tokenizer
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    writer.add_add_space_prefix(vocabulary.adds_space)


def _named_tensors(source: ModelSource, family: _GgufFamily, config: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """Yield each tensor with its name in llama.cpp, in the order of its rows."""
    import gguf  # noqa: PLC0415 - an extra

    architecture = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(architecture, source.num_layers)
    for name in parameter_names(source.hub_config):
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new_name is None:
            raise ModelError(f"{source.directory}: {name}: the gguf package has no name for it")
        values: Array = source.read_tensor(name).float().numpy()
        if not np.isfinite(values).all():
            raise ModelError(f"{source.directory}: {name}: has numbers that are not finite; the weights are damaged")
        if name.endswith(family.transposed) and values.ndim == 2:
            values = np.ascontiguousarray(values.T)
        if family.is_interleaved and ".q_proj." in name:
            values = _interleave(values, config["num_attention_heads"])
        elif family.is_interleaved and ".k_proj." in name:
            values = _interleave(values, config.get("num_key_value_heads") or config["num_attention_heads"])
        yield new_name, values


def _interleave(rows: Array, heads: int) -> Array:
    """Put the two numbers of each rotary pair side by side."""
    half = rows.shape[0] // heads // 2
    return np.ascontiguousarray(rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape))


def _quantizer(precision: str) -> Callable[[Array, str], tuple[NDArray[Any], Any]]:
    """Return what turns a tensor into its stored bytes and their kind."""
    import gguf  # noqa: PLC0415 - an extra

    kinds = gguf.GGMLQuantizationType
    matrix_kind = {"f32": kinds.F32, "f16": kinds.F16, "q8_0": kinds.Q8_0, "q4_0": kinds.Q4_0}[precision]

    def quantize(values: Array, name: str) -> tuple[NDArray[Any], Any]:
        kind = matrix_kind
        if values.ndim == 1 or name.startswith("position_embd"):
            kind = kinds.F32
        elif kind == kinds.Q4_0 and name in ("token_embd.weight", "output.weight"):
            kind = kinds.Q8_0
        if kind in (kinds.Q8_0, kinds.Q4_0) and values.shape[-1] % _BLOCK:
            kind = kinds.F16
        if kind == kinds.F16 and float(np.abs(values).max()) > _MAX_F16:
            raise ModelError(f"{name}: has a number beyond {_MAX_F16:.0f}, which float16 cannot hold; export as f32")
        return gguf.quants.quantize(values, kind), kind

    return quantize
