"""SPF: which heads and rows are trained, that nothing else is, and that they come back bit for bit."""

import math

import pytest
import torch
from tiny_models import ARCHITECTURES, Held, build_all, chain, disturbed, lm_loss, named, some_ids, tiny_source, trained
from transformers import AutoModelForCausalLM

from phalanx.checkpoint.export import export_model
from phalanx.errors import CheckpointError, ModelError
from phalanx.models import SpfConfig, StageSpec, build_empty_stage

FAMILIES = ["gpt2", "opt", "bloom", "llama"]
HALF = SpfConfig(kind="spf", share=0.5)
MATRICES = {
    "gpt2": ("attn.c_attn", "mlp.c_fc"),
    "opt": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1"),
    "bloom": ("self_attention.query_key_value", "mlp.dense_h_to_4h"),
    "llama": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def weight_of(source, layer):
    """``[out, in]``."""
    weight = source.read_tensor(f"{layer}.weight")
    return weight.T if source.family.fan_in_fan_out else weight


def heaviest(source, layer, share):
    """The rows that ought to be trained, by loops over heads and rows."""
    weight, config, model_type = weight_of(source, layer), source.hub_config, source.family.model_type
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    if not layer.endswith(("attn", "query_key_value", "q_proj", "k_proj", "v_proj")):
        groups = [[[row] for row in range(len(weight))]]
    elif model_type == "gpt2":
        groups = [[[(kind * heads + h) * size + i for i in range(size)] for h in range(heads)] for kind in range(3)]
    elif model_type == "bloom":
        groups = [[[(h * 3 + kind) * size + i for i in range(size)] for h in range(heads)] for kind in range(3)]
    else:
        groups = [[[h * size + i for i in range(size)] for h in range(len(weight) // size)]]
    rows = []
    for kind in groups:
        ranked = sorted(range(len(kind)), key=lambda g: -float(weight[kind[g]].double().abs().sum()))
        rows += [row for g in sorted(ranked[: math.ceil(share * len(kind))]) for row in kind[g]]
    return rows


@pytest.mark.parametrize("name", [*FAMILIES, "bloom-odd-heads"])
def test_the_heaviest_heads_and_rows_are_trained_and_nothing_else(cache, name):
    source = tiny_source(name, cache)
    stages = build_all(source, 2, adapter=HALF)

    layers = [key.removesuffix(".spf_delta") for key in trained(stages)]
    blocks = f"{source.family.trunk}.{source.family.blocks}"
    kinds = MATRICES[ARCHITECTURES[name]["model_type"]]
    assert sorted(layers) == sorted(f"{blocks}.{i}.{kind}" for i in range(4) for kind in kinds)
    for stage in stages:
        for layer in (key.removesuffix(".spf_delta") for key in stage.trainable_parameters()):
            module = stage.get_submodule(layer)
            assert module.rows.tolist() == heaviest(source, layer, 0.5)
            assert module.spf_delta.shape == (len(module.rows), weight_of(source, layer).shape[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fresh_adapter_changes_no_bit_and_then_learns(cache, name):
    source, ids = tiny_source(name, cache), some_ids()
    stages = build_all(source, 2, adapter=HALF)
    frozen = {key: value.clone() for key, value in named(stages).items() if not value.requires_grad}

    assert torch.equal(chain(stages, ids), chain(build_all(source, 2), ids))
    optimizer = torch.optim.AdamW(trained(stages).values(), lr=0.01)
    losses = []
    for _ in range(5):
        loss = lm_loss(chain(stages, ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0]
    assert frozen
    assert all(torch.equal(value, named(stages)[key]) for key, value in frozen.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_is_that_of_the_rows_in_a_model_of_which_everything_is_trained(cache, name):
    source, ids = tiny_source(name, cache), some_ids()
    some, everything = build_all(source, 2, adapter=HALF), build_all(source, 2)

    for stages in (some, everything):
        lm_loss(chain(stages, ids), ids).backward()

    whole = {key: value.grad for key, value in named(everything).items()}
    for stage in some:
        for key, value in stage.trainable_parameters().items():
            layer = key.removesuffix(".spf_delta")
            gradient = whole[f"{layer}.weight"]
            gradient = gradient.T if source.family.fan_in_fan_out else gradient
            torch.testing.assert_close(value.grad, gradient[stage.get_submodule(layer).rows], rtol=1e-4, atol=1e-6)
            assert value.grad.abs().max() > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_model_has_the_differences_in_its_weights(cache, name, tmp_path):
    source, ids = tiny_source(name, cache), some_ids()
    stages = disturbed(build_all(source, 2, adapter=HALF), 0.1)

    export_model(Held(stages), source, tmp_path / "merged", adapter=HALF, merge=True)

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True).eval()
    torch.testing.assert_close(whole(ids).logits, chain(stages, ids), rtol=1e-4, atol=1e-5)


def test_differences_alone_are_not_exported_and_of_another_model_refused(cache, tmp_path):
    source, other = tiny_source("gpt2", cache), tiny_source("llama", cache)
    held = Held(disturbed(build_all(source, 2, adapter=HALF), 0.1))

    with pytest.raises(CheckpointError, match="peft does not support spf; use --merge"):
        export_model(held, source, tmp_path / "out", adapter=HALF)
    with pytest.raises(CheckpointError, match="has no counterpart"):
        export_model(held, other, tmp_path / "out", adapter=HALF, merge=True)
    with pytest.raises(ModelError, match="has a difference of shape"):
        export_model(held, source, tmp_path / "out", adapter=SpfConfig(kind="spf", share=0.25), merge=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("share", "heads", "rows"), [(0.01, 1, 2), (0.25, 1, 32), (0.26, 2, 34), (1.0, 4, 128)])
def test_a_share_is_rounded_up(cache, share, heads, rows):
    (stage,) = build_all(tiny_source("gpt2", cache), 1, adapter=SpfConfig(kind="spf", share=share))

    assert stage.get_submodule("transformer.h.0.attn.c_attn").spf_delta.shape == (3 * heads * 8, 32)
    assert stage.get_submodule("transformer.h.0.mlp.c_fc").spf_delta.shape == (rows, 32)


def test_a_stage_without_weights_cannot_choose(cache):
    source = tiny_source("gpt2", cache)

    with pytest.raises(ModelError, match="chooses rows by the model's weights"):
        build_empty_stage(
            source.hub_config_dict,
            StageSpec(0, 1, 0, 4),
            adapter=HALF,
            activation_checkpointing=False,
            attention="sdpa",
        )
