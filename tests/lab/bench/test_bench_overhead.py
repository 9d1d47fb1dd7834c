"""The overhead bench: every guard beside an unguarded arm of the same stages and microbatches."""

import json
import math
from typing import get_args

import pytest

from phalanx.errors import TrainingError
from phalanx.lab.bench import BENCHES
from phalanx.lab.bench.measure.process_clock import peak_memory_bytes
from phalanx.lab.bench.overhead.arm import Block, Report
from phalanx.lab.bench.overhead.overhead import measure_overhead
from phalanx.lab.bench.overhead.overhead_arms import (
    EIGHTH,
    PAPER,
    UNGUARDED,
    WITH_OWNER,
    InterleavedGuards,
    overhead_shifts,
)
from phalanx.lab.bench.overhead.overhead_rows import RunShape, extrapolate_rows, overhead_rows
from phalanx.lab.bench.overhead.rows import PARTS, ArmMeasurement
from phalanx.models import LoraConfig
from phalanx.pipeline import GuardConfig
from phalanx.planner.model.read import shape_of
from phalanx.train import PipelineRun

LIGHT = GuardConfig(audit_rate=0.5, owner_audit_rate=0.0)
KEYS = {
    "mode",
    "q",
    "p",
    "K",
    "M",
    "shadow",
    "extra_compute",
    "extra_bytes",
    "extra_memory",
    "extra_wall",
    "recovery_s",
}
LAYOUT = RunShape(model="tiny", stages=4, microbatches=8, num_untrusted=2, untrusted_share=0.75, trained_untrusted=25)
NO_PID = 2**22 + 1


def arm(cpu_s: float, wall_s: float, size: int, audits: int = 0) -> ArmMeasurement:
    report = Report(losses=(2.0,), audits=audits, bytes_by_link={"owner>worker-1": 2 * size})
    return ArmMeasurement([Block(2, 2 * wall_s, 2 * cpu_s, report) for _ in range(3)], {})


@pytest.fixture
def rows():
    guards = {UNGUARDED: GuardConfig(mode="off"), "light": EIGHTH, "paper": PAPER}
    arms = {
        UNGUARDED: arm(1.0, 1.0, 1000),
        "light": arm(1.1, 1.2, 1150, audits=4),
        "paper": arm(1.75, 1.5, 1300, audits=32),
    }
    memory = {UNGUARDED: 100, "light": 150, "paper": 140}
    return dict(
        zip(
            guards,
            overhead_rows(guards, arms, memory, LAYOUT, {"light": Report(recovery_s=0.5, steps_redone=3)}),
            strict=True,
        )
    )


def test_every_share_is_of_the_unguarded_run(rows) -> None:
    light = rows["light"]

    assert light["extra_compute"] == pytest.approx(0.1)
    assert light["extra_wall"] == pytest.approx(0.2)
    assert light["extra_memory"] == pytest.approx(0.5)


def test_shadow_upkeep_is_told_apart_from_all_other_bytes(rows) -> None:
    # 25 trained numbers of 4 bytes reach the shadows in each step of 1,000 bytes
    assert rows["light"]["extra_bytes_shadow"] == pytest.approx(0.1)
    assert rows["light"]["extra_bytes"] == pytest.approx(0.05)
    # in lock-step no gradient is sent
    assert rows["paper"]["extra_bytes_shadow"] == 0
    assert rows["paper"]["extra_bytes"] == pytest.approx(0.3)


def test_what_each_upkeep_sends_is_known() -> None:
    arms = {UNGUARDED: arm(1.0, 1.0, 1000), "one": arm(1.1, 1.2, 1250)}
    found = {}
    for shadow in get_args(GuardConfig.model_fields["shadow"].annotation):
        guards = {UNGUARDED: GuardConfig(mode="off"), "one": EIGHTH.model_copy(update={"shadow": shadow})}
        found[shadow] = overhead_rows(guards, arms, dict.fromkeys(arms, 100), LAYOUT, {})[1]["extra_bytes_shadow"]

    assert found == pytest.approx({"gradient": 0.1, "adapters": 0.1, "lockstep": 0.0})


