"""A party that lies is caught in its first step, named and replaced; the weights are those of an honest run."""

import os
from pathlib import Path

import pytest
from real_runs import FORWARD_LIAR, peak_bytes, worker_pid

from phalanx.models import open_model
from phalanx.security.audit import LogHead, verify_log
from phalanx.security.crypto import load_identity
from phalanx.telemetry import read_metrics
from phalanx.train import load_run
from phalanx.train.setup.stage_table import estimate_stages, memory_by_party


def assert_named(summary, party="worker-1"):
    assert summary["evicted"] == [party]
    assert {verdict["party"] for verdict in summary["verdicts"]} == {party}
    assert summary["detections"] == summary["attacks_injected"] == 1
    assert (summary["false_accusations"], summary["steps_lost"], summary["status"]) == (0, 0, "completed")
    assert summary["takeovers"] >= 1


def test_a_forward_liar_is_evicted_and_leaves_no_trace_in_the_weights(place, clean):
    summary = place.finish(*FORWARD_LIAR)

    assert_named(summary)
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    lines = read_metrics(place.path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["attacked"]] == [4]
    assert [line["step"] for line in lines if line["repaired"]] == [4]
    owner = load_identity(place.path / "run" / "pki" / "owner").public
    kinds = verify_log(place.path / "run" / "events.jsonl", owner, LogHead(**summary["audit_log_head"])).kinds
    assert (kinds["verdict"], kinds["evicted"], kinds["run_completed"]) == (1, 1, 1)
    assert (place.path / "run" / "report.html").stat().st_size > 1000


# the run without a network in `test_no_network.py` is the quick one of this kind
@pytest.mark.slow
def test_the_same_run_twice_has_the_same_bits(place, clean):
    again = place.finish()

    assert again["final_weights_digest"] == clean["final_weights_digest"]
    assert (again["evicted"], again["false_accusations"], again["takeovers"]) == ([], 0, 0)
    assert again["audits"] == clean["audits"] > 0


# in one process `test_lying_stages.py` has the quick one of this kind
@pytest.mark.slow
def test_without_a_guard_the_lie_goes_into_the_weights(place, clean):
    summary = place.finish(*FORWARD_LIAR, "guard.mode='off'")

    assert summary["final_weights_digest"] != clean["final_weights_digest"]
    assert (summary["status"], summary["detections"], summary["evicted"]) == ("completed", 0, [])
    assert summary["attacks_injected"] == 4


@pytest.mark.slow
def test_another_schedule_kernel_and_upkeep_change_no_bit_under_attack(place, clean):
    summary = place.finish(
        *FORWARD_LIAR,
        "pipeline.schedule='gpipe'",
        "guard.shadow='lockstep'",
        "model.activation_checkpointing=true",
        "guard.audit_rate=1.0",
    )

    assert_named(summary)
    assert summary["final_weights_digest"] == clean["final_weights_digest"]


@pytest.mark.slow
def test_the_memory_that_a_dry_run_promises_is_of_the_right_order(place):
    process = place.train("train.steps=400", "train.validate_every=0", "checkpoint.every=0")
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 20,'))
    run = load_run(place.run_file)
    source = open_model(run.model, Path(os.environ["PHALANX_CACHE"]) / "models", run.train.seed)
    expected = memory_by_party(estimate_stages(run, source))

    used = {"owner": peak_bytes(process.popen.pid)}
    used |= {name: peak_bytes(worker_pid(process, name)) for name in ("worker-1", "worker-2")}

    assert used.keys() == expected.keys()
    assert {name: size for name, size in used.items() if not expected[name] / 2 < size < expected[name] * 2} == {}


@pytest.mark.slow
def test_a_backward_liar_is_evicted_and_leaves_no_trace_in_the_weights(place, clean):
    summary = place.finish(*FORWARD_LIAR, "attack.kind='backward_gaussian'", "attack.stages=[2]")

    assert_named(summary, "worker-2")
    assert summary["final_weights_digest"] == clean["final_weights_digest"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["equivocation", "skipped_update", "lazy_bf16"])
def test_attackers_of_the_simulator_are_the_same_in_real_processes(place, clean, kind):
    summary = place.finish(*FORWARD_LIAR, f"attack.kind='{kind}'")

    assert_named(summary)
    assert summary["final_weights_digest"] == clean["final_weights_digest"]


@pytest.mark.slow
def test_two_liars_are_both_evicted_and_the_owner_serves_what_is_left(place, clean):
    summary = place.finish(*FORWARD_LIAR, "attack.stages=[1,2]")

    assert sorted(summary["evicted"]) == ["worker-1", "worker-2"]
    assert (summary["false_accusations"], summary["steps_lost"]) == (0, 0)
    assert summary["final_weights_digest"] == clean["final_weights_digest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["model.adapter={rank=4,dropout=0.1}"], id="lora"),
        pytest.param(["train.precision='bf16'"], id="bf16"),
        pytest.param(["model.architecture.resid_pdrop=0.1", "model.architecture.attn_pdrop=0.1"], id="dropout"),
        pytest.param(["pipeline.stages=3"], id="three stages"),
        pytest.param(["pipeline.spares=1"], id="a spare"),
        pytest.param(["guard.shadow='lockstep'"], id="lockstep"),
    ],
)
def test_whatever_is_trained_a_takeover_changes_no_bit(place, overrides):
    honest = place.finish(*overrides, run_dir="honest")
    attacked = place.finish(*overrides, *FORWARD_LIAR)

    assert_named(attacked)
    assert attacked["final_weights_digest"] == honest["final_weights_digest"]
    assert honest["loss_last"] < honest["loss_first"]


@pytest.mark.slow
def test_who_withholds_every_tensor_is_given_up_before_the_steps_time_is_up(place, clean):
    """Attacker: a worker that answers every question; a step with all its silences would take longer than it may."""
    withholds = ("attack.kind='withholding'", "attack.stages=[1]", "attack.rate=1.0", "attack.strength=1.0")
    # 2 M silences would take 16 s at least
    times = ("pipeline.patience_s=2.0", "pipeline.step_timeout_s=15.0", "attack.from_step=4")

    summary = place.finish(*withholds, *times)

    assert (summary["status"], summary["lost"]) == ("completed", ["worker-1"])
    assert [(row["party"], row["cause"]) for row in summary["replaced"]] == [("worker-1", "silent")]
    assert (summary["verdicts"], summary["evicted"], summary["false_accusations"]) == ([], [], 0)
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
