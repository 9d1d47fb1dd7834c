"""Memory by part: what ZeRO shares, what checkpointing and offloading save, and what autograd really keeps."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.parallel.model.recompute import fuse_activations
from phalanx.planner import Layout, describe_refusal, shape_of
from phalanx.planner.cluster.hardware import Cluster
from phalanx.planner.cost.estimate import estimate_layout
from phalanx.planner.cost.memory import (
    RankMemory,
    checkpoint_bytes,
    in_flight,
    rank_memory,
    rank_parameters,
    worst_rank,
)
from phalanx.planner.model.activations import block_bytes
from phalanx.planner.model.adapter import Adapter, adapted_linears
from phalanx.planner.model.families.planned import PLANNED
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.schedules import SCHEDULES
from phalanx.planner.search.rank import rank_layouts as ranked

TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 8, "vocab_size": 128, "n_positions": 64}
LAYOUTS = st.builds(
    Layout,
    dp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    schedule=st.sampled_from(sorted(SCHEDULES)),
).filter(lambda layout: not SCHEDULES[layout.schedule].splits_backward or (layout.num_shards == 1 and layout.zero < 3))
RECIPES = st.builds(
    Recipe,
    sequences=st.just(32),
    sequence_length=st.just(64),
    microbatches=st.sampled_from([4, 8]),
    precision=st.sampled_from(["fp32", "bf16", "fp16", "autocast"]),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    checkpointing=st.sampled_from(["none", "selective", "full"]),
    offload=st.sampled_from(["none", "optimizer", "all"]),
    sequence_parallel=st.booleans(),
    fused_attention=st.booleans(),
)


def state(memory: RankMemory) -> int:
    return memory.parameters + memory.gradients + memory.optimizer


@settings(deadline=None)
@given(layout=LAYOUTS, recipe=RECIPES)
def test_the_parts_add_up_and_none_is_negative(layout: Layout, recipe: Recipe) -> None:
    shape = shape_of(TINY)
    assert describe_refusal(layout, shape, recipe) is None

    for rank in range(layout.pp):
        memory = rank_memory(shape, layout, recipe, rank)
        assert memory.total_bytes == sum(memory.parts_by_name().values())
        assert min(memory.parts_by_name().values()) >= 0
        assert memory.total_bytes <= worst_rank(shape, layout, recipe).total_bytes


@settings(deadline=None)
@given(layout=LAYOUTS, recipe=RECIPES)
def test_a_higher_zero_level_never_stores_more(layout: Layout, recipe: Recipe) -> None:
    # with everything on the host, ZeRO 2 alone gathers the whole on the device
    shape, kept = shape_of(TINY), replace(recipe, offload="none" if recipe.offload == "all" else recipe.offload)

    for place in range(layout.pp):
        needed = [state(rank_memory(shape, replace(layout, zero=zero), kept, place)) for zero in range(4)]
        assert needed == sorted(needed, reverse=True)


@settings(deadline=None)
@given(layout=LAYOUTS, recipe=RECIPES)
def test_a_higher_zero_level_never_needs_more_memory_for_a_model_of_some_size(layout: Layout, recipe: Recipe) -> None:
    # a tiny model's gathered blocks are as large as what sharing them saves; a pipeline shares late
    shape = shape_of(TINY | {"n_layer": 32, "n_embd": 1024})
    shared, kept = replace(layout, dp=4, pp=1), replace(recipe, offload="none")

    needed = [worst_rank(shape, replace(shared, zero=zero), kept).total_bytes for zero in range(4)]

    assert needed == sorted(needed, reverse=True)


@settings(deadline=None)
@given(layout=LAYOUTS, recipe=RECIPES)
def test_no_parameter_is_lost_between_the_ranks(layout: Layout, recipe: Recipe) -> None:
    shape = shape_of(TINY)
    one_tp = replace(layout, tp=1)

    total = sum(
        rank_parameters(shape, one_tp, sum(_layers(shape, one_tp, recipe)[rank :: layout.pp]), rank)
        for rank in range(layout.pp)
    )

    copies = shape.head_matrix if layout.pp > 1 else 0
    assert total == shape.num_parameters + copies


def _layers(shape: ModelShape, layout: Layout, recipe: Recipe) -> tuple[int, ...]:
    from phalanx.planner.cost.memory import stage_layers

    return stage_layers(shape, recipe.sequence_length, layout.pp * layout.stages_per_rank)


@settings(deadline=None)
@given(layout=LAYOUTS, recipe=RECIPES)
def test_recomputing_more_never_keeps_more(layout: Layout, recipe: Recipe) -> None:
    # a product that ends in the stream is whole on every rank, also where the ranks share all that it becomes
    shape, kept = shape_of(TINY), replace(recipe, sequence_parallel=False)

    needed = [block_bytes(shape, layout, replace(kept, checkpointing=kind)) for kind in ("none", "selective", "full")]

    assert needed == sorted(needed, reverse=True)


def test_offloading_moves_bytes_to_the_host_and_loses_none(tiny: ModelShape, recipe: Recipe) -> None:
    on_device = worst_rank(tiny, Layout(dp=2, zero=3), recipe)
    optimizer = worst_rank(tiny, Layout(dp=2, zero=3), replace(recipe, offload="optimizer"))
    everything = worst_rank(tiny, Layout(dp=2, zero=3), replace(recipe, offload="all"))

    assert (optimizer.optimizer, optimizer.host) == (0, on_device.optimizer)
    assert (state(everything), everything.host) == (0, state(on_device))
    assert everything.buffers >= on_device.buffers


@pytest.mark.parametrize("zero", [2, 3])
def test_a_pipeline_has_all_gradients_at_once(tiny: ModelShape, recipe: Recipe, zero: int) -> None:
    copies, shared = (worst_rank(tiny, Layout(dp=2, pp=2, zero=level), recipe) for level in (1, zero))

    assert shared.gradients == copies.gradients
    # without a pipeline they are shared while it works
    assert (
        worst_rank(tiny, Layout(dp=2, zero=zero), recipe).gradients < worst_rank(tiny, Layout(dp=2), recipe).gradients
    )


def test_a_pipeline_has_all_parameters_at_once_but_not_while_it_keeps_most(tiny: ModelShape, recipe: Recipe) -> None:
    # a model whose weights outweigh what few tokens keep
    layout, few = Layout(dp=2, pp=2, zero=3), replace(recipe, sequences=8, sequence_length=4)
    heavy, light = (rank_memory(tiny, layout, one, 0) for one in (few, recipe))

    assert heavy.buffers >= 2 * heavy.parameters > light.buffers


@pytest.mark.parametrize("zero", [2, 3])
def test_a_pipeline_that_offloads_has_the_own_parts_on_the_host(tiny: ModelShape, recipe: Recipe, zero: int) -> None:
    layout = Layout(dp=2, pp=2, zero=zero)
    kept, moved = (worst_rank(tiny, layout, replace(recipe, offload=how)) for how in ("none", "all"))

    whole = kept.parameters if zero == 2 else 0
    assert (moved.parameters, moved.gradients, moved.optimizer) == (whole, kept.gradients, 0)
    assert moved.host == kept.optimizer + kept.gradients // 2 * 2


def test_where_the_device_is_the_host_offloading_moves_nothing(
    tiny: ModelShape, recipe: Recipe, cluster: Cluster
) -> None:
    cores, moved = cluster.model_copy(update={"device_is_host": True}), replace(recipe, offload="all")
    layout = Layout(dp=2, zero=3)

    here = estimate_layout(tiny, layout, moved, cores)

    kept = estimate_layout(tiny, layout, recipe, cluster)
    assert (here.memory, here.step) == (kept.memory, kept.step)
    assert estimate_layout(tiny, layout, moved, cluster).memory.total_bytes < kept.memory.total_bytes
    best = [ranked(tiny, moved, one, 2, fixed=layout).valid[0].memory for one in (cluster, cores)]
    assert [memory.host > 0 for memory in best] == [True, False]


def test_sequence_parallel_shares_what_lies_between_the_products(tiny: ModelShape, recipe: Recipe) -> None:
    without = block_bytes(tiny, Layout(tp=4), recipe)
    shared = block_bytes(tiny, Layout(tp=4), replace(recipe, sequence_parallel=True))

    assert shared == block_bytes(tiny, Layout(), recipe) // 4
    assert shared < without


def test_gpipe_keeps_every_microbatch_and_1f1b_as_many_as_stages_follow() -> None:
    assert [in_flight(Layout(pp=4, schedule="gpipe"), 64, rank) for rank in range(4)] == [64] * 4
    assert [in_flight(Layout(pp=4), 64, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(Layout(dp=4), 64, 0) == 1


def test_an_fp32_model_takes_sixteen_bytes_a_parameter(gpt2: ModelShape, recipe: Recipe) -> None:
    memory = worst_rank(gpt2, Layout(), recipe)

    assert memory.parameters == 4 * gpt2.num_parameters
    assert memory.gradients == 4 * gpt2.num_parameters
    assert memory.optimizer == 8 * gpt2.num_parameters
    assert checkpoint_bytes(gpt2, recipe) == 12 * gpt2.num_parameters
    assert checkpoint_bytes(gpt2, recipe, weights_only=True) == 2 * gpt2.num_parameters


MODELS: dict[str, dict[str, Any]] = {
    "gpt2": TINY | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt2-gelu": TINY | {"activation_function": "gelu", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {
        "model_type": "opt",
        "hidden_size": 64,
        "ffn_dim": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "bloom": {
        "model_type": "bloom",
        "hidden_size": 64,
        "n_layer": 8,
        "n_head": 8,
        "vocab_size": 128,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 64,
    },
}


def bytes_kept_by_blocks(
    config: dict[str, Any], layers: int, *, is_fused: bool, adapter: Adapter | None = None, attention: str = "sdpa"
) -> int:
    """Bytes of distinct storages that autograd keeps in the forward pass of a model with so many blocks."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    names = {"gpt2": "n_layer", "bloom": "n_layer"}
    config = config | {names.get(config["model_type"], "num_hidden_layers"): layers}
    hub_config = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    kernel = {} if config["model_type"] == "bloom" else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(hub_config, **kernel).train()
    if is_fused:
        fuse_activations(model)
    if adapter is not None:
        adapt(model, adapter, fan_in_fan_out=config["model_type"] == "gpt2")
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    ids = torch.randint(0, 128, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(ids, use_cache=False).logits
    del output
    return sum(kept.values())


def adapt(model: Any, adapter: Adapter, *, fan_in_fan_out: bool) -> None:
    """Put adapters beside a model's frozen weights."""
    import peft

    targets = [one.name for one in adapted_linears(shape_of(model.config.to_dict()), adapter)]
    dropout = 0.1 if adapter.drops else 0.0
    peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=adapter.rank, target_modules=targets, fan_in_fan_out=fan_in_fan_out, bias="none", lora_dropout=dropout
        ),
        model,
    )


