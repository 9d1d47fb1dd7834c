"""Budgets of keys: a request counts before anything works on it, its tokens before an engine is asked.

What was reserved is settled when the request has ended, and a crash loses no count.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from phalanx.closing import Closeable
from phalanx.errors import DiskError, InputError
from phalanx.security.crypto import steady_now
from phalanx.serve.access.budget_journal import (
    BudgetEntry,
    BudgetJournal,
    DayCount,
    MinuteCount,
    Reserved,
    Settled,
    read_entries,
)
from phalanx.serve.access.key_file import KeyLimits
from phalanx.serve.access.key_store import Caller

BUDGETS_FILE = "budgets.jsonl"
_MINUTE_S = 60
_DAYS_ON_FILE = 400
_MAX_LINES = 200_000
_BUSY_RETRY_S = 1
"""How long a client waits for one of its own requests to end."""


class BudgetExceeded(Exception):  # noqa: N818 - an answer to a client, and no fault of anybody
    """A budget of a key is used up.

    Attributes:
        limit: Name of the field of `KeyLimits` that is reached.
        retry_after_s: Whole seconds after which the same request may pass, at least 1.
    """

    def __init__(self, limit: str, retry_after_s: int) -> None:
        super().__init__(f"{limit} is reached; retry after {retry_after_s} s")
        self.limit, self.retry_after_s = limit, max(1, retry_after_s)


@dataclass
class DayUsage:
    """What a key used in one day.

    Attributes:
        prompt_tokens: Tokens of prompts; a request that is not settled counts with its maximum.
        completion_tokens: Tokens of answers, counted like `prompt_tokens`.
    """

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Of prompts and completions together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass
class _SecondUsage:
    """What a key used in one second."""

    time: int
    requests: int = 0
    tokens: int = 0


@dataclass
class _KeyUsage:
    """All counts of one key.

    Attributes:
        days: Usage by day, ``YYYY-MM-DD``.
        seconds: Usage in each second of the last minute, in order.
        num_open: Requests that are being answered.
    """

    days: dict[str, DayUsage] = field(default_factory=lambda: defaultdict(DayUsage))
    seconds: deque[_SecondUsage] = field(default_factory=deque)
    num_open: int = 0

    def second_at(self, time: int) -> _SecondUsage:
        """Return the count of one second; that of the newest one where the clock was set back."""
        if not self.seconds or self.seconds[-1].time < time:
            self.seconds.append(_SecondUsage(time))
        return self.seconds[-1]

    def drop_old_seconds(self, now: int) -> None:
        """Forget seconds that are older than a minute."""
        while self.seconds and self.seconds[0].time <= now - _MINUTE_S:
            self.seconds.popleft()

    def month_usage(self, month: str) -> tuple[int, int]:
        """Return the requests and tokens of a month, ``YYYY-MM``."""
        days = [usage for day, usage in self.days.items() if day.startswith(month)]
        return sum(usage.requests for usage in days), sum(usage.tokens for usage in days)


class Reservation:
    """The budget of one request, which counts already; use it as a context manager.

    A request that ends without `settle` has used all the tokens that were reserved.
    """

    def __init__(self, budgets: "Budgets", entry: Reserved, second: _SecondUsage) -> None:
        self.entry, self.second = entry, second
        self._budgets = budgets
        self._is_settled = False

    def reserve_tokens(self, max_prompt_tokens: int, max_completion_tokens: int) -> None:
        """Reserve the most that the request may use, once.

        Args:
            max_completion_tokens: Of all its answers together.

        Raises:
            BudgetExceeded: A limit of the key is reached; no token is counted.
            DiskError: The journal cannot be written; no token is counted.
        """
        prompt, completion = max(0, max_prompt_tokens), max(0, max_completion_tokens)
        self._budgets.raise_entry(self, self.entry.model_copy(update={"prompt": prompt, "completion": completion}))

    def settle(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the usage, which may also be more than was reserved; a second call counts nothing."""
        if not self._is_settled:
            self._is_settled = True
            prompt, completion = max(0, prompt_tokens), max(0, completion_tokens)
            settled = Settled(number=self.entry.number, prompt=prompt, completion=completion)
            self._budgets.settle_entry(self, settled)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle(self.entry.prompt, self.entry.completion)


