"""Adapters beside frozen weights: what has gradients and states, what is computed, what travels."""

from dataclasses import replace

import pytest

from phalanx.errors import ConfigError
from phalanx.models.families import FAMILIES
from phalanx.parallel.tensor.tensor_plans import plan_of
from phalanx.planner import Layout, describe_refusal, nearest_valid_layout, shape_of
from phalanx.planner.cluster.catalog import known_clusters, known_models
from phalanx.planner.cluster.hardware import Cluster
from phalanx.planner.cluster.links import Link, all_reduce
from phalanx.planner.cluster.machine import Machine
from phalanx.planner.cost.exchanging import count_traffic, data_exchange
from phalanx.planner.cost.memory import held_parameters, worst_rank
from phalanx.planner.cost.step import stage_times
from phalanx.planner.model.activations import block_bytes
from phalanx.planner.model.adapter import Adapter, adapted_linears, adapter_numbers, block_tensors, linears_of
from phalanx.planner.model.compute import model_flops, training_flops
from phalanx.planner.model.families import FAMILIES as FACTS
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.search.rank import rank_layouts

RANK = 4
LORA = Adapter(RANK)
SIZES = {
    "hidden_size": 64,
    "n_embd": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "d_ff": 96,
    "d_kv": 16,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
WORKING = Recipe(sequences=32, sequence_length=64, microbatches=4)


@pytest.fixture
def thin(recipe: Recipe) -> Recipe:
    return replace(recipe, adapter=LORA)


def test_of_every_family_the_planner_has_facts_and_the_models_have_code() -> None:
    assert set(FACTS) == set(FAMILIES)


# experts are no matrices of a block that ranks share
@pytest.mark.parametrize("name", sorted(name for name, facts in FACTS.items() if facts.experts is None))
def test_matrices_are_those_that_ranks_share_and_the_usual_targets_are_the_family_s(name: str) -> None:
    shape = shape_of(SIZES | {"model_type": name})

    assert {one.name for one in linears_of(shape) if one.is_row} == set(plan_of(name).rows)
    assert {one.name for one in linears_of(shape) if not one.is_row} == set(plan_of(name).columns)
    assert sum(one.inputs * one.outputs for one in linears_of(shape)) == shape.layer_matrix
    assert adapted_linears(shape, LORA) == adapted_linears(shape, Adapter(RANK, FACTS[name].adapter_targets))


@pytest.mark.parametrize(("name", "number"), [("gpt2", 12), ("llama-65b", 9), ("opt-125m", 16), ("bloom-560m", 12)])
def test_a_block_s_tensors_are_counted(name: str, number: int) -> None:
    assert block_tensors(known_models()[name]) == number


def test_only_adapters_have_gradients_and_states(tiny: ModelShape, recipe: Recipe, thin: Recipe) -> None:
    trained = 8 * RANK * (64 + 3 * 64)

    full, frozen = worst_rank(tiny, Layout(), recipe), worst_rank(tiny, Layout(), thin)

    assert frozen.parameters == 4 * (tiny.num_parameters + trained)
    assert (frozen.gradients, frozen.optimizer) == (4 * trained, 8 * trained)
    assert full.gradients == 4 * tiny.num_parameters
    assert frozen.activations < full.activations


@pytest.mark.parametrize(("zero", "parts"), [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))])
def test_zero_shares_all_that_is_stored_and_states_of_adapters_alone(
    tiny: ModelShape, thin: Recipe, zero: int, parts: tuple[int, int, int]
) -> None:
    alone, shared = worst_rank(tiny, Layout(), thin), worst_rank(tiny, Layout(dp=4, zero=zero), thin)

    found = (shared.parameters, shared.gradients, shared.optimizer)
    assert found == tuple(
        whole // part for whole, part in zip((alone.parameters, alone.gradients, alone.optimizer), parts, strict=True)
    )


def test_zero_3_sums_no_frozen_gradient(tiny: ModelShape) -> None:
    # few tokens, so that gathered weights and gradients are what counts
    full, thin = Recipe(8, 2), Recipe(8, 2, adapter=LORA)
    added = 4 * RANK * 256

    buffers = [worst_rank(tiny, Layout(dp=8, zero=3), one).buffers for one in (full, thin)]

    # of two blocks, and the head's own; beside frozen weights three are gathered at the worst moment, and not two
    assert buffers[0] - buffers[1] == 4 * tiny.layer_parameters + 4 * tiny.head_matrix - 3 * added


def test_tensor_parallel_ranks_have_a_whole_and_their_columns_of_b(tiny: ModelShape, thin: Recipe) -> None:
    assert adapter_numbers(tiny, LORA, tp=4) == RANK * (64 + 3 * 64 // 4)
    assert held_parameters(tiny, Layout(tp=4), thin, 8, 0).trained == 8 * RANK * (64 + 48)


def test_a_step_takes_two_thirds_of_the_products_and_all_of_attention(
    tiny: ModelShape, recipe: Recipe, thin: Recipe
) -> None:
    matrices, scores, head = 2 * 8 * 49152, 8 * 4 * 64 * 64, 2 * 128 * 64

    assert model_flops(tiny, 64) == training_flops(tiny, recipe) == 3 * (matrices + scores + head)
    assert training_flops(tiny, thin) == 2 * matrices + 3 * scores + 2 * head + 6 * 8 * RANK * 256


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=4), Layout(pp=4, schedule="zero-bubble")])
def test_all_passes_together_take_the_operations_that_are_counted(
    tiny: ModelShape, thin: Recipe, machine: Machine, layout: Layout
) -> None:
    bare = replace(machine, inside=Link(latency_s=0.0, bytes_per_s=1e30))

    times, _ = stage_times(tiny, layout, thin, bare)

    seconds = (
        sum(one.seconds_of("forward") + one.seconds_of("backward") for one in times) * layout.tp * thin.microbatches
    )
    # of an adapter each tensor parallel rank computes the first matrix whole
    again = (layout.tp - 1) * 6 * 8 * RANK * 64
    assert seconds * bare.flops_per_s == pytest.approx((training_flops(tiny, thin) + again) * thin.tokens_per_step)


