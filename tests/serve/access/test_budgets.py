"""Budgets: limits hold, nothing is lost by a crash, nothing is counted twice."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from phalanx.errors import DiskError, InputError
from phalanx.serve.access import BudgetExceeded, Budgets, Caller, KeyLimits, read_usage_by_day

ALICE = Caller("a" * 12, "alice", "user", None, False)
BOB = Caller("b" * 12, "bob", "user", None, False)
START = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)
WIDE = {
    "requests_per_minute": 1000,
    "requests_per_month": 1000,
    "tokens_per_minute": 10**6,
    "tokens_per_month": 10**6,
    "concurrency": 100,
}


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def advance(self, **span) -> None:
        self.now += timedelta(**span)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budgets.jsonl"


def open_budgets(path, clock, **limits) -> Budgets:
    return Budgets(path, lambda key_id: KeyLimits(**{**WIDE, **limits}), clock)


def reserve(budgets, prompt=10, completion=20, caller=ALICE):
    reservation = budgets.begin(caller)
    try:
        reservation.reserve_tokens(prompt, completion)
    except (BudgetExceeded, DiskError):
        reservation.settle(0, 0)
        raise
    return reservation


def refusal(budgets, prompt=10, completion=20, caller=ALICE) -> tuple[str, int]:
    with pytest.raises(BudgetExceeded) as caught:
        reserve(budgets, prompt, completion, caller)
    return caught.value.limit, caught.value.retry_after_s


def used(budgets, caller=ALICE) -> tuple[int, int, int]:
    days = [usage for (key, _), usage in budgets.usage_by_day().items() if key == caller.key_id]
    return tuple(sum(getattr(day, name) for day in days) for name in ("requests", "prompt_tokens", "completion_tokens"))


def test_requests_of_a_minute_are_bounded_in_every_60_seconds(path, clock):
    budgets = open_budgets(path, clock, requests_per_minute=2)
    reserve(budgets).settle(1, 1)
    clock.advance(seconds=30)
    reserve(budgets).settle(1, 1)

    assert refusal(budgets) == ("requests_per_minute", 30)
    clock.advance(seconds=29)
    assert refusal(budgets) == ("requests_per_minute", 1)
    clock.advance(seconds=1)
    reserve(budgets)
    assert refusal(budgets) == ("requests_per_minute", 30)


def test_tokens_of_a_minute_count_what_may_be_used_until_it_is_settled(path, clock):
    budgets = open_budgets(path, clock, tokens_per_minute=100)
    first = reserve(budgets, 10, 60)

    assert refusal(budgets, 10, 30) == ("tokens_per_minute", 60)
    first.settle(10, 5)
    reserve(budgets, 10, 30)


def test_a_request_that_can_never_pass_is_refused(path, clock):
    assert refusal(open_budgets(path, clock, tokens_per_minute=29)) == ("tokens_per_minute", 60)
    assert used(open_budgets(path.with_name("other.jsonl"), clock)) == (0, 0, 0)


def test_a_month_ends_with_the_calendar_month(path, clock):
    budgets = open_budgets(path, clock, requests_per_month=1)
    reserve(budgets)
    limit, retry_after_s = refusal(budgets)

    assert limit == "requests_per_month"
    clock.advance(seconds=retry_after_s)
    assert clock.now.month == 12
    reserve(budgets)


def test_tokens_of_a_month_are_bounded_and_settled_ones_come_back(path, clock):
    budgets = open_budgets(path, clock, tokens_per_month=100)
    reserve(budgets, 50, 50).settle(10, 10)

    assert refusal(budgets, 40, 41)[0] == "tokens_per_month"
    reserve(budgets, 40, 40)


def test_concurrency_is_bounded_and_freed_however_a_request_ends(path, clock):
    budgets = open_budgets(path, clock, concurrency=1)
    with pytest.raises(ZeroDivisionError), reserve(budgets):
        assert refusal(budgets) == ("concurrency", 1)
        raise ZeroDivisionError

    reserve(budgets)
    assert used(budgets) == (2, 20, 40), "a request that did not settle has used all that was reserved"


def test_keys_do_not_share_budgets(path, clock):
    budgets = open_budgets(path, clock, requests_per_minute=1)
    reserve(budgets)

    reserve(budgets, caller=BOB)
    assert used(budgets) == used(budgets, BOB) == (1, 10, 20)


def test_a_limit_of_zero_allows_nothing(path, clock):
    for name in WIDE:
        assert refusal(open_budgets(path.with_name(name), clock, **{name: 0}))[0] == name


def test_settling_twice_counts_once_and_more_than_was_reserved_counts_in_full(path, clock):
    budgets = open_budgets(path, clock)
    reservation = reserve(budgets)

    reservation.settle(100, 200)
    reservation.settle(0, 0)

    assert used(budgets) == (1, 100, 200)


def test_negative_counts_give_nobody_a_budget(path, clock):
    budgets = open_budgets(path, clock)
    reserve(budgets, -100, -100).settle(-5, -5)

    assert used(budgets) == (1, 0, 0)


def test_a_request_counts_before_its_tokens_do_and_also_where_they_are_refused(path, clock):
    budgets = open_budgets(path, clock, tokens_per_minute=100, requests_per_minute=3)
    with budgets.begin(ALICE):
        assert used(budgets) == (1, 0, 0)

    assert refusal(budgets, 50, 51)[0] == "tokens_per_minute"
    assert used(budgets) == (2, 0, 0)
    reserve(budgets, 50, 50)
    assert refusal(budgets)[0] == "requests_per_minute"


def test_a_key_without_a_token_left_is_refused_before_anything_counts(path, clock):
    budgets = open_budgets(path, clock, tokens_per_month=30)
    reserve(budgets)

    with pytest.raises(BudgetExceeded, match="tokens_per_month"):
        budgets.begin(ALICE)
    assert used(budgets) == (1, 10, 20)


def test_tokens_that_are_reserved_a_minute_later_count_in_the_new_minute(path, clock):
    budgets = open_budgets(path, clock, tokens_per_minute=100)
    slow = budgets.begin(ALICE)
    clock.advance(seconds=70)
    slow.reserve_tokens(50, 50)

    assert refusal(budgets) == ("tokens_per_minute", 60)
    budgets.close()
    again = open_budgets(path, clock, tokens_per_minute=100)
    assert used(again) == (1, 50, 50)


def test_a_restart_forgets_nothing_and_counts_what_was_not_settled_in_full(path, clock):
    budgets = open_budgets(path, clock)
    reserve(budgets).settle(1, 2)
    reserve(budgets)
    budgets._journal._close_fd()
    os.close(budgets._journal._lock_fd)  # as a killed process leaves it

    again = open_budgets(path, clock, requests_per_minute=2)

    assert used(again) == (2, 11, 22)
    assert refusal(again)[0] == "requests_per_minute"
    again.close()
    assert {key: (day.requests, day.tokens) for key, day in read_usage_by_day(path).items()} == {
        (ALICE.key_id, "2026-11-28"): (2, 33)
    }


def test_what_is_settled_on_another_day_counts_where_it_was_reserved(path, clock):
    budgets = open_budgets(path, clock)
    reservation = reserve(budgets)
    clock.advance(days=4)
    reservation.settle(1, 1)

    assert {day: usage.tokens for (_, day), usage in budgets.usage_by_day().items()} == {"2026-11-28": 2}


def test_a_long_journal_is_written_anew_with_the_same_counts(path, clock, monkeypatch):
    monkeypatch.setattr("phalanx.serve.access.budgets._MAX_LINES", 20)
    budgets = open_budgets(path, clock)
    still_open = reserve(budgets, 7, 7)
    for _ in range(50):
        reserve(budgets).settle(1, 2)

    assert len(path.read_bytes().splitlines()) <= 21
    assert used(budgets) == (51, 57, 107)
    still_open.settle(1, 1)
    budgets.close()
    assert used(open_budgets(path, clock)) == (51, 51, 101)


def test_half_a_line_at_the_end_is_cut_off_and_any_other_damage_refused(path, clock):
    budgets = open_budgets(path, clock)
    reserve(budgets).settle(1, 1)
    budgets.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"reserved","num')

    budgets = open_budgets(path, clock)
    assert used(budgets) == (1, 1, 1)
    budgets.close()

    for damage in (b"\n", b"{}\n", b'{"kind":"settled","number":0,"prompt":-5,"completion":0}\n', b"x" * 2000):
        path.write_bytes(damage + whole)
        with pytest.raises(InputError, match="line 1"):
            open_budgets(path, clock)


def test_a_clock_that_was_set_back_gives_nobody_a_second_minute(path, clock):
    budgets = open_budgets(path, clock, requests_per_minute=1)
    reserve(budgets).settle(1, 1)
    clock.advance(minutes=-10)
    assert refusal(budgets)[0] == "requests_per_minute"
    budgets.close()

    assert refusal(open_budgets(path, clock, requests_per_minute=1)) == ("requests_per_minute", 60)


def test_a_second_server_is_refused_the_journal(path, clock):
    budgets = open_budgets(path, clock)

    with pytest.raises(DiskError, match="another server"):
        open_budgets(path, clock)
    budgets.close()
    open_budgets(path, clock).close()


def test_a_disk_that_is_full_lets_no_request_begin(path, clock, monkeypatch):
    budgets = open_budgets(path, clock)
    monkeypatch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(28, "No space left on device")))

    with pytest.raises(DiskError, match="No space left"):
        reserve(budgets)
    assert used(budgets) == (0, 0, 0)


SERVER = """
import sys
from pathlib import Path
from phalanx.serve.access import Budgets, Caller, KeyLimits
budgets = Budgets(Path(sys.argv[1]), lambda key: KeyLimits(
    requests_per_minute=10**9, requests_per_month=10**9, tokens_per_minute=10**9, tokens_per_month=10**9,
    concurrency=10000))