class Budgets(Closeable):
    """The budgets of all keys, counted in one process.

    Args:
        path: File of the journal, made where missing.
        limits_of: Returns the limits of a key at present, by its id.
        now: Returns the time of day in UTC.

    Guarantees:
        Each request is in the journal before anything works on it, and its tokens before an engine does. After
        `kill -9` it counts in full where it was not settled; after a power failure the same holds for all that was
        written before the last `sync`.
        For one event loop: not safe to use from several threads.

    Raises:
        DiskError: The journal cannot be opened or written, or another server has it open.
    """

    def __init__(
        self, path: Path, limits_of: Callable[[str], KeyLimits], now: Callable[[], datetime] = steady_now
    ) -> None:
        self._limits_of, self._now = limits_of, now
        self._journal = BudgetJournal(path)
        try:
            self._keys, self._next_number = _read_usage(path, int(now().timestamp()))
            self._open_entries: dict[int, Reserved] = {}
            self._journal.replace_entries(self._summary())
        except (DiskError, InputError):
            self._journal.close()
            raise

    def begin(self, caller: Caller) -> Reservation:
        """Count one request, before anything works on it: what is refused later has cost work, and counts too.

        Raises:
            BudgetExceeded: A limit of the key is reached, or no token is left; nothing is counted.
            DiskError: The journal cannot be written; nothing is counted.
        """
        moment = self._now()
        time = int(moment.timestamp())
        usage, limits = self._keys[caller.key_id], self._limits_of(caller.key_id)
        usage.drop_old_seconds(time)
        if usage.num_open >= limits.concurrency:
            raise BudgetExceeded("concurrency", _BUSY_RETRY_S)
        for name in ("requests", "tokens"):
            _check_room(limits, usage, name, 1, moment)
        entry = Reserved(number=self._next_number, key=caller.key_id, time=time, prompt=0, completion=0)
        self._journal.append(entry)
        self._next_number += 1
        usage.num_open += 1
        self._open_entries[entry.number] = entry
        second = usage.second_at(time)
        second.requests += 1
        _count_reserved(usage.days[_day_of(time)], entry)
        return Reservation(self, entry, second)

    def raise_entry(self, reservation: Reservation, entry: Reserved) -> None:
        """Count an entry with more tokens in the place of the one of a reservation.

        Raises:
            BudgetExceeded, DiskError: As `Reservation.reserve_tokens`.
        """
        moment = self._now()
        usage = self._keys[entry.key]
        usage.drop_old_seconds(int(moment.timestamp()))
        added = entry.prompt + entry.completion - reservation.entry.prompt - reservation.entry.completion
        _check_room(self._limits_of(entry.key), usage, "tokens", added, moment)
        self._journal.append(entry)
        # the second in which the request began may be out of the minute already
        reservation.second = usage.second_at(int(moment.timestamp()))
        reservation.second.tokens += added
        _count_raised(usage.days[_day_of(entry.time)], reservation.entry, entry)
        self._open_entries[entry.number] = reservation.entry = entry

    def usage_by_day(self) -> dict[tuple[str, str], DayUsage]:
        """Return usage by key id and day."""
        return {(key, day): usage for key, counts in self._keys.items() for day, usage in sorted(counts.days.items())}

    def sync(self) -> None:
        """Force all counts to disk."""
        self._journal.sync()

    def close(self) -> None:
        """Let another server open the journal; closing twice is harmless."""
        self._journal.close()

    def settle_entry(self, reservation: Reservation, settled: Settled) -> None:
        """Replace the reservation of a request by its real usage."""
        entry = reservation.entry
        usage = self._keys[entry.key]
        usage.num_open -= 1
        del self._open_entries[entry.number]
        self._journal.append(settled)
        reservation.second.tokens += settled.prompt + settled.completion - entry.prompt - entry.completion
        _count_settled(usage.days[_day_of(entry.time)], entry, settled)
        if self._journal.num_lines > _MAX_LINES:
            self._journal.replace_entries(self._summary())

    def _summary(self) -> Iterator[BudgetEntry]:
        """Yield the entries of a journal that says the same in fewer lines; open reservations keep their own."""
        now = self._now()
        first_day = f"{now - timedelta(days=_DAYS_ON_FILE):%Y-%m-%d}"
        open_usage: dict[tuple[str, str], DayUsage] = defaultdict(DayUsage)
        for entry in self._open_entries.values():
            _count_reserved(open_usage[entry.key, _day_of(entry.time)], entry)
        for key, usage in self._keys.items():
            for day in [day for day in usage.days if day < first_day]:
                del usage.days[day]
            for day, counts in sorted(usage.days.items()):
                still_open = open_usage[key, day]
                yield DayCount(
                    key=key,
                    day=day,
                    requests=counts.requests - still_open.requests,
                    prompt=counts.prompt_tokens - still_open.prompt_tokens,
                    completion=counts.completion_tokens - still_open.completion_tokens,
                )
            usage.drop_old_seconds(int(now.timestamp()))
            # reservations that are open are counted twice in the minute after a restart: too much, never too little
            for second in usage.seconds:
                yield MinuteCount(key=key, time=second.time, requests=second.requests, tokens=max(0, second.tokens))
        yield from self._open_entries.values()


