"""Clocks that are set while a process runs."""

from datetime import UTC, datetime, timedelta

import pytest

from phalanx.security.audit import AuditLog, verify_log
from phalanx.security.audit import log as log_module
from phalanx.security.crypto import Identity
from phalanx.security.crypto.clock import SteadyClock

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize("jump", [timedelta(days=-20_000), timedelta(hours=-1), timedelta(days=20_000)])
def test_a_steady_clock_counts_on_from_where_it_began(jump):
    wall, seconds = [NOON], [50.0]
    clock = SteadyClock(lambda: wall[0], lambda: seconds[0])

    wall[0] += jump
    seconds[0] += 90.0

    assert clock.current_time() == NOON + timedelta(seconds=90)


def test_an_audit_log_holds_although_the_time_of_day_went_backwards(tmp_path, monkeypatch):
    owner = Identity.without_certificate("owner")
    times = [NOON, NOON - timedelta(days=3000), NOON + timedelta(days=3000)]

    class Jumping(datetime):
        @classmethod
        def now(cls, tz=None):
            return times.pop(0)

    monkeypatch.setattr(log_module, "datetime", Jumping)
    with AuditLog(tmp_path / "events.jsonl", owner, "run-1") as log:
        for kind in ("run_started", "lost", "run_completed"):
            log.append_event(kind, {})

    assert verify_log(tmp_path / "events.jsonl", owner.public).num_events == 3