MLP = {"gpt2": ("c_fc", "mlp.c_proj"), "opt": ("fc1", "fc2"), "bloom": ("dense_h_to_4h", "dense_4h_to_h")}
ADAPTERS = {"usual": Adapter(4), "mlp": Adapter(4), "dropout": Adapter(4, drops=True)}


@pytest.mark.parametrize("kind", sorted(ADAPTERS))
@pytest.mark.parametrize("name", ["bloom", "gpt2", "llama", "opt"])
def test_beside_frozen_weights_a_block_keeps_what_autograd_keeps(name: str, kind: str) -> None:
    adapter = ADAPTERS[kind]
    if kind == "mlp":
        adapter = replace(adapter, targets=MLP.get(name, ("gate_proj", "up_proj", "down_proj")))
    shape, recipe = shape_of(MODELS[name]), Recipe(4, 64, adapter=adapter)

    four, two = (bytes_kept_by_blocks(MODELS[name], layers, is_fused=True, adapter=adapter) for layers in (4, 2))

    assert block_bytes(shape, Layout(), recipe) == pytest.approx((four - two) / 2, rel=0.01)


@pytest.mark.parametrize("targets", [(), ("c_attn", "attn.c_proj")])
def test_composed_attention_beside_frozen_weights_keeps_what_autograd_keeps(targets: tuple[str, ...]) -> None:
    adapter = Adapter(4, targets)
    shape, recipe = shape_of(TINY), Recipe(4, 64, fused_attention=False, fused_activation=False, adapter=adapter)

    four, two = (
        bytes_kept_by_blocks(MODELS["gpt2"], layers, is_fused=False, adapter=adapter, attention="eager")
        for layers in (4, 2)
    )

    assert block_bytes(shape, Layout(), recipe) == pytest.approx((four - two) / 2, rel=0.01)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_block_keeps_what_autograd_keeps(name: str, is_fused: bool) -> None:
    shape, recipe = shape_of(MODELS[name]), Recipe(sequences=4, sequence_length=64, fused_activation=is_fused)

    four, two = (bytes_kept_by_blocks(MODELS[name], layers, is_fused=is_fused) for layers in (4, 2))
    measured = (four - two) / 2

    assert block_bytes(shape, Layout(), recipe) == pytest.approx(measured, rel=0.01)


