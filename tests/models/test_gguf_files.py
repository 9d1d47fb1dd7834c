"""A GGUF file becomes a directory of the hub with the same numbers; it is read where it can do no harm."""

import json
import math
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from phalanx.cli import run_command as command_line
from phalanx.errors import ModelError
from phalanx.models import ModelConfig, gguf_reader, open_model
from phalanx.models.imported import import_model
from phalanx.train.entry import cannot_confine

LACKING = cannot_confine()
confined = pytest.mark.skipif(LACKING is not None, reason=f"no program can be confined here: {LACKING}")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS, KV_HEADS = 4, 2
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def whole(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **heads, tie_word_embeddings=False, **changes)).eval()


def wide_headed(head_dim: int) -> Qwen3ForCausalLM:
    """A Qwen3: its heads need not share out the hidden size."""
    torch.manual_seed(4)
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": head_dim}
    config = Qwen3Config(**SIZES, **heads, max_position_embeddings=64, tie_word_embeddings=False)
    return Qwen3ForCausalLM(config).eval()


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order of llama.cpp, where rotary pairs lie side by side."""
    head_dim = rows.shape[0] // heads
    return rows.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM | Qwen3ForCausalLM,
    kind: gguf.GGMLQuantizationType,
    head_dim: int | None = None,
    *,
    lacks: str = "",
    beside: Mapping[str, Sequence[float]] = MappingProxyType({}),
    scaling: gguf.RopeScalingType | None = None,
) -> None:
    """Write a model as llama.cpp's own converter does.

    Args:
        lacks: A tensor that is left out.
        beside: Tensors that are added.
    """
    family = model.config.model_type
    writer = gguf.GGUFWriter(str(path), family)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_context_length(64)
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    if family == "llama":
        writer.add_rope_dimension_count(SIZES["hidden_size"] // HEADS)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(4.0)
    writer.add_vocab_size(SIZES["vocab_size"])
    pieces = ["<unk>", "<s>", "</s>", "AB", *(chr(33 + number) for number in range(SIZES["vocab_size"] - 4))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_merges(["A B"])
    writer.add_token_types([3, 3, 3, *[1] * (len(pieces) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    plain = gguf.GGMLQuantizationType.F32

    def add(name: str, values: np.ndarray) -> None:
        used = plain if values.ndim == 1 else kind
        if name == lacks:
            return
        writer.add_tensor(name, gguf.quants.quantize(values, used), raw_dtype=used)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    add("output.weight", weights["lm_head.weight"])
    for layer in range(SIZES["num_hidden_layers"]):
        for theirs, ours in NAMES.items():
            values = weights.get(f"model.layers.{layer}.{ours}.weight")
            if values is None:
                continue
            if family == "llama" and theirs in ("attn_q", "attn_k"):
                values = interleaved(values, HEADS if theirs == "attn_q" else KV_HEADS)
            add(f"blk.{layer}.{theirs}.weight", values)
    for name, values in beside.items():
        add(name, np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A model, and what its GGUF file of plain numbers was made into."""
    if LACKING is not None:
        pytest.skip(f"no program can be confined here: {LACKING}")
    home = tmp_path_factory.mktemp("gguf")
    model = whole()
    write_gguf(home / "tiny.gguf", model, gguf.GGMLQuantizationType.F32)
    import_model(home / "tiny.gguf", home / "out")
    return model, home / "out"


def test_every_weight_of_a_gguf_file_comes_back_bit_for_bit(imported):
    model, out = imported

    found = load_file(out / "model.safetensors")

    expected = model.state_dict()
    assert set(found) == set(expected)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_transformers_loads_what_was_made_and_computes_the_same(imported):
    model, out = imported
    ids = torch.arange(24).reshape(2, 12)

    again = AutoModelForCausalLM.from_pretrained(out).eval()

    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config


def test_a_run_can_open_what_was_made(imported, tmp_path):
    _, out = imported

    source = open_model(ModelConfig(path=str(out)), tmp_path, 0)

    assert (source.num_layers, source.vocab_size) == (2, 64)
    assert AutoTokenizer.from_pretrained(out).eos_token == "</s>"


