"""Every layout gives the loss curve of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_layouts import COMPILED, FAST, FURTHER, LARGE, MIXTURES, PLANNED, RING, SECOND, SLOW

from machine_patience import patience_s
from phalanx.planner.model.families import FAMILIES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATIENCE_S = 880.0
PATIENT_S = 3600
"""Of a test; the first of a table plays all of it, on a busy machine many times longer."""


def run_table(name, home):
    """Play one table in one set of rank processes; the results lie in `home`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(HERE / "rank_player.py"), name, str(home)]
    with (home / "log").open("wb") as log:
        subprocess.run(command, check=True, env=environment, timeout=patience_s(PATIENCE_S), stdout=log, stderr=log)
    return home


@pytest.fixture(scope="session")
def fast(tmp_path_factory):
    return run_table("fast", tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="session")
def second(tmp_path_factory):
    return run_table("second", tmp_path_factory.mktemp("second"))


@pytest.fixture(scope="session")
def slow(tmp_path_factory):
    return run_table("slow", tmp_path_factory.mktemp("slow"))


@pytest.fixture(scope="session")
def ring(tmp_path_factory):
    return run_table("ring", tmp_path_factory.mktemp("ring"))


@pytest.fixture(scope="session")
def planned(tmp_path_factory):
    return run_table("planned", tmp_path_factory.mktemp("planned"))


@pytest.fixture(scope="session")
def further(tmp_path_factory):
    return run_table("further", tmp_path_factory.mktemp("further"))


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory):
    return run_table("mixtures", tmp_path_factory.mktemp("mixtures"))


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    return run_table("large", tmp_path_factory.mktemp("large"))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return run_table("compiled", tmp_path_factory.mktemp("compiled"))


def result_of(home, table, case):
    texts = [path.read_text() for path in sorted(home.glob(f"result-{table.index(case)}-*.json"))]
    errors = [text for text in texts if "error" in text]
    assert not errors, errors[0].replace("\\n", "\n")
    return json.loads((home / f"result-{table.index(case)}-0.json").read_text())


def largest_differences(expected, found):
    """Of the loss and of the gradient's norm, relative."""
    return [
        max(abs(mine[n] - theirs[n]) / abs(theirs[n]) for mine, theirs in zip(found, expected, strict=True))
        for n in (0, 1)
    ]