def planned_config(name: str) -> dict[str, Any]:
    config = MODELS["llama"] | {"model_type": name, "pad_token_id": None, "head_dim": 8}
    if name == "gpt_neox":
        config = {key: value for key, value in config.items() if key not in ("num_key_value_heads", "head_dim")}
    return config | ({"residual_dropout": 0.0, "attention_dropout": 0.0} if name == "seed_oss" else {})


QUICK = ("gemma2", "mistral", "qwen3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(PLANNED)]
)
def test_a_block_of_a_family_with_a_plan_keeps_about_what_autograd_keeps(name: str) -> None:
    shape, recipe = shape_of(planned_config(name)), Recipe(sequences=4, sequence_length=64, fused_activation=False)
    kernel = "sdpa" if shape.fused else "eager"

    four, two = (
        bytes_kept_by_blocks(planned_config(name), layers, is_fused=False, attention=kernel) for layers in (4, 2)
    )

    assert block_bytes(shape, Layout(), recipe) == pytest.approx((four - two) / 2, rel=0.15)


def test_selective_checkpointing_keeps_products_and_nothing_between() -> None:
    shape, recipe = shape_of(TINY), Recipe(4, 64, checkpointing="selective")

    # input, queries, keys, values, attention, its projection, both products of the MLP
    assert block_bytes(shape, Layout(), recipe) == 4 * 64 * 4 * (1 + 3 + 1 + 1 + 4 + 1) * 64