def test_a_recovery_that_was_not_measured_is_no_figure(rows) -> None:
    assert {name: row["recovery_s"] for name, row in rows.items() if row["recovery_s"] is not None} == {"light": 0.5}
    assert [rows[name]["recovery_steps_redone"] for name in ("light", "paper")] == [3, None]


def used(cpu_s: float, audits: int, **phases: float) -> ArmMeasurement:
    """Three blocks of two steps; `phases` are CPU seconds of one step."""
    usage = {"worker-1": {name: 6 * seconds for name, seconds in phases.items()}}
    report = Report(losses=(2.0,), audits=audits, bytes_by_link={"owner>worker-1": 2000}, usage=usage)
    return ArmMeasurement([Block(2, 2.0, 2 * cpu_s, report) for _ in range(3)], {})


def test_luck_of_a_short_run_and_of_the_machine_are_taken_out_of_the_expected_cost() -> None:
    expected = LAYOUT.expected_audits(EIGHTH)
    # twice the audits that are expected, and the same work 0.05 s cheaper than it was for the unguarded arm
    guarded = used(1.1, round(4 * expected), compute=0.85, audit=0.12)
    guards = {UNGUARDED: GuardConfig(mode="off"), "light": EIGHTH}
    arms = {UNGUARDED: used(1.0, 0, compute=0.9), "light": guarded}

    bare, light = overhead_rows(guards, arms, dict.fromkeys(arms, 100), LAYOUT, {})

    assert light["extra_compute"] == pytest.approx(0.1)
    assert light["part_same_work"] == pytest.approx(-0.05)
    share = expected / light["audits_per_step"]
    assert light["extra_expected"] == pytest.approx(0.15 - 0.12 * (1 - share))
    assert bare["extra_expected"] is None


def test_the_long_bench_has_every_upkeep() -> None:
    found = {
        (shift.run.pipeline.stages, guard.shadow) for shift in overhead_shifts(quick=False) for guard in shift.guards
    }

    assert {(4, shadow) for shadow in get_args(GuardConfig.model_fields["shadow"].annotation)} <= found
    # an arm is made by copying, which checks nothing
    for shift in (*overhead_shifts(quick=True), *overhead_shifts(quick=False)):
        for guard in shift.guards:
            PipelineRun.model_validate({**dict(shift.run), "guard": guard})


def test_the_unguarded_run_has_no_shares_of_its_own(rows) -> None:
    bare = rows[UNGUARDED]

    assert bare["mode"] == UNGUARDED
    assert all(
        bare[key] is None for key in ("q", "p", "shadow", "predicted_extra_compute", *KEYS) if key.startswith("e")
    )
    assert all(row.keys() == bare.keys() >= KEYS | {f"part_{part}" for part in PARTS} for row in rows.values())


def test_the_prediction_stands_beside_the_measurement_with_its_formula(rows) -> None:
    assert rows["light"]["predicted_extra_compute"] == pytest.approx(0.75 * (0.72 / 8 + 1 / 32))
    assert rows["light"]["formula"] == "untrusted_share * (0.72 q + p)"
    assert (rows["paper"]["predicted_extra_compute"], rows["paper"]["formula"]) == (0.75, "untrusted_share")


def test_a_short_measurement_says_how_many_audits_it_should_have_had(rows) -> None:
    assert rows["light"]["audits_per_step"] == 2
    assert rows["light"]["expected_audits_per_step"] == pytest.approx(2 * (31 / 32 + 8 / 32))
    assert LAYOUT.expected_audits(WITH_OWNER) == pytest.approx(2 * (31 / 32 + 8 / 32 + 8 / 64))
    # an audit in every eighth step, and now and then a whole step of the shadow or the owner
    assert LAYOUT.expected_audits(GuardConfig(preset="economy")) == pytest.approx(2 * (255 / 256 / 8 + 16 / 256))


def test_extra_work_fits_in_the_bubble_up_to_k_minus_1_by_m() -> None:
    assert LAYOUT.bubble_share == pytest.approx(3 / 11)
    assert LAYOUT.fits_in_bubble(0.99 * 3 / 8)
    assert not LAYOUT.fits_in_bubble(1.01 * 3 / 8)


