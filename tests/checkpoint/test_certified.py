"""What the audit log says about checkpoints refuses what a signature alone would accept."""

import pytest

from phalanx.checkpoint import CertifiedCheckpoints
from phalanx.errors import CheckpointError


@pytest.fixture
def certified():
    record = CertifiedCheckpoints()
    for step, kept in ((10, [10]), (20, [10, 20]), (30, [20, 30])):
        record.follow_event("checkpoint", {"step": step})
        record.follow_event("checkpoint_saved", {"step": step, "manifest": f"digest-{step}", "kept": kept})
    return record


def test_the_newest_one_of_the_log_is_accepted(certified):
    certified.check_newest(30, "digest-30", "checkpoints")


@pytest.mark.parametrize(
    ("step", "manifest", "said"),
    [
        (20, "digest-20", "rolled back: the newest is of step 20, the audit log has one of step 30"),
        (None, None, "rolled back: none exists, the audit log has one of step 30"),
        (30, "digest-of-an-earlier-attempt", "swapped: the manifest of step 30"),
        (40, "digest-40", "foreign: the audit log lists no checkpoint of step 40"),
    ],
)
def test_anything_else_is_refused_by_name(certified, step, manifest, said):
    with pytest.raises(CheckpointError, match=said):
        certified.check_newest(step, manifest, "checkpoints")


def test_one_that_a_crash_cut_off_from_its_event_is_accepted(certified):
    certified.follow_event("checkpoint", {"step": 40})

    certified.check_newest(40, "digest-40", "checkpoints")


def test_what_a_rollback_undid_is_no_longer_expected_but_what_was_there_before_is(certified):
    certified.follow_event("rolled_back", {"to": 25})

    certified.check_newest(20, "digest-20", "checkpoints")
    with pytest.raises(CheckpointError, match="rolled back: none"):
        certified.check_newest(None, None, "checkpoints")


def test_what_was_pruned_before_a_rollback_is_not_expected_back(certified):
    certified.follow_event("rolled_back", {"to": 15})

    certified.check_newest(None, None, "checkpoints")


def test_an_older_one_is_accepted_once_its_user_said_so(certified):
    certified.follow_event("older_accepted", {"step": 20})

    certified.check_newest(20, "digest-20", "checkpoints")


def test_a_run_without_such_events_accepts_what_it_finds():
    CertifiedCheckpoints().check_newest(7, "digest", "checkpoints")
    CertifiedCheckpoints().check_newest(None, None, "checkpoints")
