"""A run that is resumed draws its audits anew: a real owner and real workers, killed and started again."""

import json

import pytest
from real_runs import events

from phalanx.pipeline import AuditDraw, GuardConfig

STEPS = ("train.steps=12", "checkpoint.every=0")


@pytest.fixture
def resumed(place):
    """A run that was killed before its first checkpoint, and does all its steps again."""
    owner = place.train(*STEPS)
    place.wait_for(owner, lambda: place.has_line("metrics.jsonl", '"step": 4,'))
    owner.kill()
    process = place.train(*STEPS, resume=True)
    assert process.wait() == 0, process.text
    assert place.summary()["resumed_from"] == 0
    return process


# in one process `test_session_draws.py` has the draws and `test_log_heads.py` the nonces of two sessions quickly
@pytest.mark.slow
def test_each_session_logs_a_nonce_of_its_own_under_one_commitment_and_says_so(place, resumed):
    (_, started), (_, again) = events(place, "run_started", "run_resumed")

    assert started["audit_key_commitment"] == again["audit_key_commitment"]
    nonces = [bytes.fromhex(body["audit_nonce"]) for body in (started, again)]
    ((_, told),) = events(place, "audit_key_revealed")
    key = bytes.fromhex(told["key"])
    one, two = (AuditDraw.from_guard(key, nonce, GuardConfig(audit_rate=0.25)) for nonce in nonces)
    assert one.key_commitment == started["audit_key_commitment"]
    places = [
        {"step": step, "epoch": 0, "stage": stage, "num_microbatches": 4} for step in range(12) for stage in (1, 2)
    ]
    # alike by chance once in 4^24 runs
    assert [one.draw_microbatches(**where) for where in places] != [two.draw_microbatches(**where) for where in places]
    assert "audits are drawn from a new key from here on" in resumed.text


def test_an_unguarded_run_has_no_nonce(place):
    place.finish("guard.mode='off'", "train.steps=1")

    ((_, body),) = events(place, "run_started")
    assert (body["audit_key_commitment"], body["audit_nonce"]) == (None, None)
    assert json.loads((place.path / "run" / "summary.json").read_text())["status"] == "completed"