def test_frozen_tables_cost_a_pipeline_s_ends_nothing(tiny: ModelShape, thin: Recipe, machine: Machine) -> None:
    dear = replace(machine, first_s=1e-2, last_s=1e-1)

    assert stage_times(tiny, Layout(), thin, dear) == stage_times(tiny, Layout(), thin, machine)


def test_copies_exchange_adapters_alone(tiny: ModelShape, thin: Recipe, machine: Machine) -> None:
    trained = 8 * RANK * 256 * 4

    assert count_traffic(tiny, Layout(dp=4), thin).copies == 2 * 3 / 4 * trained
    assert count_traffic(tiny, Layout(dp=4, zero=1), thin).copies == 3 * 3 / 4 * trained
    shown, hidden = data_exchange(tiny, Layout(dp=4), thin, replace(machine, overlap=False), 1.0)
    assert (shown, hidden) == (pytest.approx(all_reduce(trained, 4, machine.inside)), 0.0)


def test_zero_3_still_gathers_frozen_weights_for_both_passes(tiny: ModelShape, recipe: Recipe, thin: Recipe) -> None:
    full, frozen = (count_traffic(tiny, Layout(dp=4, zero=3), one).copies for one in (recipe, thin))

    trained = 8 * RANK * 256
    # gradients of four microbatches are not sent, adapters are gathered eight times and summed four times
    assert full - frozen == 3 / 4 * 4 * (4 * tiny.num_parameters - 12 * trained)


def test_the_first_matrices_of_adapters_are_completed_among_tensor_parallel_ranks(
    tiny: ModelShape, recipe: Recipe, thin: Recipe, machine: Machine
) -> None:
    layout = Layout(tp=2)

    settled = [
        data_exchange(tiny, layout, replace(thin, sequence_parallel=cuts), machine, 0.0)[0] for cuts in (False, True)
    ]

    # norms and biases are frozen, so that a cut sequence adds nothing
    assert settled == [pytest.approx(8 * all_reduce(64 * RANK * 4, 2, machine.inside))] * 2
    assert data_exchange(tiny, layout, recipe, machine, 0.0)[0] == 0.0


def test_a_tied_table_that_is_frozen_is_not_summed(tiny: ModelShape, thin: Recipe, machine: Machine) -> None:
    assert data_exchange(tiny, Layout(pp=2), thin, machine, 0.0) == (0.0, 0.0)


def test_selective_checkpointing_keeps_what_adapters_give_as_well(tiny: ModelShape) -> None:
    plain = Recipe(4, 64, checkpointing="selective")

    bare, thin = (block_bytes(tiny, Layout(), one) for one in (plain, replace(plain, adapter=LORA)))

    assert thin - bare == 4 * 64 * 4 * (3 * 64 + RANK)


def test_adapters_on_rows_are_refused_with_tensor_parallel_ranks_and_the_nearest_has_none(tiny: ModelShape) -> None:
    adapter = Adapter(RANK, ("c_proj",))

    reason = describe_refusal(Layout(dp=2, tp=2), tiny, replace(WORKING, adapter=adapter))

    assert reason == (
        "tp=2: adapters on attn.c_proj, mlp.c_proj, of whose inputs each rank has a part, are not cut; take "
        "attn.c_attn, mlp.c_fc, or set tp to 1"
    )
    assert describe_refusal(Layout(dp=2, tp=2), tiny, replace(WORKING, adapter=LORA)) is None
    assert nearest_valid_layout(Layout(dp=2, tp=2), tiny, replace(WORKING, adapter=adapter)) == Layout(dp=4)


def test_a_target_that_is_no_matrix_is_refused_with_the_choices(tiny: ModelShape) -> None:
    with pytest.raises(ConfigError, match=r"found 'q_proj'; the matrices of gpt2 are attn\.c_attn, attn\.c_proj"):
        adapted_linears(tiny, Adapter(RANK, ("q_proj",)))


def test_a_mixed_pool_is_refused(recipe: Recipe, thin: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"found model\.adapter and pools of different devices"):
        rank_layouts(known_models()["gpt2"], thin, known_clusters()["paper-pool"], 4)
    assert rank_layouts(
        known_models()["gpt2"], replace(recipe, precision="fp16"), known_clusters()["paper-pool"], 4
    ).valid


def test_adapters_fit_where_full_training_does_not(cluster: Cluster) -> None:
    shape = shape_of(
        {"model_type": "gpt2", "n_embd": 1600, "n_layer": 20, "n_head": 8, "vocab_size": 50257, "n_positions": 1024}
    )
    full = Recipe(4, 128)

    found = [rank_layouts(shape, one, cluster, 1) for one in (full, replace(full, adapter=LORA))]

    assert [len(one.valid) for one in found] == [0, 1]
    assert "needs " in found[0].refused[0].reason
