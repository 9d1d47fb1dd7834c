"""A model's directory is looked at before torch is imported: family, header and length of its weights."""

import json

import pytest
import torch
from safetensors.torch import save_file

from phalanx.errors import ModelError
from phalanx.models.directory import check_family, check_header, read_config


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, 5), "b": torch.zeros(7, dtype=torch.float16)}, path, {"format": "pt"})
    return path


def test_whole_weights_are_taken(weights):
    check_header(weights)


def test_weights_without_any_tensor_are_taken(tmp_path):
    save_file({}, tmp_path / "empty.safetensors")

    check_header(tmp_path / "empty.safetensors")


@pytest.mark.parametrize("missing", [1, 20, 10_000])
def test_weights_that_are_cut_anywhere_are_refused(weights, missing):
    whole = weights.read_bytes()
    weights.write_bytes(whole[: max(len(whole) - missing, 0)])

    with pytest.raises(ModelError, match=r"cannot be read as safetensors: .*; fetch or export it again") as caught:
        check_header(weights)

    assert caught.value.error_facts["code"] == "PHX-I035"


def test_weights_with_more_behind_them_are_refused(weights):
    weights.write_bytes(weights.read_bytes() + b"more")

    with pytest.raises(ModelError, match=r"has [0-9]+ bytes, its header says"):
        check_header(weights)


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b'{"a": 3}', b'{"a": {"data_offsets": [0]}}', b'{"a": {"data_offsets": [0, "9"]}}', b"[" * 20_000],
    ids=range(6),
)
def test_a_malformed_header_is_refused(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(ModelError, match="its header is cut or malformed"):
        check_header(path)


def test_a_header_that_claims_more_than_there_is_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + json.dumps({}).encode())

    with pytest.raises(ModelError, match="its header is cut or malformed"):
        check_header(path)


def test_a_mixture_of_experts_is_refused_with_its_reason():
    with pytest.raises(
        ModelError, match="found 'deepseek_v3', a mixture of experts, which stages do not carry; expected"
    ):
        check_family({"model_type": "deepseek_v3", "n_routed_experts": 8}, "config.json")


@pytest.mark.parametrize("described", [{}, {"model_type": 3}, {"model_type": None}, {"model_type": []}])
def test_a_config_without_a_family_is_refused(described):
    with pytest.raises(ModelError, match=r"config.json: model_type: found (None|3|\[\]); expected one of"):
        check_family(described, "config.json")


def test_a_known_family_is_taken():
    check_family({"model_type": "llama"}, "config.json")


def test_more_layers_than_anybody_builds_are_refused():
    """A run built them one by one, on no device, before it looked at the weights."""
    with pytest.raises(ModelError, match="num_hidden_layers: found 1000000000; expected 10000 at most"):
        check_family({"model_type": "llama", "num_hidden_layers": 10**9}, "m/config.json")
    check_family({"model_type": "llama", "num_hidden_layers": 10_000}, "m/config.json")


@pytest.mark.parametrize("described", [{"num_labels": 10_001}, {"text_config": {"num_hidden_layers": 10_001}}])
def test_counts_of_a_config_are_bounded_where_it_is_read(tmp_path, described):
    (tmp_path / "config.json").write_text(json.dumps(described))

    with pytest.raises(ModelError, match=r"config\.json.*: found 10001; expected 10000 at most"):
        read_config(tmp_path)