@confined
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "stated"), [(16, True), pytest.param(SIZES["hidden_size"] // HEADS, False, marks=pytest.mark.slow)]
)
def test_heads_of_another_width_than_the_familys_usual_one_compute_the_same(tmp_path, head_dim, stated):
    model = wide_headed(head_dim)
    write_gguf(tmp_path / "wide.gguf", model, gguf.GGMLQuantizationType.F32, head_dim if stated else None)

    import_model(tmp_path / "wide.gguf", tmp_path / "out")

    ids = torch.arange(24).reshape(2, 12)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert again.config.head_dim == head_dim
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.slow
@confined
def test_quantised_weights_become_the_numbers_that_they_stand_for(tmp_path):
    model = whole()
    write_gguf(tmp_path / "small.gguf", model, gguf.GGMLQuantizationType.Q8_0)

    import_model(tmp_path / "small.gguf", tmp_path / "out")

    found = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    told = gguf.quants.dequantize(
        gguf.quants.quantize(model.state_dict()[name].numpy(), gguf.GGMLQuantizationType.Q8_0),
        gguf.GGMLQuantizationType.Q8_0,
    )
    assert torch.equal(found[name], torch.from_numpy(told))
    assert not torch.equal(found[name], model.state_dict()[name])


@confined
@pytest.mark.parametrize("damage", ["cut", *(pytest.param(one, marks=pytest.mark.slow) for one in ("counts", "magic"))])
def test_a_damaged_gguf_file_is_refused_and_leaves_nothing(tmp_path, damage, capsys):
    write_gguf(tmp_path / "tiny.gguf", whole(), gguf.GGMLQuantizationType.F32)
    data = bytearray((tmp_path / "tiny.gguf").read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "counts":
        # the number of tensors, which a careless reader would make room for
        data[8:16] = (2**62).to_bytes(8, "little")
    else:
        data[:4] = b"GGML"
    (tmp_path / "tiny.gguf").write_bytes(data)

    code = command_line(["model", "import", str(tmp_path / "tiny.gguf"), str(tmp_path / "out")])

    said = capsys.readouterr().err
    assert code == 3
    assert "[PHX-I038]" in said
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def llama3_factors(theta: float, factor: float) -> list[float]:
    """What llama.cpp's converter divides the frequencies of Llama 3.1 and later by."""
    size, factors = SIZES["hidden_size"] // HEADS, []
    for place in range(0, size, 2):
        wavelength = 2 * math.pi * theta ** (place / size)
        smooth = (8192 / wavelength - 1) / 3
        factors.append(1 / min(max((1 - smooth) / factor + smooth, 1 / factor), 1.0))
    return factors


@confined
def test_the_scaled_rotations_of_a_llama_3_are_those_of_the_file(tmp_path):
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192, "rope_theta": 405000.0}
    model = whole(rope_parameters=rope)
    factors = {"rope_freqs.weight": llama3_factors(405000.0, 32.0)}
    write_gguf(tmp_path / "tiny.gguf", model, gguf.GGMLQuantizationType.F32, beside=factors)

    import_model(tmp_path / "tiny.gguf", tmp_path / "out")

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(64).reshape(1, 64)
    assert again.config.rope_parameters == rope
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@confined
@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"beside": {"rope_freqs.weight": [8.0, 8.0, 8.0, 8.0]}}, "rope_freqs.weight has other factors than Llama 3's"),
        ({"beside": {"blk.0.attn_v.bias": [0.5] * 16}}, "16 of its .* numbers, such as biases, are not read"),
        ({"lacks": "blk.1.ffn_up.weight"}, "model.layers.1.mlp.up_proj.weight"),
        ({"scaling": gguf.RopeScalingType.YARN}, "rope.scaling.type = yarn"),
    ],
)
def test_a_gguf_file_of_which_transformers_makes_another_model_is_refused(tmp_path, file, message):
    write_gguf(tmp_path / "tiny.gguf", whole(), gguf.GGMLQuantizationType.F32, **file)

    with pytest.raises(ModelError, match=message):
        import_model(tmp_path / "tiny.gguf", tmp_path / "out")

    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_other_models_are_read_where_the_extra_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)

    # every import of phalanx.models comes past this file
    assert runpy.run_path(gguf_reader.__file__)["SUFFIX"] == ".gguf"


def test_a_part_of_a_divided_gguf_file_is_refused(tmp_path, capsys):
    (tmp_path / "big-00001-of-00003.gguf").write_bytes(b"GGUF")

    code = command_line(["model", "import", str(tmp_path / "big-00001-of-00003.gguf"), str(tmp_path / "out")])

    assert code == 3
    assert "is one of 3 parts; join them with llama.cpp's gguf-split --merge" in capsys.readouterr().err
