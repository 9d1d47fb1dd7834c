"""Adapters in peft's format, both ways: stages are what peft makes of the whole model, and begin with its files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import Held, build_all, chain, disturbed, lm_loss, some_ids, tiny_source, trained, whole_model

from late_imports import need_module
from phalanx.checkpoint.export import export_model
from phalanx.errors import ModelError
from phalanx.models import LoraConfig, ModelConfig, PrefixConfig, StageSpec, stage_table
from phalanx.planner import shape_of
from phalanx.planner.model.adapter import adapter_numbers

peft = need_module("peft", "could not import peft")

DORA = LoraConfig(rank=4, alpha=8, dora=True)
KINDS = {
    "lora": LoraConfig(rank=4, alpha=8),
    "dora": DORA,
    "rslora": LoraConfig(rank=4, alpha=8, rslora=True),
    "ptuning": PrefixConfig(kind="ptuning", tokens=5),
}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def exported(cache, family, kind, directory, stages=2):
    """Some trained stages, and the directory that they were exported to."""
    source = tiny_source(family, cache)
    built = build_all(source, stages, adapter=KINDS[kind])
    if kind == "ptuning":
        disturbed(built, 1.0)
    else:
        generator = torch.Generator().manual_seed(4)
        for value in trained(built).values():
            value.detach().add_(torch.randn(value.shape, generator=generator), alpha=0.1)
    export_model(Held(built), source, directory, adapter=KINDS[kind])
    return source, built


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_peft_on_the_whole_model(cache, tmp_path, family, kind):
    source, stages = exported(cache, family, kind, tmp_path / "adapter")
    ids = some_ids()
    # peft trains no prompt that it has loaded, so the test does
    whole = peft.PeftModel.from_pretrained(
        whole_model(source), str(tmp_path / "adapter"), is_trainable=kind != "ptuning"
    ).train()
    for name, value in whole.named_parameters():
        value.requires_grad_(value.requires_grad or "prompt_encoder" in name)

    logits, theirs = chain(stages, ids), whole(ids).logits
    lm_loss(logits, ids).backward()
    lm_loss(theirs, ids).backward()

    torch.testing.assert_close(logits, theirs, rtol=1e-5, atol=1e-6)
    mine = torch.cat([value.grad.flatten() for _, value in sorted(trained(stages).items())])
    if kind == "ptuning":
        (prompt,) = (value for value in whole.parameters() if value.requires_grad)
        assert prompt.grad.norm().item() == pytest.approx(mine.norm().item(), rel=1e-5)
    else:
        found = {name: value.grad for name, value in whole.named_parameters() if value.requires_grad}
        assert len(found) == len(trained(stages))
        other = torch.cat([found[name].flatten() for name in sorted(found)])
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_of_peft_is_the_start_of_stages_bit_for_bit(cache, tmp_path, kind):
    source, before = exported(cache, "llama", kind, tmp_path / "adapter")
    start = KINDS[kind].model_copy(update={"path": str(tmp_path / "adapter")})

    after = build_all(source, 4, adapter=start)

    assert trained(after).keys() == trained(before).keys()
    assert all(torch.equal(value, trained(before)[name]) for name, value in trained(after).items())


def test_what_peft_itself_has_saved_is_a_start(cache, tmp_path):
    source, ids = tiny_source("llama", cache), some_ids()
    wanted = peft.LoraConfig(
        r=4, lora_alpha=8, use_dora=True, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    whole = peft.get_peft_model(whole_model(source), wanted)
    whole.save_pretrained(tmp_path / "theirs")

    stages = build_all(source, 2, adapter=DORA.model_copy(update={"path": str(tmp_path / "theirs")}))

    torch.testing.assert_close(chain(stages, ids), whole(ids).logits, rtol=1e-5, atol=1e-6)


def test_fresh_sizes_of_dora_change_nothing(cache):
    source, ids = tiny_source("gpt2", cache), some_ids()

    found = chain(build_all(source, 2, adapter=DORA), ids)

    torch.testing.assert_close(found, chain(build_all(source, 2), ids), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("peft_type", "IA3", "'IA3'; stages can carry LORA"),
        ("peft_type", "MULTITASK_PROMPT_TUNING", "can carry LORA .*, P_TUNING and PROMPT_TUNING"),
        ("r", 8, r"model\.adapter\.rank: found 4; .* has 8"),
        ("use_rslora", True, r"model\.adapter\.rslora: found False; .* has True"),
        ("target_modules", ".*proj", "target_modules: is a pattern"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("rank_pattern", {"q_proj": 2}, "rank_pattern: found .*stages cannot carry"),
        ("init_lora_weights", "pissa", "init_lora_weights"),
    ],
)
def test_an_adapter_that_stages_cannot_carry_is_refused_by_the_key(cache, tmp_path, key, value, said):
    source, _ = exported(cache, "llama", "lora", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    with pytest.raises(ModelError, match=said):
        build_all(source, 1, adapter=LoraConfig(rank=4, alpha=8, path=str(tmp_path / "adapter")))


def test_damaged_and_foreign_files_are_refused(cache, tmp_path):
    source, _ = exported(cache, "llama", "lora", tmp_path / "adapter")
    start = LoraConfig(rank=4, alpha=8, path=str(tmp_path / "adapter"))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = min(tensors)

    save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, path)
    with pytest.raises(ModelError, match="no finite number"):
        build_all(source, 1, adapter=start)
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(ModelError, match=r"found nothing, expected .* the adapter of another model"):
        build_all(source, 1, adapter=start)
    path.write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        build_all(source, 1, adapter=start)
    with pytest.raises(ModelError, match="give a directory in peft's format"):
        build_all(source, 1, adapter=start.model_copy(update={"path": str(tmp_path / "none")}))


@pytest.mark.parametrize("kind", KINDS)
def test_the_planner_counts_what_is_trained(cache, kind):
    source = tiny_source("llama", cache)

    (row,) = stage_table(source.hub_config, (StageSpec(0, 1, 0, 4),), KINDS[kind])

    shape = shape_of(source.hub_config_dict, "model config")
    assert 4 * adapter_numbers(shape, KINDS[kind].planner_adapter) == row.trainable


def test_new_keys_leave_the_dump_of_older_run_files_alone():
    assert ModelConfig(path="a", adapter=LoraConfig()).model_dump()["adapter"] == {
        "kind": "lora",
        "rank": 8,
        "alpha": 16,
        "dropout": 0.0,
        "targets": (),
    }
    assert DORA.model_dump()["dora"] is True
