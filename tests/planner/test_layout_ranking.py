"""All layouts of a cluster: the best first, a reason for each of the others, and the best as a run file."""

import itertools
import json
import statistics
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from phalanx.errors import ConfigError, InputError
from phalanx.planner import Layout, describe_refusal
from phalanx.planner.cluster.catalog import known_clusters, known_models
from phalanx.planner.cluster.hardware import GIB, Citation, Cluster, Failures, HourlyPrice, Pool, ProjectCosts
from phalanx.planner.cost.estimate import Estimate, estimate_layout
from phalanx.planner.cost.memory import worst_rank
from phalanx.planner.cost.mixed import StageDevices, estimate_mixed, place_pipeline
from phalanx.planner.guard.finding import Verification
from phalanx.planner.layout import all_layouts
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.search.answer import answer_question
from phalanx.planner.search.candidates import candidate_layouts
from phalanx.planner.search.question import Question, about_model
from phalanx.planner.search.rank import ERROR, order_estimates, rank_layouts
from phalanx.planner.search.run_file import new_run, run_text, write_run


def question(shape: ModelShape, cluster: Cluster, recipe: Recipe, **more: object) -> Question:
    return replace(Question("a model", shape, recipe, cluster, (cluster.num_devices,)), **more)  # type: ignore[arg-type]


def test_every_layout_is_either_ranked_or_refused(tiny: ModelShape, cluster: Cluster, recipe: Recipe) -> None:
    found = rank_layouts(tiny, recipe, cluster, 8)

    ranked = {one.layout for one in found.valid}
    refused = {one.layout for one in found.refused}
    assert ranked | refused == set(candidate_layouts(8, cluster.per_node, None)) > set(all_layouts(8))
    assert not ranked & refused
    assert all(one.reason for one in found.refused)


def test_the_fastest_that_was_played_through_is_first_and_all_fit(
    tiny: ModelShape, cluster: Cluster, recipe: Recipe
) -> None:
    found = rank_layouts(tiny, recipe, cluster, 8).valid

    speeds = [one.tokens_per_s for one in found[:24]]
    # none stands before one that is faster by more than what the estimate is off by
    assert all(speed >= max(speeds[at:]) / (1 + ERROR) for at, speed in enumerate(speeds))
    for one in found:
        assert one.memory.total_bytes <= one.limit
        assert describe_refusal(one.layout, tiny, one.recipe) is None


def test_a_refusal_names_what_is_too_large(gpt2: ModelShape, cluster: Cluster) -> None:
    small = cluster.model_copy(update={"devices": {"d": cluster.devices["d"].model_copy(update={"memory_gib": 1.0})}})

    found = rank_layouts(gpt2, Recipe(32, 1024), small, 8, fixed=Layout(dp=8))

    assert not found.valid
    assert found.refused[0].reason.startswith("needs ")
    assert "0.92 GiB are usable; most is optimizer" in found.refused[0].reason


def test_a_split_backward_pass_computes_again_all_or_nothing(gpt2: ModelShape, cluster: Cluster) -> None:
    recipe, split = Recipe(2, 1024, microbatches=2), Layout(pp=2, schedule="zero-bubble")
    needed = worst_rank(gpt2, split, replace(recipe, checkpointing="selective")).total_bytes
    fitting = cluster.devices["d"].model_copy(update={"memory_gib": needed / GIB / 0.9})
    small = cluster.model_copy(update={"devices": {"d": fitting}})

    (plain,) = rank_layouts(gpt2, recipe, small, 2, fixed=replace(split, schedule="1f1b")).valid
    (found,) = rank_layouts(gpt2, recipe, small, 2, fixed=split).valid

    assert (plain.recipe.checkpointing, found.recipe.checkpointing) == ("selective", "full")


def test_tensor_parallel_across_nodes_is_not_taken(tiny: ModelShape, cluster: Cluster, recipe: Recipe) -> None:
    found = rank_layouts(tiny, recipe, cluster, 8)

    (reason,) = {one.reason for one in found.refused if one.layout.tp == 8}
    assert "across nodes of 4; lower tp" in reason


def test_a_slow_network_between_nodes_keeps_tensor_parallel_inside(
    gpt2: ModelShape, cluster: Cluster, recipe: Recipe
) -> None:
    def tensor_s(tp: int, per_node: int) -> float:
        one = cluster.model_copy(update={"per_node": per_node})
        return estimate_layout(gpt2, Layout(tp=tp), replace(recipe, sequence_length=1024), one).step.tensor

    assert tensor_s(4, per_node=4) < tensor_s(4, per_node=2) / 50