def check(home, table, case):
    result = result_of(home, table, case)
    found = result["curve"]

    expected = json.loads((home / "references.json").read_text())[case.model][-len(found) :]
    loss, norm = largest_differences(expected, found)

    assert len(found) == (case.steps // 2 if case.loads else case.steps)
    if case.rounds or case.rounds_movements:
        # the numbers of a process that rounds the same pieces; float64 sums of them are made in another order
        assert max(loss, norm) <= 1e-12
    else:
        assert loss <= (1e-6 if case.attends != "causal" else case.allowed)
        # what is lossy on purpose must differ, or it does nothing
        assert norm <= 1e-4 if case.allowed == 1e-5 else loss > 1e-7
    if case.rounds:
        check_reach(expected)
    # a copy that travels while a step is made is of the moment before that step
    assert result["beside"] is True
    if not case.loads:
        # two batches take turns
        assert sum(loss for loss, _ in found[-2:]) < case.falls_to * sum(loss for loss, _ in found[:2])


def check_reach(expected):
    """The loss of each step is that of exact weights, but for what half a unit of each weight can do to first order."""
    moved = [(abs(rounded - exact), reach) for rounded, _, exact, reach in expected]
    assert all(distance <= reach for distance, reach in moved)
    # it does something
    assert max(distance for distance, _ in moved) > 1e-5


@pytest.mark.parametrize("case", FAST, ids=[case.name for case in FAST])
def test_a_layout_gives_the_curve_of_one_process(fast, case):
    check(fast, FAST, case)


@pytest.mark.slow
@pytest.mark.timeout(PATIENT_S)
@pytest.mark.xdist_group("second layouts")
@pytest.mark.parametrize("case", SECOND, ids=[case.name for case in SECOND])
def test_a_further_layout_gives_the_curve_of_one_process(second, case):
    check(second, SECOND, case)


def check_goes_on(home, table, name):
    (saved,) = [case for case in table if case.saves == name]
    (loaded,) = [case for case in table if case.loads == name]

    before, after = result_of(home, table, saved), result_of(home, table, loaded)

    assert after["curve"] == before["curve"][saved.steps // 2 :]
    assert after["held_out"] == before["held_out"]


@pytest.mark.slow
@pytest.mark.timeout(PATIENT_S)
@pytest.mark.xdist_group("second layouts")
@pytest.mark.parametrize("name", ["copies", "islands", "bytes"])
def test_copies_and_islands_go_on_from_what_was_saved_bit_for_bit(second, name):
    check_goes_on(second, SECOND, name)


@pytest.mark.slow
@pytest.mark.timeout(PATIENT_S)
@pytest.mark.xdist_group("second layouts")
def test_copies_that_exchange_bytes_go_on_from_what_was_saved_bit_for_bit(second):
    check_goes_on(second, SECOND, "rounded")


@pytest.mark.slow
@pytest.mark.timeout(PATIENT_S)
@pytest.mark.xdist_group("compiled layouts")
@pytest.mark.parametrize("case", COMPILED, ids=[case.name for case in COMPILED])
def test_compiled_blocks_give_the_curve_of_one_process(compiled, case):
    check(compiled, COMPILED, case)


@pytest.mark.slow
@pytest.mark.timeout(PATIENT_S)
@pytest.mark.xdist_group("slow layouts")
@pytest.mark.parametrize("case", SLOW, ids=[case.name for case in SLOW])
def test_another_layout_gives_the_curve_of_one_process(slow, case):
    check(slow, SLOW, case)


@pytest.mark.slow
@pytest.mark.timeout(PATIENT_S)
@pytest.mark.xdist_group("slow layouts")
def test_held_out_batches_give_all_layouts_the_same_loss(slow):
    alike = [case for case in SLOW if case.model == "gpt2 64 sgd" and case.precision == "fp32"]

    found = [result_of(slow, SLOW, case)["held_out"] for case in alike]

    assert len(found) > 10
    assert {targets for _, targets in found} == {8 * 16 - 5 - 7}
    assert max(loss for loss, _ in found) == pytest.approx(min(loss for loss, _ in found), rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(PATIENT_S)
@pytest.mark.xdist_group("planned layouts")
@pytest.mark.parametrize("case", PLANNED, ids=[case.name for case in PLANNED])
def test_a_family_cut_by_its_plan_gives_the_curve_of_one_process(planned, case):
    check(planned, PLANNED, case)


@pytest.mark.slow
@pytest.mark.timeout(PATIENT_S)
@pytest.mark.xdist_group("further layouts")
@pytest.mark.parametrize("case", FURTHER, ids=[case.name for case in FURTHER])
def test_experts_encoders_and_side_by_side_give_the_curve_of_one_process(further, case):
    check(further, FURTHER, case)


@pytest.mark.slow
@pytest.mark.timeout(PATIENT_S)
@pytest.mark.xdist_group("layouts of mixtures")
@pytest.mark.parametrize("case", MIXTURES, ids=[case.name for case in MIXTURES])
def test_shared_experts_and_losses_of_routers_give_the_curve_of_one_process(mixtures, case):
    check(mixtures, MIXTURES, case)


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_every_family_whose_blocks_ranks_share_is_compared_with_one_rank(axis):
    compared = {
        case.family
        for case in [*FAST, *SECOND, *SLOW, *RING, *PLANNED, *FURTHER, *MIXTURES]
        if case.parallel.get(axis, 1) > 1
    }

    assert compared >= {name for name, facts in FAMILIES.items() if axis in facts.shared_axes}


@pytest.mark.slow
@pytest.mark.timeout(PATIENT_S)
@pytest.mark.xdist_group("ring layouts")
@pytest.mark.parametrize("case", RING, ids=[case.name for case in RING])
def test_a_ring_gives_the_curve_of_one_process(ring, case):
    check(ring, RING, case)


@pytest.mark.slow
@pytest.mark.timeout(PATIENT_S)
@pytest.mark.xdist_group("large layouts")
@pytest.mark.parametrize("case", LARGE, ids=[case.name for case in LARGE])
def test_eight_ranks_give_the_curve_of_one_process(large, case):
    check(large, LARGE, case)
