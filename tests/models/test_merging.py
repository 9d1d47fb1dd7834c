"""An adapter goes into a model's weights, where peft puts it too, and comes out of them bit for bit."""

import json
import math

import pytest
import torch
from planned_models import PLANNED
from safetensors.torch import load_file, save_file
from test_peft_files import exported
from tiny_models import ARCHITECTURES, build_all, chain, some_ids, without_dropout
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from phalanx.checkpoint.merge import KEPT, merge_adapter, unmerge_adapter
from phalanx.cli import run_command as command_line
from phalanx.errors import CheckpointError, ModelError
from phalanx.models import ModelSource, parameter_names
from phalanx.models.adapters.peft_files import read_adapter_config

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.quick_cases("lora-gpt2", "dora-llama", "rslora-llama")
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
    assert all(torch.equal(again.read_tensor(name), source.read_tensor(name)) for name in names)
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

    with pytest.raises(CheckpointError, match="virtual tokens are not weights"):
        merge_adapter(source.directory, tmp_path / "adapter", tmp_path / "merged")
    exported(cache, "llama", "lora", tmp_path / "lora")
    with pytest.raises(CheckpointError, match="already exists"):
        merge_adapter(source.directory, tmp_path / "lora", tmp_path / "adapter")


SMALL = PLANNED | {name: without_dropout(one) for name, one in ARCHITECTURES.items()}
QUICK = ("gpt2", "llama", "opt-post-norm", "phi3", "qwen3_moe")


def of_blocks(name, blocks):
    """The config of a family with so many blocks."""
    config = dict(SMALL[name])
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = blocks
    types = {key: config[key][:blocks] for key in ("layer_types", "no_rope_layers") if config.get(key)}
    return CONFIG_MAPPING[config.pop("model_type")](**config | types)


def saved_by_peft(name, home, blocks=4, **options):
    """A model and an adapter on it as transformers and peft save them; what peft makes of the two."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(of_blocks(name, blocks)).eval()
    model.save_pretrained(home / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **options)).eval()
    adapted.save_pretrained(home / "adapter")
    return adapted


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(SMALL)]
)
def test_all_linear_layers_of_a_small_model_are_merged_as_peft_does(tmp_path, name, blocks):
    adapted = saved_by_peft(name, tmp_path, blocks, target_modules="all-linear")

    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    unmerge_adapter(tmp_path / "merged", tmp_path / "back")

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True)
    whole = dict(adapted.merge_and_unload().named_parameters())
    for key, value in merged.named_parameters():
        torch.testing.assert_close(value, whole[key], rtol=1e-6, atol=1e-7)
    before, after = ModelSource(tmp_path / "base"), ModelSource(tmp_path / "back")
    assert all(
        torch.equal(before.read_tensor(key), after.read_tensor(key)) for key in parameter_names(before.hub_config)
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi3"])
def test_all_linear_layers_of_a_small_model_are_a_start_of_training(tmp_path, name):
    adapted = saved_by_peft(name, tmp_path, target_modules="all-linear")
    start = read_adapter_config(tmp_path / "adapter").model_copy(update={"path": str(tmp_path / "adapter")})

    stages = build_all(ModelSource(tmp_path / "base"), 2, adapter=start)

    expected = adapted(some_ids()).logits
    torch.testing.assert_close(chain([one.eval() for one in stages], some_ids()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1, 3]},
        {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
        {"target_modules": ["q_proj", "o_proj"], "rank_pattern": {"o_proj": 5}, "alpha_pattern": {"1.*o_proj": 3}},
        {"target_modules": ["q_proj", "o_proj"], "rank_pattern": {"o_proj": 5}, "use_rslora": True},
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": "all-linear", "use_dora": True},
    ],
    ids=["pattern", "some blocks", "excluded", "ranks and scales", "rsLoRA of ranks", "head", "DoRA"],
)
def test_layers_ranks_and_scales_are_merged_as_peft_does(tmp_path, options):
    adapted = saved_by_peft("llama", tmp_path, **options)

    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True)
    whole = dict(adapted.merge_and_unload().named_parameters())
    for key, value in merged.named_parameters():
        torch.testing.assert_close(value, whole[key], rtol=1e-6, atol=1e-6)


def test_an_adapter_on_some_blocks_alone_is_no_start_and_says_what_to_do(tmp_path):
    saved_by_peft("llama", tmp_path, target_modules=["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"])

    with pytest.raises(ModelError, match=r"some blocks alone, which stages cannot carry; merge the adapter"):
        read_adapter_config(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.pop(min(held)), "fits no weight|is no part of a weight"),
        (
            lambda held: [held.pop(name) for name in list(held) if ".2.mlp.up_proj." in name],
            "found nothing for .*2.mlp",
        ),
        (lambda held: held.update(extra=torch.ones(2)), "extra: is no part of a weight"),
        (lambda held: held.update({min(held): torch.ones(2, 31)}), "fits no weight of the model"),
        (lambda held: held.update({min(held): torch.full((2, 48), torch.nan)}), "no finite number"),
    ],
    ids=["half a pair", "a layer", "one more", "another shape", "no number"],
)
def test_an_adapter_that_does_not_fit_is_not_merged(tmp_path, change, message):
    saved_by_peft("llama", tmp_path, target_modules="all-linear")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)

    with pytest.raises(ModelError, match=message):
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 4}, "found rank 4 .* has rank 2"),
        ({"lora_alpha": math.nan}, "found rank 2 and alpha nan"),
        ({"target_modules": 5}, "names no layers"),
        ({"rank_pattern": {"(": 3}}, "names no layers .*unterminated"),
        ({"alpha_pattern": [1]}, "names no layers"),
    ],
    ids=["rank", "alpha", "targets", "pattern", "list"],
)
def test_a_config_of_another_adapter_or_of_none_is_not_merged(tmp_path, change, message):
    saved_by_peft("llama", tmp_path, target_modules="all-linear")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(ModelError, match=rf"adapter_config\.json: .*{message}"):
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