def test_the_parts_of_a_step_add_up_and_no_layout_beats_the_peak(
    tiny: ModelShape, cluster: Cluster, recipe: Recipe
) -> None:
    for one in rank_layouts(tiny, recipe, cluster, 8).valid:
        assert sum(one.step.parts_by_name().values()) == pytest.approx(one.step.total_seconds)
        assert min(one.step.parts_by_name().values()) >= -1e-12
        assert 0 < one.mfu <= cluster.efficiency + 1e-9


def test_a_layout_that_shares_the_work_is_faster_than_one_rank(gpt2: ModelShape, cluster: Cluster) -> None:
    recipe = Recipe(32, 1024, microbatches=8)

    alone = estimate_layout(gpt2, Layout(), recipe, cluster)
    shared = [estimate_layout(gpt2, layout, recipe, cluster) for layout in (Layout(dp=4), Layout(tp=4), Layout(pp=4))]

    for one in shared:
        assert 1.5 < one.tokens_per_s / alone.tokens_per_s <= 4.0001


def test_what_is_exchanged_beside_the_computation_is_hidden(gpt2: ModelShape, cluster: Cluster) -> None:
    recipe = Recipe(32, 1024, microbatches=1)

    fast = estimate_layout(gpt2, Layout(dp=4), recipe, cluster).step
    slow = estimate_layout(gpt2, Layout(dp=8), recipe, cluster).step

    assert 0 < fast.data < fast.hidden
    assert slow.data + slow.hidden > 50 * (fast.data + fast.hidden)


def test_recomputing_and_verifying_cost_time(gpt2: ModelShape, cluster: Cluster) -> None:
    recipe = Recipe(32, 1024, microbatches=8)

    plain = estimate_layout(gpt2, Layout(), recipe, cluster)
    again = estimate_layout(gpt2, Layout(), replace(recipe, checkpointing="full"), cluster)
    guarded = estimate_layout(gpt2, Layout(), recipe, cluster, guard=Verification(0.125))

    # a block's forward pass once more is a third of a step, the head's is not repeated
    assert 1.15 < again.step.compute / plain.step.compute < 4 / 3
    assert guarded.step.verification / plain.step.total_seconds == pytest.approx(0.72 / 8 + 0.015, rel=0.05)


def test_days_energy_and_cost_follow_from_tokens_power_and_price(tiny: ModelShape, cluster: Cluster) -> None:
    source = Citation(title="a quote", url="https://example.org", date="2026-01")
    priced = cluster.devices["d"].model_copy(update={"price": HourlyPrice(low=1.0, high=2.0, source=source)})
    there = cluster.model_copy(update={"devices": {"d": priced}, "power_overhead": 1.5})
    recipe = Recipe(32, 64, microbatches=4)

    found = estimate_layout(tiny, Layout(dp=8), recipe, there, tokens=1e9)

    assert found.totals is not None
    hours = 1e9 / found.tokens_per_s / 3600
    assert found.totals.days == pytest.approx(hours / 24)
    assert found.totals.device_hours == pytest.approx(8 * hours)
    assert found.totals.energy_kwh == pytest.approx(8 * hours * 0.1 * 1.5)
    assert found.totals.cost_usd == pytest.approx((8 * hours, 16 * hours))


def test_failed_runs_and_people_are_paid_beside_the_devices(tiny: ModelShape, cluster: Cluster) -> None:
    source = Citation(title="a quote", url="https://example.org", date="2026-01")
    priced = cluster.devices["d"].model_copy(update={"price": HourlyPrice(low=1.0, high=2.0, source=source)})
    costs = ProjectCosts(failed_runs=0.5, people=4.0, person_usd_per_year=365.25)
    there = cluster.model_copy(update={"devices": {"d": priced}, "costs": costs})
    recipe = Recipe(32, 64, microbatches=4)

    row = estimate_layout(tiny, Layout(dp=8), recipe, there, tokens=1e9).estimate_row()
    without = estimate_layout(tiny, Layout(dp=8), recipe, there.model_copy(update={"costs": None}), tokens=1e9)

    # four people at a dollar a day, while the run and half of another one last
    assert row["people_usd"] == pytest.approx(4 * 1.5 * row["days"])
    assert row["project_usd_low"] == pytest.approx(1.5 * row["cost_usd_low"] + row["people_usd"])
    assert row["project_usd_high"] == pytest.approx(1.5 * row["cost_usd_high"] + row["people_usd"])
    assert (row["days"], row["cost_usd_low"]) == tuple(without.estimate_row()[key] for key in ("days", "cost_usd_low"))
    assert without.estimate_row()["people_usd"] is without.estimate_row()["project_usd_low"] is None