def read_usage_by_day(path: Path) -> dict[tuple[str, str], DayUsage]:
    """Return usage by key id and day, from a journal that a server may be writing.

    Raises:
        DiskError, InputError: As `Budgets`.
    """
    keys, _ = _read_usage(path, 0)
    return {(key, day): usage for key, counts in keys.items() for day, usage in sorted(counts.days.items())}


def _read_usage(path: Path, now: int) -> tuple[dict[str, _KeyUsage], int]:
    """Return the counts of a journal and the number of the next reservation.

    Args:
        now: Second since 1970; an entry of a later one, written before the clock was set back, counts as of now.
    """
    keys: dict[str, _KeyUsage] = defaultdict(_KeyUsage)
    unsettled: dict[int, tuple[Reserved, _SecondUsage]] = {}
    next_number = 0
    for entry in read_entries(path):
        if isinstance(entry, Settled):
            if entry.number in unsettled:
                reserved, second = unsettled.pop(entry.number)
                second.tokens += entry.prompt + entry.completion - reserved.prompt - reserved.completion
                _count_settled(keys[reserved.key].days[_day_of(reserved.time)], reserved, entry)
            continue
        usage = keys[entry.key]
        if isinstance(entry, DayCount):
            day = usage.days[entry.day]
            day.requests, day.prompt_tokens = day.requests + entry.requests, day.prompt_tokens + entry.prompt
            day.completion_tokens += entry.completion
            continue
        second = usage.second_at(min(entry.time, now))
        if isinstance(entry, MinuteCount):
            second.requests, second.tokens = second.requests + entry.requests, second.tokens + entry.tokens
        elif entry.number in unsettled:
            begun = unsettled[entry.number][0]
            second.tokens += entry.prompt + entry.completion - begun.prompt - begun.completion
            _count_raised(usage.days[_day_of(entry.time)], begun, entry)
            unsettled[entry.number] = entry, second
        else:
            second.requests += 1
            second.tokens += entry.prompt + entry.completion
            _count_reserved(usage.days[_day_of(entry.time)], entry)
            unsettled[entry.number] = entry, second
            next_number = max(next_number, entry.number + 1)
    return keys, next_number


def _count_reserved(usage: DayUsage, entry: Reserved) -> None:
    usage.requests += 1
    usage.prompt_tokens += entry.prompt
    usage.completion_tokens += entry.completion


def _count_raised(usage: DayUsage, begun: Reserved, entry: Reserved) -> None:
    usage.prompt_tokens += entry.prompt - begun.prompt
    usage.completion_tokens += entry.completion - begun.completion


def _count_settled(usage: DayUsage, entry: Reserved, settled: Settled) -> None:
    usage.prompt_tokens += settled.prompt - entry.prompt
    usage.completion_tokens += settled.completion - entry.completion


def _check_room(limits: KeyLimits, usage: _KeyUsage, name: str, needed: int, moment: datetime) -> None:
    """Check a month's and a minute's limit of ``requests`` or ``tokens``.

    Raises:
        BudgetExceeded: One of them leaves no room for `needed` more.
    """
    requests, tokens = usage.month_usage(f"{moment:%Y-%m}")
    month = {"requests": requests, "tokens": tokens}[name]
    if month + needed > getattr(limits, f"{name}_per_month"):
        month_start = moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        next_month = (month_start + timedelta(days=32)).replace(day=1)
        raise BudgetExceeded(f"{name}_per_month", int((next_month - moment).total_seconds()) + 1)
    room = getattr(limits, f"{name}_per_minute") - needed
    wait_s = _seconds_until_free(usage.seconds, name, room, int(moment.timestamp()))
    if wait_s:
        raise BudgetExceeded(f"{name}_per_minute", wait_s)


def _seconds_until_free(seconds: deque[_SecondUsage], name: str, room: int, now: int) -> int:
    """Return after how many seconds the counts of the last minute fit into `room`; 0 where they do."""
    total = sum(getattr(second, name) for second in seconds)
    if room < 0:
        return _MINUTE_S
    for second in seconds:
        if total <= room:
            break
        total -= getattr(second, name)
        wait_s = second.time + _MINUTE_S - now
        if total <= room:
            return max(1, wait_s)
    return 0


def _day_of(time: int) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d}"
