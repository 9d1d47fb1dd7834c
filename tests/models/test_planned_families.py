"""Families cut by transformers' pipeline plan: the chain of stages computes what the whole model computes."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from planned_models import NO_WINDOWS, OTHERWISE, PLANNED, WINDOW, dropout_of
from safetensors.torch import load_file, save_file
from tiny_models import (
    LAYERS,
    VOCAB,
    assert_causal_is_whole,
    build_all,
    chain,
    disturbed,
    lm_loss,
    named,
    some_ids,
    trained,
    whole_model,
)
from transformers import DynamicCache

from phalanx.errors import ModelError
from phalanx.models import (
    FAMILIES,
    AttentionPattern,
    LoraConfig,
    ModelSource,
    PrefixConfig,
    SpfConfig,
    parse_hub_config,
)
from phalanx.models.planned import FamilyByPlan
from phalanx.models.source import write_random_model
from phalanx.planner.model.families import FAMILIES as FACTS

_WRITTEN = ("bert", "bloom", "falcon", "gpt2", "llama", "modernbert", "opt", "t5")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def source_of(name, cache, **changes):
    """A tiny model with a config that has lists, which a run file's architecture cannot hold."""
    hub_config = parse_hub_config(PLANNED[name] | changes, name)
    return ModelSource(write_random_model(hub_config, 3, cache, None))


def test_at_least_fourteen_families_are_held_to_the_bits_of_transformers():
    assert set(FAMILIES) == {*PLANNED, *_WRITTEN}
    assert len(FAMILIES) >= 14


FEW = {"cohere", "gemma2", "gpt_neox", "phi", "qwen3", "qwen3_moe"}
SOME = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in PLANNED]
"""Side by side, with windows, biases, other names, norms of heads, experts: what blocks share is asked of these."""


@pytest.mark.quick_cases("*-False", "gemma2-True", "gpt_neox-True")
@pytest.mark.parametrize(
    ("name", "tied"),
    [
        pytest.param(name, tied, marks=[pytest.mark.slow] if tied and name not in FEW else [])
        for name in PLANNED
        for tied in (False, True)
    ],
)
def test_logits_loss_and_gradients_are_bit_equal_for_every_number_of_stages(cache, name, tied):
    source = source_of(name, cache, tie_word_embeddings=tied)

    # a first, a middle and a last stage, one of which has two layers; tied ones have every cut
    for num_stages in range(1, LAYERS + 1) if tied else (3,):
        assert_causal_is_whole(source, num_stages)


@pytest.mark.quick_cases("gemma2-True-*", "qwen3_moe-True-bf16")
@pytest.mark.parametrize("precision", ["bf16", "bf16_weights"])
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", SOME)
def test_they_are_in_bf16_too(cache, name, tied, precision):
    source = source_of(name, cache, tie_word_embeddings=tied)

    for num_stages in range(1, LAYERS + 1):
        assert_causal_is_whole(source, num_stages, precision)


@pytest.mark.parametrize("name", NO_WINDOWS)
def test_a_family_without_its_window_is_bit_equal_too(cache, name):
    assert_causal_is_whole(source_of(name, cache, **NO_WINDOWS[name]), 3)


@pytest.mark.parametrize("name", OTHERWISE)
def test_options_that_change_the_order_are_bit_equal_too(cache, name):
    assert_causal_is_whole(source_of(name, cache, **OTHERWISE[name]), 3)


@pytest.mark.parametrize("name", SOME)
def test_dropout_draws_the_same_numbers_as_the_whole_model(cache, name):
    source = source_of(name, cache, **dropout_of(name))
    model, stages, ids = whole_model(source), build_all(source, 3), some_ids()

    torch.manual_seed(1)
    expected = model(input_ids=ids, use_cache=False).logits
    torch.manual_seed(1)
    found = chain(stages, ids)
    torch.manual_seed(2)
    other = chain(stages, ids)

    assert torch.equal(found, expected)
    assert torch.equal(found, other) == (not dropout_of(name))


