"""Parties with ranks of their own: each stage as its party computes it, and one process at both ends."""

import pytest

from phalanx.errors import ConfigError
from phalanx.planner.cluster.hardware import Cluster
from phalanx.planner.cost.parties import PartyPlan, plan_parties
from phalanx.planner.guard.finding import Verification
from phalanx.planner.layout import Layout
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape

RECIPE = Recipe(sequences=32, sequence_length=64, microbatches=8)
ALONE = Layout(pp=4)


def plan(tiny: ModelShape, cluster: Cluster, *middle: Layout, guard: Verification | None = None) -> PartyPlan:
    workers = [(f"worker-{number}", layout) for number, layout in enumerate(middle, start=1)]
    return plan_parties(tiny, RECIPE, cluster, [("owner", ALONE), *workers, ("owner", ALONE)], "1f1b", guard)


def test_ranks_that_share_rows_take_half_as_long_beside_one_owner(tiny: ModelShape, cluster: Cluster) -> None:
    single, shared = plan(tiny, cluster, ALONE, ALONE), plan(tiny, cluster, *[Layout(dp=2, pp=4)] * 2)

    assert shared.parties[1].forward_s == pytest.approx(single.parties[1].forward_s / 2, rel=0.01)
    assert [party.forward_s for party in shared.parties[::3]] == [party.forward_s for party in single.parties[::3]]
    # one process has both ends, whose work no rank of others takes
    ends = sum(party.forward_s + party.backward_s for party in shared.parties[::3])
    assert RECIPE.microbatches * ends <= shared.step_s < single.step_s
    assert shared.tokens_per_s == pytest.approx(32 * 64 / shared.step_s)


def test_each_worker_has_a_layout_of_its_own(tiny: ModelShape, cluster: Cluster) -> None:
    mixed = plan(tiny, cluster, Layout(tp=2, pp=4), Layout(dp=4, pp=4, zero=2))

    assert [row["ranks"] for row in mixed.party_rows()] == [1, 2, 4, 1]
    # sums inside a block take time that shared rows do not
    assert mixed.parties[1].forward_s > 2 * mixed.parties[2].forward_s
    assert mixed.parties[1].memory_bytes < plan(tiny, cluster, ALONE, ALONE).parties[1].memory_bytes


def test_a_guard_adds_audits_to_the_step_and_a_shadow_to_the_memory(tiny: ModelShape, cluster: Cluster) -> None:
    layouts = (Layout(dp=2, pp=4), Layout(dp=2, pp=4))

    free, guarded = plan(tiny, cluster, *layouts), plan(tiny, cluster, *layouts, guard=Verification(0.5))

    assert guarded.step_s > free.step_s
    assert guarded.parties[1].memory_bytes > free.parties[1].memory_bytes
    assert guarded.parties[0].memory_bytes == free.parties[0].memory_bytes


def test_shared_moments_take_less_memory_of_each_rank(tiny: ModelShape, cluster: Cluster) -> None:
    whole, shared = (plan(tiny, cluster, *[Layout(dp=2, pp=4, zero=zero)] * 2).parties[1] for zero in (0, 1))

    assert shared.memory_bytes < whole.memory_bytes


@pytest.mark.parametrize(
    ("layout", "words"),
    [(Layout(tp=3, pp=4), "worker-2: tp=3 does not divide 8 attention heads"), (Layout(dp=3, pp=4), "worker-2: dp=3")],
)
def test_a_layout_that_cannot_train_the_model_is_refused_by_its_party(
    tiny: ModelShape, cluster: Cluster, layout: Layout, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(tiny, cluster, ALONE, layout)


def test_parties_need_a_stage_between_the_owners(tiny: ModelShape, cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="found 2 stages"):
        plan_parties(tiny, RECIPE, cluster, [("owner", Layout(pp=2))] * 2, "1f1b", None)