def test_every_guard_audits_at_least_one_microbatch_without_rounding_up() -> None:
    for quick in (True, False):
        for shift in overhead_shifts(quick):
            for guard in shift.guards:
                share = guard.audit_rate * shift.run.train.microbatches
                # a preset is measured as users get it: `light` draws one of eight, as it must
                is_even = guard.preset_in_force is not None or (share >= 1 and share == math.ceil(share))
                assert is_even


def test_the_long_bench_has_the_guards_of_the_goal_and_the_baseline() -> None:
    found = {
        (
            shift.model,
            shift.run.pipeline.stages,
            guard.shadow,
            guard.audit_rate,
            guard.step_audit_rate,
            guard.owner_audit_rate > 0,
        )
        for shift in overhead_shifts(quick=False)
        for guard in shift.guards
    }
    goals = {(1 / 8, 1 / 32), (1 / 16, 1 / 64), (1 / 64, 1 / 64)}

    for stages in (4, 6):
        for model in ("scratch-10m", "scratch-34m"):
            assert {(model, stages, "gradient", q, p, False) for q, p in goals} <= found
        assert ("scratch-10m", stages, "lockstep", 1.0, 0.0, False) in found
    assert ("scratch-10m", 4, "gradient", 1 / 8, 1 / 32, True) in found


def test_each_model_has_the_size_of_its_name() -> None:
    for shift in overhead_shifts(quick=False):
        parameters = shape_of(shift.run.model.architecture).num_parameters

        # "10m" is a name older than the count
        assert shift.model == {9: "scratch-10m", 34: "scratch-34m"}[round(parameters / 1e6)]


def test_what_is_extrapolated_is_marked_by_its_formula() -> None:
    rows = extrapolate_rows()

    assert {row["K"] for row in rows} >= {16, 64}
    assert all(row["M"] * row["q"] >= 1 and row["formula"] for row in rows)
    assert next(r["predicted_extra_compute"] for r in rows if r["K"] == 4) == pytest.approx(0.5 * (0.09 + 1 / 32))


def test_memory_of_a_process_that_is_not_there_is_no_figure() -> None:
    with pytest.raises(TrainingError, match=f"process {NO_PID} has ended"):
        peak_memory_bytes([NO_PID])


@pytest.mark.slow
def test_arms_are_measured_side_by_side(tiny: PipelineRun) -> None:
    shift = InterleavedGuards(
        "tiny",
        tiny,
        (LIGHT, PAPER),
        steps=2,
        rounds=2,
        warm_ups=1,
        budget_s=60,
    )

    result = json.loads(json.dumps(measure_overhead([shift], quick=True), allow_nan=False))

    bare, light, paper = result["rows"]
    assert "overhead" in BENCHES
    assert [row["mode"] for row in result["rows"]] == ["unguarded", "phalanx", "phalanx"]
    assert (light["K"], light["M"], light["shadow"], paper["shadow"]) == (4, 2, "gradient", "lockstep")
    assert bare["loss_last"] == light["loss_last"] == paper["loss_last"]
    assert light["alarms"] == paper["alarms"] == 0
    assert bare["recovery_s"] is None
    assert all(row["recovery_s"] > 0 for row in (light, paper))
    assert paper["audits_per_step"] == 4
    assert light["extra_bytes_shadow"] > 0
    assert paper["extra_bytes"] > 0
    assert all(row["memory_bytes"] > 2**20 and row["cpu_s_per_step"] > 0 for row in result["rows"])


@pytest.mark.slow
def test_adapters_are_measured_against_a_run_that_trains_adapters(tiny: PipelineRun) -> None:
    pytest.importorskip("peft")
    adapted = tiny.model_copy(update={"model": tiny.model.model_copy(update={"adapter": LoraConfig(rank=2)})})
    guard = LIGHT.model_copy(update={"shadow": "adapters"})

    bare, row = measure_overhead(
        [InterleavedGuards("tiny", adapted, (guard,), steps=2, rounds=1, warm_ups=1, budget_s=60)], quick=True
    )["rows"]

    assert (row["shadow"], row["alarms"], row["loss_last"]) == ("adapters", 0, bare["loss_last"])
    assert row["recovery_s"] > 0