@pytest.mark.parametrize("name", SOME)
def test_adapters_are_bit_equal_to_peft_on_the_whole_model(cache, name):
    peft = pytest.importorskip("peft")
    source, ids = source_of(name, cache), some_ids()
    stages, model = build_all(source, 3, adapter=LoraConfig(rank=4, alpha=8)), whole_model(source)
    targets = list(source.family.facts.adapter_targets)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets), model)
    adapters = trained(disturbed(stages, 0.1))
    with torch.no_grad():
        for key, value in adapters.items():
            model.get_parameter(key.replace(".weight", ".default.weight")).copy_(value)

    expected = model(input_ids=ids, use_cache=False).logits
    lm_loss(expected, ids).backward()
    logits = chain(stages, ids)
    lm_loss(logits, ids).backward()

    assert torch.equal(logits, expected)
    for key, value in adapters.items():
        assert torch.equal(value.grad, model.get_parameter(key.replace(".weight", ".default.weight")).grad), key


@pytest.mark.parametrize("name", SOME)
def test_virtual_tokens_are_a_cache_of_transformers_or_refused_behind_a_window(cache, name):
    source, ids = source_of(name, cache, **NO_WINDOWS.get(name, {})), some_ids()
    adapter = PrefixConfig(kind="ptuning", tokens=5)
    if "sliding_attention" in source.family._layer_types(source.hub_config):
        with pytest.raises(ModelError, match="virtual tokens are not known in layers with a sliding window"):
            build_all(source, 2, adapter=adapter)
        return
    stages = disturbed(build_all(source, 2, adapter=adapter), 1.0)
    model, past, values = whole_model(source).eval(), DynamicCache(), trained(stages)
    path = f"{source.family.trunk}.{source.family.blocks}"
    for layer in range(source.num_layers):
        pair = [values[f"{path}.{layer}.prefix.{part}"].detach() for part in ("key", "value")]
        past.update(*(one.expand(len(ids), -1, -1, -1) for one in pair), layer)

    with torch.no_grad():
        found, expected = chain(stages, ids), model(ids, past_key_values=past).logits

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt_neox", "qwen3", "phi"])
def test_a_share_of_heads_and_rows_is_trained_beside_frozen_ones(cache, name):
    source, ids = source_of(name, cache), some_ids()
    whole, sparse = build_all(source, 2), build_all(source, 2, adapter=SpfConfig(kind="spf", share=0.5))

    found = chain(sparse, ids)
    lm_loss(found, ids).backward()

    torch.testing.assert_close(found, chain(whole, ids))
    assert all(value.grad.abs().sum() > 0 for value in trained(sparse).values())


def test_heads_that_share_one_matrix_with_fewer_keys_are_not_ranked(cache):
    with pytest.raises(ModelError, match="spf cannot rank heads of phi3, whose 4 query heads share 2 of keys"):
        build_all(source_of("phi3", cache), 2, adapter=SpfConfig(kind="spf"))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text"])
def test_recomputed_blocks_keep_the_masks_of_their_layers(cache, name):
    source, ids = source_of(name, cache), some_ids()
    plain, recomputed = build_all(source, 2), build_all(source, 2, recompute=True)

    for stages in (plain, recomputed):
        lm_loss(chain(stages, ids), ids).backward()

    for (key, left), right in zip(named(plain).items(), named(recomputed).values(), strict=True):
        assert torch.equal(left.grad, right.grad), key


def test_a_token_sees_nothing_beyond_its_window(cache):
    source, ids = source_of("mistral", cache, num_hidden_layers=1), some_ids()
    stages = build_all(source, 1)
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB

    found, other = chain(stages, ids), chain(stages, changed)

    assert torch.equal(found[:, WINDOW:], other[:, WINDOW:])
    assert not torch.equal(found[:, WINDOW - 1], other[:, WINDOW - 1])


