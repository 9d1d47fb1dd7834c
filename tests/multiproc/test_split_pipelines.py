"""A split with a pipeline as users start it: clients, an enclave that owns stages, and untrusted workers."""

import json
import os
import signal

import pytest
from real_runs import TINY, descendant, end_all, events, exists, make_place, worker_pid

from phalanx.errors import EvidenceError
from phalanx.pipeline.evidence.explain import explain_evidence

pytestmark = pytest.mark.slow
SPLIT = """
[model.adapter]
rank = 2

[split]
cut = 1
clients = 2
allow_insecure_sim = true
"""
MIDDLE = """workers_see_hidden_states = true

[pipeline]
stages = 4
step_timeout_s = 60.0

[guard]
audit_rate = 0.25
# without the audits that a coin or a statistic decides: two runs then have as many
keep_states = 0
step_audit_rate = 0.0
owner_audit_rate = 0.0
gradient_screen = false
"""
REST = """
[split.release]
min_clients = 2
clip_norm = 100.0

[checkpoint]
every = 3
"""
LIAR = ("attack.kind='forward_sign_flip'", "attack.stages=[1]", "attack.from_step=4")


def run_file(middle):
    text = TINY[: TINY.index("[pipeline]")].replace("n_layer = 4", "n_layer = 5").replace("steps = 8", "steps = 14")
    return text.replace("[data]", f"{SPLIT}{middle}{REST}\n[data]")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A place with an honest run that has both, in `run`, and one without the pipeline, in `alone`."""
    place = make_place(tmp_path_factory.mktemp("undisturbed"))
    try:
        place.run_file.write_text(run_file(MIDDLE))
        place.finish()
        place.run_file.write_text(run_file(""))
        place.finish(run_dir="alone")
        yield place
    finally:
        end_all(place)


@pytest.fixture
def joined(place):
    """A place with a run file that has both."""
    place.run_file.write_text(run_file(MIDDLE))
    return place


def lines_of(place, run_dir="run"):
    return [json.loads(line) for line in (place.path / run_dir / "metrics.jsonl").read_text().splitlines()]


def losses_of(place, run_dir="run"):
    return [line["loss"] for line in lines_of(place, run_dir)]


def test_losses_are_those_of_the_enclave_alone_and_no_party_is_blamed(undisturbed):
    summary, alone = undisturbed.summary(), undisturbed.summary("alone")

    assert losses_of(undisturbed) == pytest.approx(losses_of(undisturbed, "alone"), rel=1e-6)
    batches = [[line["batch"] for line in lines_of(undisturbed, where)] for where in ("run", "alone")]
    assert batches[0] == batches[1]
    for name in ("validation_perplexity_first", "validation_perplexity"):
        assert summary[name] == pytest.approx(alone[name], rel=1e-6)
    assert (summary["verdicts"], summary["evicted"], summary["lost"], summary["takeovers"]) == ([], [], [], 0)
    assert summary["audits"] > 0 and summary["in_doubt"] is False
    assert (alone["audits"], alone["split"].get("workers_see")) == (0, None)


def test_what_workers_see_is_said_in_terminal_summary_and_report_and_both_logs_hold(undisturbed):
    summary, text = undisturbed.summary(), undisturbed.processes[0].text

    said = "text can be reconstructed from these"
    assert said in " ".join(text.split())
    assert said in summary["split"]["workers_see"]
    assert said in (undisturbed.path / "run" / "report.html").read_text()
    assert summary["world"] == {"processes": 4, "stages": 5, "clients": 2}
    proves = {"run": "signs its own log", "run/middle": "14 of 14 steps: each drawn audit was drawn again"}
    for log, words in proves.items():
        process = undisturbed.start("audit", "verify", str(undisturbed.path / log))
        assert process.wait() == 0, process.text
        assert words in " ".join(process.text.split())


def test_a_liar_in_the_middle_is_convicted_and_no_bit_of_the_weights_is_lost(joined, undisturbed):
    summary = joined.finish(*LIAR)

    (verdict,) = summary["verdicts"]
    assert (verdict["party"], verdict["stage"], verdict["step"], verdict["offence"]) == ("worker-1", 1, 4, "message")
    assert (summary["evicted"], summary["detections"], summary["false_accusations"]) == (["worker-1"], 1, 0)
    assert summary["final_weights_digest"] == undisturbed.summary()["final_weights_digest"]
    assert losses_of(joined) == losses_of(undisturbed)
    ((_, told),) = events(joined, "verdict")
    evidence, keys = joined.path / "run" / told["evidence"], joined.path / "run"
    facts = explain_evidence(evidence, keys / "middle" / "pki" / "authority.pem")
    assert facts["verdict"] == "worker-1 is guilty: message"
    with pytest.raises(EvidenceError):
        # the authority of the clients has not certified workers
        explain_evidence(evidence, keys / "pki" / "authority.pem")


def test_a_killed_worker_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(joined, undisturbed):
    process = joined.train("pipeline.respawns=1")
    joined.wait_for(process, lambda: joined.has_line("metrics.jsonl", '"step": 4,'))

    os.kill(worker_pid(process, "worker-2"), signal.SIGKILL)

    assert process.wait() == 0, process.text
    summary = joined.summary()
    assert (summary["lost"], summary["verdicts"]) == (["worker-2"], [])
    assert summary["takeovers"] >= 1
    assert [body["party"] for _, body in events(joined, "respawned")] == ["worker-3"]
    assert summary["final_weights_digest"] == undisturbed.summary()["final_weights_digest"]


def test_the_enclave_is_killed_and_the_run_goes_on_from_its_sealed_state_with_the_same_bits(joined, undisturbed):
    process = joined.train(*LIAR)
    joined.wait_for(process, lambda: joined.has_line("metrics.jsonl", '"step": 7,'))
    enclave, worker = descendant(process, "enclave own"), worker_pid(process, "worker-2")

    os.kill(enclave, signal.SIGKILL)
    assert process.wait() == 4, process.text
    assert "the enclave ended with signal 9" in process.text
    joined.wait_until(lambda: not exists(worker))
    summary = joined.finish(*LIAR, resume=True)

    assert summary["resumed_from"] % 3 == 0 and summary["resumed_from"] >= 6
    assert summary["evicted"] == ["worker-1"]
    joined_parties = [body["party"] for _, body in events(joined, "party_joined")]
    assert joined_parties == ["worker-1", "worker-2", "worker-2"], "a convicted worker was let in again"
    assert summary["final_weights_digest"] == undisturbed.summary()["final_weights_digest"]
    assert losses_of(joined) == losses_of(undisturbed)