def test_people_without_pay_are_refused() -> None:
    with pytest.raises(ValidationError, match="people and person_usd_per_year: found one without the other"):
        ProjectCosts(people=3.0)


def test_what_is_not_known_is_null(tiny: ModelShape, cluster: Cluster, recipe: Recipe) -> None:
    unpowered = cluster.devices["d"].model_copy(update={"power_w": None})
    there = cluster.model_copy(update={"devices": {"d": unpowered}})

    row = estimate_layout(tiny, Layout(), recipe, there, tokens=1e9).estimate_row()

    assert row["energy_kwh"] is None
    assert row["cost_usd_low"] is None
    assert estimate_layout(tiny, Layout(), recipe, there).estimate_row()["days"] is None


def test_failures_stretch_the_days(tiny: ModelShape, cluster: Cluster, recipe: Recipe) -> None:
    failing = cluster.model_copy(update={"failures": Failures(device_mtbf_h=24.0, save_s=60.0, restart_s=300.0)})

    steady, interrupted = (
        estimate_layout(tiny, Layout(dp=8), recipe, one, tokens=1e9).totals for one in (cluster, failing)
    )

    assert steady is not None
    assert interrupted is not None
    assert steady.goodput == 1.0
    assert 0.7 < interrupted.goodput < 0.9
    assert interrupted.days == pytest.approx(steady.days / interrupted.goodput)


def test_a_run_of_175_billion_parameters_lands_near_the_estimate_that_was_published() -> None:
    """Narayanan et al. 2021, table 1: 175B on 1,024 A100 with tp=8, pp=12 or so reached 140 TFLOP/s of each."""
    recipe = Recipe(1536, 2048, microbatches=96, precision="bf16", checkpointing="full", sequence_parallel=True)

    found = estimate_layout(
        known_models()["gpt3-175b"], Layout(dp=16, tp=8, pp=8), recipe, known_clusters()["a100-nodes"], tokens=300e9
    )

    assert found.totals is not None
    assert found.totals.days == pytest.approx(34, rel=0.2)
    assert found.memory.total_bytes < found.limit


def test_llama_2_70b_takes_the_hours_that_were_reported() -> None:
    """Touvron et al. 2023b: 1,720,320 A100-hours; their layout is not published, the half of the peak is assumed."""
    shape, recipe = known_models()["llama-2-70b"], Recipe(1024, 4096, precision="bf16")
    there = known_clusters()["llama2-rsc"].model_copy(update={"pools": (Pool(device="a100-80gb", count=2048),)})

    (found,) = rank_layouts(shape, recipe, there, 2048, tokens=2e12, fixed=Layout(dp=256, tp=8, zero=3)).valid

    assert found.totals is not None
    assert found.totals.device_hours == pytest.approx(1_720_320, rel=0.1)


def test_a_mixed_pool_gives_the_fast_devices_more_layers() -> None:
    pool = known_clusters()["paper-pool"]
    # over its own slow network the links set the pace
    shape, cluster = known_models()["gpt2-xl"], pool.model_copy(update={"between": "infiniband-200"})
    recipe = Recipe(32, 1024, microbatches=32, precision="fp16")
    layout = Layout(pp=4)

    placed = place_pipeline(shape, layout, recipe, cluster)

    assert placed is not None
    layers = dict(zip(placed.devices, placed.layers, strict=True))
    assert sum(placed.layers) == 48
    assert layers["a40"] > layers["v100-16gb"] > layers["quadro-rtx-5000"]
    even = estimate_mixed(shape, layout, recipe, cluster, StageDevices(placed.devices, (12, 12, 12, 12)))
    assert estimate_mixed(shape, layout, recipe, cluster, placed).tokens_per_s > 1.3 * even.tokens_per_s