@pytest.mark.parametrize("name", ["gpt_neox", "qwen3", "olmo2"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_documents_and_both_kernels_are_those_of_the_whole_model(cache, name, kernel):
    source, ids = source_of(name, cache), some_ids()
    documents = torch.zeros(ids.shape, dtype=torch.int64)
    documents[:, 3:] = 1
    pattern = AttentionPattern("documents", documents=documents)
    places = pattern.token_positions(ids.shape[1], ids.device)

    x = ids
    for stage in build_all(source, 2, attention=kernel):
        x = stage(x, pattern)

    assert torch.equal(x, whole_model(source, kernel)(input_ids=ids, position_ids=places, use_cache=False).logits)


def test_tokens_that_see_later_ones_are_refused_in_layers_with_a_window(cache):
    stages, ids = build_all(source_of("mistral", cache), 1), some_ids()

    with pytest.raises(ModelError, match="bidirectional: is not known in layers with a sliding window"):
        stages[0](ids, AttentionPattern("bidirectional"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "deepseek_v3"}, "found 'deepseek_v3', a mixture of experts, which stages do not carry"),
        ({"model_type": "apertus"}, "found 'apertus', which transformers can cut and no test here has held to"),
        ({"model_type": "stablelm"}, "found 'stablelm', for which transformers has no pipeline plan"),
        ({"model_type": "no_such"}, "found 'no_such'; expected one of arcee, bert, bloom"),
        (
            PLANNED["gemma3_text"] | {"use_bidirectional_attention": True},
            "use_bidirectional_attention = True: stages cannot carry it; set it to False",
        ),
        (
            PLANNED["qwen3"] | {"layer_types": ["full_attention", "chunked_attention"] * 2, "attention_chunk_size": 4},
            "layer_types: found 'chunked_attention'; stages carry full_attention and sliding_attention",
        ),
        (PLANNED["mixtral"] | {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: stages cannot carry it"),
        (PLANNED["mixtral"] | {"num_experts_per_tok": 5}, "num_experts_per_tok 5 of num_experts 4; lower it"),
        (PLANNED["qwen2_moe"] | {"mlp_only_layers": [1]}, "carry blocks that all have experts; leave both out"),
        (PLANNED["qwen2"] | {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
    ],
)
def test_what_stages_cannot_carry_is_refused_by_name(config, reason):
    with pytest.raises(ModelError) as refused:
        parse_hub_config(config, "config.json")

    assert reason in str(refused.value)


def test_a_scale_of_embeddings_that_the_line_does_not_know_is_refused(cache, monkeypatch):
    source = source_of("gemma", cache)
    monkeypatch.setattr(
        FAMILIES["gemma"], "_slicing", dataclasses.replace(FAMILIES["gemma"]._slicing, scaled_embedding=False)
    )

    with pytest.raises(ModelError, match=r"gemma: the embedding .* is scaled by 5\.65.*, and should not be"):
        build_all(source, 2)


def test_a_transformers_without_a_plan_is_named(cache, monkeypatch):
    from transformers import CONFIG_MAPPING

    monkeypatch.setattr(CONFIG_MAPPING["qwen3"], "base_model_pp_plan", None)

    with pytest.raises(ModelError, match="qwen3: the installed transformers has no pipeline plan for it"):
        FamilyByPlan("qwen3").blocks  # noqa: B018 - reading is what fails


def test_a_shortened_model_keeps_the_types_of_its_first_layers(cache):
    short = source_of("gemma3_text", cache).with_first_blocks(3)

    assert parse_hub_config(short.hub_config_dict, "short").layer_types == [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ]


def test_hub_files_of_gpt_neox_have_another_name_for_the_head(cache, tmp_path):
    source = source_of("gpt_neox", cache)
    tensors = load_file(source.directory / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    save_file(tensors | {"embed_out.weight": head}, tmp_path / "model.safetensors")
    shutil.copy(source.directory / "config.json", tmp_path)

    saved = ModelSource(tmp_path)

    assert torch.equal(saved.read_tensor("lm_head.weight"), head)
    assert torch.equal(whole_model(saved).lm_head.weight, head)


def test_the_page_of_families_has_a_row_for_each_with_what_it_can_do():
    page = (Path(__file__).parents[2] / "docs/model_families.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")
    ]

    assert [name for name, *_ in rows] == [f"`{name}`" for name in sorted(FACTS)]
    windows = {"none": "", "config": "all layers", "layers": "by layer"}
    for name, _, window, shared in rows:
        facts = FACTS[name.strip("`")]
        assert window == windows[facts.slicing.windows if facts.slicing else "none"], name
        assert {axis.split()[0] for axis in shared.split(", ") if axis} == facts.shared_axes, name