number = 0
while True:
    caller = Caller("ab"[number % 2] * 12, "x", "user", None, False)
    reservation = budgets.begin(caller)
    reservation.reserve_tokens(3, 4)
    if number % 3:
        reservation.settle(1, 2)
    number += 1
    print(number, number % 3, flush=True)
"""


def test_kill_9_under_load_loses_no_committed_count(path):
    total_requests = total_tokens = 0
    for stop_after in (40, 150, 301):
        with subprocess.Popen([sys.executable, "-c", SERVER, str(path)], stdout=subprocess.PIPE, text=True) as server:
            printed = [server.stdout.readline() for _ in range(stop_after)]
            os.kill(server.pid, signal.SIGKILL)
            printed += server.stdout.read().splitlines()
        numbers = [int(line.split()[0]) for line in printed if line.strip()]
        committed = len(numbers)
        total_requests += committed
        total_tokens += sum(3 if (number - 1) % 3 else 7 for number in numbers)

        counts = list(read_usage_by_day(path).values())
        requests, tokens = sum(day.requests for day in counts), sum(day.tokens for day in counts)

        # one request may have been written whose line was not printed any more
        assert total_requests <= requests <= total_requests + 1
        assert total_tokens <= tokens <= total_tokens + 7
        total_requests, total_tokens = requests, tokens


def test_the_journal_holds_ids_and_counts_alone(path, clock):
    budgets = open_budgets(path, clock)
    reserve(budgets).settle(1, 1)

    kinds = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sorted(entry) for entry in kinds] == [
        ["completion", "key", "kind", "number", "prompt", "time"],
        ["completion", "key", "kind", "number", "prompt", "time"],
        ["completion", "kind", "number", "prompt"],
    ]
    assert path.stat().st_mode & 0o077 == 0