def test_a_mixed_pool_that_cannot_hold_the_model_is_refused() -> None:
    pool = known_clusters()["paper-pool"]
    few = pool.model_copy(update={"pools": tuple(Pool(device=kind.device, count=2) for kind in pool.pools[:2])})

    found = rank_layouts(known_models()["llama-2-70b"], Recipe(8, 1024, precision="fp16"), few, 4)

    assert not found.valid
    assert {one.reason for one in found.refused} == {"no order of the devices has the memory for its layers"}


def test_two_equal_halves_of_a_pool_can_be_two_pipelines() -> None:
    pool = known_clusters()["paper-pool"]
    twice = pool.model_copy(update={"pools": tuple(Pool(device=one.device, count=2) for one in pool.pools[:2])})

    found = rank_layouts(known_models()["gpt2"], Recipe(32, 1024, precision="fp16"), twice, 4)

    assert {one.layout.dp for one in found.valid} == {1, 2}


def test_the_best_is_written_as_a_run_file(tiny: ModelShape, cluster: Cluster, recipe: Recipe, tmp_path: Path) -> None:
    best = answer_question(question(tiny, cluster, recipe)).require_best()
    data = {"train": {"steps": 9, "microbatches": 1}, "pipeline": {"stages": 4}, "guard": {"mode": "phalanx"}}

    write_run(tmp_path / "run.toml", data, best)

    written = tomllib.loads((tmp_path / "run.toml").read_text())
    assert best.layout.parallel_section().items() <= written["parallel"].items()
    assert written["train"] == {"steps": 9, "microbatches": best.recipe.microbatches}
    assert "guard" not in written
    assert "pipeline" not in written


def test_what_was_estimated_is_what_is_written(gpt2: ModelShape, cluster: Cluster) -> None:
    recipe = Recipe(32, 1024, microbatches=8, checkpointing="full", sequence_parallel=True)
    data = {"model": {"name": "x", "activation_checkpointing": True}}

    written = tomllib.loads(run_text(data, estimate_layout(gpt2, Layout(dp=2, tp=4), recipe, cluster)))

    assert written["model"] == {"name": "x"}
    assert written["parallel"] == {
        "dp": 2,
        "tp": 4,
        "pp": 1,
        "cp": 1,
        "context": "ulysses",
        "zero": 0,
        "schedule": "1f1b",
        "sequence_parallel": True,
        "activation_checkpointing": "full",
    }


def test_a_run_file_that_cannot_be_written_is_an_error(
    tiny: ModelShape, cluster: Cluster, recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_run(
            tmp_path / "nowhere" / "run.toml", {}, answer_question(question(tiny, cluster, recipe)).require_best()
        )


def test_a_new_run_trains_the_model_that_was_planned(tiny: ModelShape, cluster: Cluster, tmp_path: Path) -> None:
    recipe = Recipe(32, 64, microbatches=4)
    best = answer_question(question(tiny, cluster, recipe)).require_best()

    by_name = tomllib.loads(run_text(new_run("gpt2", recipe, 1e6), best))
    by_path = tomllib.loads(run_text(new_run(str(tmp_path / "config.json"), recipe, None), best))

    assert by_name["model"]["architecture"]["n_layer"] == 12
    assert by_name["train"]["steps"] == round(1e6 / (32 * 64))
    assert by_path["model"]["path"] == str(tmp_path)


def test_the_answer_is_one_json_object_with_its_assumptions(tiny: ModelShape, cluster: Cluster, recipe: Recipe) -> None:
    answer = json.loads(
        json.dumps(answer_question(question(tiny, cluster, recipe, tokens=1e9)).as_json(), allow_nan=False)
    )

    assert answer["model"]["parameters"] == tiny.num_parameters
    assert answer["assumptions"]["efficiency"] == 0.5
    assert answer["assumptions"]["devices"]["d"]["price"] is None
    parts = ("parameters_gib", "gradients_gib", "optimizer_gib", "activations_gib", "buffers_gib")
    for row in answer["rows"]:
        assert sum(row[part] for part in parts) == pytest.approx(row["memory_gib"])
    assert {"layout", "reason"} == set(answer["refused"][0])


def test_one_layout_alone_is_judged_with_its_reason_and_the_nearest(
    tiny: ModelShape, cluster: Cluster, recipe: Recipe
) -> None:
    asked = question(tiny, cluster, recipe).with_options(layout="tp=3,dp=2", by="speed", gpus=(), tokens=None)

    with pytest.raises(ConfigError) as refused:
        answer_question(asked).require_best()

    assert "dp=2 tp=3: tp=3 does not divide 8 attention heads; lower tp" in str(refused.value)
    assert "the nearest that can work is " in str(refused.value)


def test_more_devices_than_there_are_is_refused(tiny: ModelShape, cluster: Cluster, recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match="--gpus 9: the cluster has 8 devices; give 1 to 8"):
        answer_question(question(tiny, cluster, recipe, counts=(9,)))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"by": "beauty"}, "--by beauty: choices: speed, cost"),
        ({"tokens": 0.0}, "--tokens 0: expected"),
        ({"tokens": float("nan")}, "--tokens nan"),
        ({"layout": "dp=2", "gpus": (4,)}, "--layout dp=2 has 2 ranks, not --gpus 4"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    keys: dict[str, object], reason: str, tiny: ModelShape, cluster: Cluster, recipe: Recipe
) -> None:
    whole: dict[str, object] = {"layout": None, "by": "speed", "gpus": (), "tokens": None}

    with pytest.raises(ConfigError, match=reason):
        question(tiny, cluster, recipe).with_options(**(whole | keys))  # type: ignore[arg-type]


