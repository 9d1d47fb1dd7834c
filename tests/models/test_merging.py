"""An adapter goes into a model's weights, where peft puts it too, and comes out of them bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_peft_files import exported
from tiny_models import chain, some_ids
from transformers import AutoModelForCausalLM

from phalanx.checkpoint.merge import KEPT, merge_adapter, unmerge_adapter
from phalanx.cli import run as command_line
from phalanx.errors import CheckpointError
from phalanx.models import ModelSource, parameter_names

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["lora", "dora", "rslora"])
def test_a_merged_model_is_the_adapted_one_and_gives_its_base_back(cache, tmp_path, family, kind):
    source, stages = exported(cache, family, kind, tmp_path / "adapter")
    ids = some_ids()

    record = merge_adapter(source.directory, tmp_path / "adapter", tmp_path / "merged")
    back = unmerge_adapter(tmp_path / "merged", tmp_path / "back")

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True)
    torch.testing.assert_close(whole(ids).logits, chain(stages, ids), rtol=1e-4, atol=1e-5)
    again = ModelSource(tmp_path / "back")
    names = parameter_names(source.hub_config)
    assert all(torch.equal(again.read(name), source.read(name)) for name in names)
    assert back["base"] == record["base"] != record["merged"]
    # DoRA forgets a size; of the others a sum rounds
    assert record["rounding"] is None if kind == "dora" else 0 < record["rounding"] < 1e-6


def test_weights_that_were_changed_since_are_not_taken_back(cache, tmp_path, capsys):
    source, _ = exported(cache, "llama", "lora", tmp_path / "adapter")
    merge_adapter(source.directory, tmp_path / "adapter", tmp_path / "merged")
    path = tmp_path / "merged" / "model.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    save_file({**tensors, name: tensors[name] + 1}, path, {"format": "pt"})

    with pytest.raises(CheckpointError, match="they were changed since the merge"):
        unmerge_adapter(tmp_path / "merged", tmp_path / "back")
    save_file(tensors, path, {"format": "pt"})
    kept = tmp_path / "merged" / KEPT / "base.safetensors"
    matrices = load_file(kept)
    save_file({key: value + 1 for key, value in matrices.items()}, kept)
    with pytest.raises(CheckpointError, match="the weights before the merge: found digest"):
        unmerge_adapter(tmp_path / "merged", tmp_path / "back")
    kept.unlink()
    assert command_line(["model", "unmerge", str(tmp_path / "merged"), str(tmp_path / "back"), "--json"]) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "PHX-I059"
    assert not (tmp_path / "back").exists()


def test_virtual_tokens_are_no_weights_and_an_old_directory_stays(cache, tmp_path):
    source, _ = exported(cache, "llama", "ptuning", tmp_path / "adapter")

    with pytest.raises(CheckpointError, match="virtual tokens are no weights"):
        merge_adapter(source.directory, tmp_path / "adapter", tmp_path / "merged")
    exported(cache, "llama", "lora", tmp_path / "lora")
    with pytest.raises(CheckpointError, match="exists already"):
        merge_adapter(source.directory, tmp_path / "lora", tmp_path / "adapter")
