"""Heartbeats: each rank gives one a second, and a rank that has stopped giving them is taken for hung.

A collective that waits for a hung rank cannot be cancelled, and says nothing for as long as its timeout, which has to
be long: a checkpoint, a first compilation or a validation may take minutes in which nothing is sent. A thread that
counts goes on through all of these, and stops when the process does.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

BEAT_EVERY_S = 1.0
_LOOK_EVERY_S = 0.5
_SECONDS_TO_END = 2.0


class Heartbeat(Protocol):
    """A place where heartbeats are left and found."""

    def give_beat(self) -> None:
        """Leave one."""

    def read_counts(self) -> Mapping[int, int]:
        """A number for each other rank that gives heartbeats; it changes with each of them."""

    def end_beats(self) -> None:
        """Say that none will follow, and that this is as it should be."""


class CounterStore(Protocol):
    """The part of torch's stores that is used here."""

    def add(self, key: str, value: int, /) -> int:
        """Add to a number, which is 0 at first; returns the sum."""

    def set(self, key: str, value: str, /) -> None:
        """Set it."""


class FileHeartbeat:
    """Heartbeats as times of files in a private directory, for ranks on one machine.

    Args:
        directory: Directory that all ranks share.
        watched: Ranks that are looked for.
    """

    def __init__(self, directory: Path, rank: int, watched: range) -> None:
        self._own = _beat_file(directory, rank)
        self._others = {other: _beat_file(directory, other) for other in watched if other != rank}

    def give_beat(self) -> None:
        """Touch one's own file; that takes no room on a full disk."""
        self._own.touch()

    def read_counts(self) -> Mapping[int, int]:
        """Times of the others' files, in nanoseconds."""
        heartbeats = {}
        for rank, path in self._others.items():
            try:
                heartbeats[rank] = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
        return heartbeats

    def end_beats(self) -> None:
        """Remove one's own file."""
        self._own.unlink(missing_ok=True)

    def remove_files(self) -> None:
        """Remove what ranks of an earlier start have left."""
        for path in (self._own, *self._others.values()):
            path.unlink(missing_ok=True)


class StoreHeartbeat:
    """Heartbeats as numbers in the store by which ranks on several machines have met.

    Args:
        store: A connection of its own: a wait on another's would hold up the heartbeats.
        watched: Ranks that are looked for.
    """

    def __init__(self, store: CounterStore, rank: int, watched: range) -> None:
        self._store = store
        self._own = _beat_key(rank)
        self._others = {other: _beat_key(other) for other in watched if other != rank}

    def give_beat(self) -> None:
        """Count on."""
        self._store.add(self._own, 1)

    def read_counts(self) -> Mapping[int, int]:
        """The others' numbers; 0 is that of a rank that has not begun, or has ended."""
        counts = {rank: self._store.add(key, 0) for rank, key in self._others.items()}
        return {rank: count for rank, count in counts.items() if count}

    def end_beats(self) -> None:
        """Set one's own number back."""
        self._store.set(self._own, "0")


class SilenceClock:
    """The ranks that have given no heartbeat for too long, by the clock of the rank that looks.

    Args:
        limit_s: Seconds of silence after which a rank counts as hung.
        now: Time of any steady clock; likewise below.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._heard: dict[int, tuple[int, float]] = {}
        self._looked = now

    def note_counts(self, counts: Mapping[int, int], now: float) -> None:
        """Note the counts of all ranks; a rank that was there and has left has ended in good order."""
        old = self._heard
        self._heard = {
            rank: old[rank] if rank in old and old[rank][0] == count else (count, now) for rank, count in counts.items()
        }

    def overdue_ranks(self, now: float) -> dict[int, float]:
        """Ranks that are silent for too long, and for how many seconds.

        A rank that did not look for a long time itself, because its process or its machine was stopped, holds that
        against no other: the time of every rank begins anew.
        """
        if now - self._looked > self._limit_s / 2:
            self._heard = {rank: (count, now) for rank, (count, _) in self._heard.items()}
        self._looked = now
        silent = {rank: now - since for rank, (_, since) in self._heard.items()}
        return {rank: seconds for rank, seconds in silent.items() if seconds > self._limit_s}


class HeartbeatThreads:
    """A pair of threads that give this rank's heartbeats and watch the others'; a context manager.

    Two threads, because a store that is kept by a hung process does not answer: a thread that waits for its answer
    could not see that it takes too long.

    Args:
        limit_s: Seconds after which a rank is taken for hung.
        act: Told of the rank and its seconds of silence, once; None only gives heartbeats.
    """

    def __init__(self, heartbeat: Heartbeat, limit_s: float, act: Callable[[int, float], None] | None) -> None:
        self._heartbeat = heartbeat
        self._act = act
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._patience = SilenceClock(limit_s, time.monotonic())
        self._threads = [threading.Thread(target=self._beat_until_end, name="heartbeat", daemon=True)]
        if act is not None:
            self._threads.append(threading.Thread(target=self._listen_until_end, name="silence", daemon=True))

    def __enter__(self) -> "HeartbeatThreads":
        # a rank that was never heard of is not missed: its first heartbeat is there before others can wait for it
        with contextlib.suppress(OSError, RuntimeError):
            self._heartbeat.give_beat()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(_SECONDS_TO_END)

    def _beat_until_end(self) -> None:
        try:
            while not self._is_over.wait(BEAT_EVERY_S):
                self._heartbeat.give_beat()
                if self._act is not None:
                    counts = self._heartbeat.read_counts()
                    with self._lock:
                        self._patience.note_counts(counts, time.monotonic())
            self._heartbeat.end_beats()
        except (OSError, RuntimeError):
            # the store or the directory is gone: others hear no more of this rank, and it of them
            return

    def _listen_until_end(self) -> None:
        while not self._is_over.wait(_LOOK_EVERY_S):
            with self._lock:
                silent = self._patience.overdue_ranks(time.monotonic())
            for rank, seconds in silent.items():
                if self._act is not None:
                    self._act(rank, seconds)
                return


def _beat_file(directory: Path, rank: int) -> Path:
    return directory / f"beat-{rank}"


def _beat_key(rank: int) -> str:
    return f"phalanx/beat/{rank}"