@pytest.mark.parametrize(("precision", "sequences"), [("fp8", 8), ("bf16", 0)])
def test_a_recipe_that_makes_no_sense_is_refused(precision: str, sequences: int, cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match=r"--(precision|sequences)"):
        about_model("gpt2", cluster, sequences, 128, precision)


def test_memory_is_said_in_the_unit_of_the_limit(gpt2: ModelShape, cluster: Cluster) -> None:
    found = estimate_layout(gpt2, Layout(), Recipe(4, 128), cluster)

    assert found.estimate_row()["memory_gib"] == pytest.approx(found.memory.total_bytes / GIB)


def test_by_cost_the_fewest_devices_win_and_by_speed_the_most(
    gpt2: ModelShape, cluster: Cluster, recipe: Recipe
) -> None:
    asked = question(gpt2, cluster, Recipe(32, 1024), counts=(2, 8))

    fastest = answer_question(asked).require_best()
    cheapest = answer_question(replace(asked, by="cost")).require_best()

    assert (fastest.layout.num_ranks, cheapest.layout.num_ranks) == (8, 2)


def test_a_sealed_network_is_slower_between_nodes_only(gpt2: ModelShape, cluster: Cluster) -> None:
    recipe, sealed = Recipe(32, 1024), cluster.model_copy(update={"sealed": True})

    across = [estimate_layout(gpt2, Layout(dp=8), recipe, one).step for one in (cluster, sealed)]
    inside = [estimate_layout(gpt2, Layout(dp=4), recipe, one).step for one in (cluster, sealed)]

    assert across[1].data + across[1].hidden > 1.7 * (across[0].data + across[0].hidden)
    assert inside[0] == inside[1]


def test_of_layouts_that_are_as_fast_the_common_one_stands_first(
    tiny: ModelShape, cluster: Cluster, recipe: Recipe
) -> None:
    found = rank_layouts(tiny, recipe, cluster, 8).valid
    one = found[0]

    def promising(share: float, **layout: object) -> Estimate:
        return replace(one, layout=Layout(**layout), tokens_per_s=one.tokens_per_s / share)

    copies, sharded = promising(1.0, dp=8), promising(0.99, dp=8, zero=3)
    clever = promising(0.97, dp=4, cp=2, zero=3)
    best, slow = promising(0.8, dp=2, pp=4, schedule="zero-bubble"), promising(1.2, dp=8, zero=1)

    assert order_estimates([slow, clever, sharded, copies], "speed") == [copies, sharded, clever, slow]
    # a difference beyond the error decides
    assert order_estimates([copies, best], "speed") == [best, copies]


def test_the_error_is_that_of_pairs_of_layouts_that_were_measured() -> None:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "parallel-cpu-2cores-quick.json"
    ratios = [row["step_ratio"] for row in json.loads(path.read_text())["plan"] if row.get("step_ratio")]
    off = [abs(first / second - 1) for first, second in itertools.permutations(ratios, 2)]

    assert len(ratios) > 10
    assert ERROR < statistics.median(off) < 2 * ERROR
