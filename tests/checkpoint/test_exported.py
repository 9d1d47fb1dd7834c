"""A model's directory against the digest of a run: whoever hands it over chooses every file in it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from phalanx.checkpoint.exported import digest_model, verify_export
from phalanx.errors import VerificationError

MODEL = Path(__file__).parents[1] / "vectors" / "passport" / "model"
Weights = dict[str, Tensor]


def write_weights(home: Path, weights: Weights) -> None:
    save_file(
        {name: value.contiguous() for name, value in weights.items()}, home / "model.safetensors", {"format": "pt"}
    )


def add_shorter_names(home: Path, weights: Weights) -> None:
    others = {name.removeprefix("transformer."): torch.zeros_like(value) for name, value in weights.items()}
    write_weights(home, weights | others)


def add_longer_names(home: Path, weights: Weights) -> None:
    others = {f"transformer.{name}": torch.zeros_like(value) for name, value in weights.items()}
    write_weights(home, weights | others)


def add_a_head(home: Path, weights: Weights) -> None:
    write_weights(home, weights | {"lm_head.weight": torch.zeros_like(weights["transformer.wte.weight"])})


@pytest.mark.parametrize("add_tensors", [add_shorter_names, add_longer_names, add_a_head])
def test_tensors_that_transformers_loads_in_the_place_of_the_runs_are_refused(
    add_tensors: Callable[[Path, Weights], None], tmp_path: Path
) -> None:
    home = shutil.copytree(MODEL, tmp_path / "model")
    final = digest_model(home)
    assert verify_export(home, final, None) == final
    add_tensors(home, load_file(home / "model.safetensors"))

    loaded = AutoModelForCausalLM.from_pretrained(home, local_files_only=True).state_dict()
    honest = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True).state_dict()
    assert digest_model(home) == final
    assert any(not torch.equal(loaded[name], honest[name]) for name in honest)
    with pytest.raises(VerificationError, match="none of the model's"):
        verify_export(home, final, None)


def test_a_pickle_beside_the_weights_is_refused(tmp_path: Path) -> None:
    home = shutil.copytree(MODEL, tmp_path / "model")
    torch.save({}, home / "adapter_model.bin")

    with pytest.raises(VerificationError, match="in the place of the tensors"):
        verify_export(home, digest_model(home), None)
