"""What workers are told of an audit log: enough to miss lines, too little to see a suspicion."""

import pytest

from phalanx.errors import CutLogError, SignatureError
from phalanx.security.audit import AuditLog, PublicEntries, PublicHead
from phalanx.security.audit import public_head as module
from phalanx.security.audit.public_head import PublicEntry
from phalanx.security.crypto import Identity

RUN = "ab" * 16
OWNER = Identity.without_certificate("owner")


def lines(*digests, forced=0, run=RUN, owner=OWNER):
    found = PublicEntries(owner, run)
    for digest in digests:
        found.count_entry("step", digest * 64)
    found.note_forced(forced)
    return found


@pytest.fixture
def log(tmp_path):
    with AuditLog(tmp_path / "events.jsonl", OWNER, RUN) as found:
        yield found


def test_a_log_that_goes_on_has_every_head_that_was_told_of_it():
    log = lines("1")
    told = [log.signed_public_head()]
    for digest in "234":
        log.count_entry("step", digest * 64)
        told.append(log.signed_public_head())

    for head in told:
        log.check_known_head(head, "worker-1")


@pytest.mark.parametrize("kept", range(4))
def test_lines_that_were_cut_off_are_missed(kept):
    told = lines(*"1234").signed_public_head()

    with pytest.raises(CutLogError, match=f"has {kept} of the 4 lines .* that worker-1 knows of"):
        lines(*"1234"[:kept]).check_known_head(told, "worker-1")


def test_a_line_that_was_exchanged_is_missed_however_long_the_log_is():
    told = lines(*"123").signed_public_head()

    with pytest.raises(CutLogError, match="another line than worker-1 knows as number 3"):
        lines(*"12999").check_known_head(told, "worker-1")


def test_after_another_boot_only_lines_that_were_on_the_disk_must_be_there(monkeypatch):
    told = lines(*"1234", forced=2).signed_public_head()
    monkeypatch.setattr(module, "boot_name", lambda: "another boot")

    lines(*"12").check_known_head(told, "worker-1")
    lines(*"1299").check_known_head(told, "worker-1")
    with pytest.raises(CutLogError, match="has 1 of the 2 lines"):
        lines("1").check_known_head(told, "worker-1")
    with pytest.raises(CutLogError, match="another line"):
        lines(*"1999").check_known_head(told, "worker-1")


def test_where_the_system_names_no_boot_nothing_counts_but_what_was_on_the_disk(monkeypatch):
    monkeypatch.setattr(module, "boot_name", lambda: None)
    told = lines(*"12", forced=1).signed_public_head()

    assert told.boot is None
    lines("1").check_known_head(told, "worker-1")


def test_a_log_of_which_nothing_was_ever_on_the_disk_may_be_lost_with_the_machine(monkeypatch):
    told = lines(*"12").signed_public_head()
    monkeypatch.setattr(module, "boot_name", lambda: "another boot")

    assert told.forced is None
    lines().check_known_head(told, "worker-1")


@pytest.mark.parametrize(
    "change",
    [
        {"run": "cd" * 16},
        {"last": PublicEntry(number=5, digest="3" * 64)},
        {"last": PublicEntry(number=3, digest="4" * 64)},
        {"forced": None},
        {"forced": PublicEntry(number=2, digest="3" * 64)},
        {"boot": None},
        {"boot": "5" * 64},
        {"signature": "0" * 128},
    ],
)
def test_every_field_is_signed(change):
    told = lines(*"123", forced=1).signed_public_head()
    told.check_owner_signature(OWNER.public)

    with pytest.raises(SignatureError):
        told.model_copy(update=change).check_owner_signature(OWNER.public)
    with pytest.raises(SignatureError):
        told.check_owner_signature(Identity.without_certificate("owner").public)


def test_a_log_without_a_public_line_tells_nothing():
    assert lines().signed_public_head() is None


def test_the_name_of_the_boot_is_told_to_nobody_and_says_nothing_across_runs():
    here, there = lines("1").signed_public_head(), lines("1", run="cd" * 16).signed_public_head()

    assert module.boot_name() not in here.model_dump_json()
    assert here.boot != there.boot


def test_what_the_guard_suspects_is_not_counted(log):
    log.append_event("run_started", {})
    log.append_event("step", {})
    before = log.public_entries.signed_public_head()

    for kind in ("drift", "alarm", "gradient_doubted", "screen_hit", "refused", "fault", "dismissed"):
        log.append_event(kind, {"party": "worker-1"})

    assert log.public_entries.signed_public_head() == before


@pytest.mark.parametrize("kind", sorted(module.PUBLIC_KINDS))
def test_what_everybody_sees_anyway_is_counted(log, kind):
    log.append_event(kind, {})

    assert log.public_entries.signed_public_head().last == PublicEntry(number=1, digest=log.current_head.digest)


def test_lines_are_on_the_disk_after_a_sync_and_after_reopening(log, tmp_path):
    log.append_event("run_started", {})
    assert log.public_entries.signed_public_head().forced is None
    log.sync_events()
    log.append_event("evicted", {})

    head = log.public_entries.signed_public_head()
    assert (head.forced.number, head.last.number) == (1, 2)
    log.close()
    with AuditLog(tmp_path / "events.jsonl", OWNER, RUN) as again:
        assert (
            again.public_entries.signed_public_head().forced
            == again.public_entries.signed_public_head().last
            == head.last
        )


def test_a_head_is_signed_once_until_the_log_has_news():
    log = lines("1")

    assert log.signed_public_head() is log.signed_public_head()


def test_a_head_survives_its_json():
    told = lines(*"12", forced=1).signed_public_head()

    assert PublicHead.model_validate_json(told.model_dump_json()) == told
