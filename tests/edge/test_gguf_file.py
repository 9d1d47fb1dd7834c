"""A GGUF file has the numbers of the model by llama.cpp's names; what llama.cpp computes otherwise is refused."""

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.edge.gguf_file import write_gguf
from phalanx.errors import ModelError
from tiny_edge_models import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("edge") / "llama")


def tensors_of(path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_every_number_is_there_with_rotary_pairs_side_by_side(model, tmp_path):
    write_gguf(model, tmp_path / "m.gguf", "f32")

    stored, weights = tensors_of(tmp_path / "m.gguf"), load_file(model / "model.safetensors")
    assert len(stored) == len(weights)
    query = weights["model.layers.1.self_attn.q_proj.weight"].numpy()
    expected = query.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(query.shape)
    assert np.array_equal(np.asarray(stored["blk.1.attn_q.weight"].data).reshape(query.shape), expected)
    up = weights["model.layers.0.mlp.up_proj.weight"].numpy()
    assert np.array_equal(np.asarray(stored["blk.0.ffn_up.weight"].data).reshape(up.shape), up)


def test_in_four_bits_tables_have_eight_and_vectors_all(model, tmp_path):
    write_gguf(model, tmp_path / "m.gguf", "q4_0")

    kinds = {name: tensor.tensor_type.name for name, tensor in tensors_of(tmp_path / "m.gguf").items()}
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_down.weight"] == "Q4_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32"


REFUSED = {
    "hidden_act": {"hidden_act": "gelu"},
    "rope_type": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_llama_cpp_would_compute_otherwise_is_refused_by_key(tmp_path, key):
    directory = write_model(tmp_path / "model", **REFUSED[key])

    with pytest.raises(ModelError, match=key):
        write_gguf(directory, tmp_path / "m.gguf", "f32")


def test_another_family_is_refused_by_name(model, tmp_path):
    text = (model / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "gemma2"')
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelError, match="gemma2"):
        write_gguf(tmp_path, tmp_path / "m.gguf", "f32")


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (1e6, "65504")]
)
def test_numbers_that_the_file_cannot_hold_are_refused(model, tmp_path, value, words):
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.tensor(value)
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(ModelError, match=words):
        write_gguf(tmp_path, tmp_path / "m.gguf", "f16")