def test_the_loss_and_a_backward_pass_are_never_counted_at_once(tiny: ModelShape, recipe: Recipe) -> None:
    from phalanx.planner.model.activations import head_bytes, peak_bytes

    layout = Layout()
    kept = tiny.layers * block_bytes(tiny, layout, recipe)

    memory = worst_rank(tiny, layout, recipe)

    assert memory.activations == kept + max(head_bytes(tiny, layout, recipe), peak_bytes(tiny, layout, recipe))
    assert memory.activations < kept + head_bytes(tiny, layout, recipe) + peak_bytes(tiny, layout, recipe)


def test_zero_3_holds_what_is_gathered_and_what_is_being_summed() -> None:
    # few tokens, so that the worst moment is one at which weights are gathered
    shape, recipe = shape_of(TINY | {"n_embd": 512}), Recipe(8, 8)
    block = shape.layer_parameters * recipe.weight_bytes

    memory = worst_rank(shape, Layout(dp=8, zero=3), recipe)

    assert memory.buffers > 4 * block
    assert memory.buffers > worst_rank(shape, Layout(), recipe).buffers


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2),
        Layout(dp=2, zero=1),
        Layout(cp=2),
        Layout(dp=4, islands=2),
        Layout(dp=2, islands=2),
        Layout(dp=2, pp=2, schedule="zero-bubble"),
    ],
)
def test_no_copy_has_its_gradients_twice(layout: Layout) -> None:
    # few tokens, so that nothing else is worse
    shape = shape_of(TINY | {"n_embd": 512})

    memory = rank_memory(shape, layout, Recipe(8, 2, microbatches=2), 0)

    assert memory.buffers < memory.gradients
