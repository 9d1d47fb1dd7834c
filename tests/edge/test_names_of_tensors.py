"""A model's author gives a tensor two names: the checks of an export read the one, and its builder the other."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from phalanx.edge.export import export_edge
from phalanx.errors import ModelError
from phalanx.models import ModelSource, parameter_names

MODEL = Path(__file__).parents[1] / "vectors" / "passport" / "model"
Weights = dict[str, Tensor]


def longer_names(weights: Weights) -> Weights:
    return {f"transformer.{name}": torch.zeros_like(value) for name, value in weights.items()}


def shorter_names(weights: Weights) -> Weights:
    return {name.removeprefix("transformer."): torch.zeros_like(value) for name, value in weights.items()}


def another_head(weights: Weights) -> Weights:
    return {"lm_head.weight": torch.zeros_like(weights["transformer.wte.weight"])}


@pytest.mark.parametrize("others", [longer_names, shorter_names, another_head])
def test_a_tensor_by_two_names_is_refused_before_an_export(
    others: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    home = shutil.copytree(MODEL, tmp_path / "model")
    weights = load_file(home / "model.safetensors")
    save_file({**others(weights), **weights}, home / "model.safetensors", {"format": "pt"})

    # what checks read is the honest model, and what programs of others load is not
    source = ModelSource(home)
    assert all(torch.equal(source.read_tensor(name), weights[name]) for name in parameter_names(source.hub_config))
    loaded = AutoModelForCausalLM.from_pretrained(home, local_files_only=True).state_dict()
    assert any(not torch.equal(loaded[name], weights[name]) for name in weights) or not loaded["lm_head.weight"].any()
    with pytest.raises(ModelError, match=r"by two names|hold different values"):
        export_edge(home, tmp_path / "out", "onnx", "int4", sizes=None)


def test_tensors_that_are_none_of_the_models_are_no_second_names(tmp_path: Path) -> None:
    """Older files of the hub hold masks beside the weights."""
    home = shutil.copytree(MODEL, tmp_path / "model")
    weights = load_file(home / "model.safetensors")
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4),
        "lm_head.weight": weights["transformer.wte.weight"].clone(),
    }
    save_file({**masks, **weights}, home / "model.safetensors", {"format": "pt"})

    source = ModelSource(home)
    source.check_names(parameter_names(source.hub_config))
