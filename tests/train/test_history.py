"""Convictions are read from the signed log, and from nothing else."""

import pytest

from phalanx.errors import AuditLogError
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.train.records.history import RunHistory, read_history

VERDICT = {"party": "worker-1", "stage": 1, "step": 5, "offence": "message", "reason": "a wrong tensor"}


@pytest.fixture(scope="module")
def owner(tmp_path_factory):
    directory = tmp_path_factory.mktemp("keys") / "pki"
    create_authority(directory)
    return load_identity(issue_certificate(directory, "owner"))


@pytest.fixture
def write(owner, tmp_path):
    def write(*events):
        with AuditLog(tmp_path / "events.jsonl", owner, "run") as log:
            for kind, body in events:
                log.append_event(kind, body)
        return read_history(tmp_path / "events.jsonl", owner.public, "run")

    return write


def test_a_run_without_a_log_has_no_history(owner, tmp_path):
    assert read_history(tmp_path / "events.jsonl", owner.public, "run") == RunHistory()


def test_whoever_is_convicted_in_a_later_life_stays_out_under_its_own_name(write):
    history = write(("evicted", {"party": "worker-1.3", "stages": [1], "step": 5}))

    assert history.convicted == {"worker-1"}


def test_a_verdict_convicts_even_when_the_crash_came_before_the_eviction(write):
    history = write(("run_started", {}), ("verdict", VERDICT))

    assert history.convicted == {"worker-1"}
    assert history.decisions == [("verdict", VERDICT)]


def test_a_worker_that_lied_about_a_text_is_no_party_of_stages_and_is_not_forgotten(write):
    history = write(("rollout_verdict", {"party": "north"}), ("rollout_dismissal", {"party": "south"}))

    assert (history.convicted_writers, history.convicted) == ({"north"}, set())


def test_a_party_that_was_lost_is_not_convicted(write):
    history = write(("lost", {"party": "worker-2", "step": 3}))

    assert history.convicted == set()
    assert [kind for kind, _ in history.decisions] == ["lost"]


def test_a_run_that_went_on_after_its_end_has_not_ended(write):
    ended = write(("run_completed", {"final_weights_digest": "ab"}))
    going_on = write(("run_resumed", {"step": 6}))

    assert (ended.final_weights_digest, going_on.final_weights_digest) == ("ab", None)


@pytest.mark.parametrize(
    "change",
    [{"status": "failed"}, {"final_weights_digest": "cd"}, {"final_weights_digest": None}, {"audit_log_head": None}],
)
def test_only_a_summary_of_this_very_end_tells_it(write, change):
    history = write(("run_started", {}), ("run_completed", {"final_weights_digest": "ab"}))
    head = {"num_events": history.head.num_events, "digest": history.head.digest}
    summary = {"status": "completed", "final_weights_digest": "ab", "audit_log_head": head}

    assert history.matches_summary(summary)
    assert not history.matches_summary({**summary, **change})
    assert not history.matches_summary({})


def test_a_line_by_somebody_else_is_refused(write, owner, tmp_path):
    write(("verdict", VERDICT))
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes().replace(b"worker-1", b"worker-2"))

    with pytest.raises(AuditLogError, match="line 1"):
        read_history(path, owner.public, "run")


def test_a_verdict_that_names_nobody_is_refused(write):
    with pytest.raises(AuditLogError, match="party"):
        write(("verdict", {"step": 3}))
