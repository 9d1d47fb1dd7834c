"""Local ranks: one child process each, ended by id, never outliving rank 0."""

import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.child import PythonProcess
from phalanx.errors import PeerLostError
from phalanx.parallel.groups.heartbeat import BEAT_EVERY_S, FileHeartbeat, SilenceClock
from phalanx.parallel.groups.rank_env import RankEnv

_SECONDS_TO_END = 5.0
_LOOK_EVERY_S = 0.2
_GRACE_S = 3.0
_LAST_LINES = 3


class LocalRanks:
    """Child processes for ranks 1 and up; a context manager that ends them all.

    When one ends before it should, or gives no heartbeat any more, the others are ended a few seconds later: that wakes
    every rank that waits for it on a socket, since gloo's waits cannot be cancelled otherwise.

    Args:
        directory: Gets a log of each rank, its heartbeats and the file by which they find each other; made private.
        command: Module and arguments of a rank.
        world: Number of ranks, rank 0 included.
        threads: Threads of tensor kernels in each.
        silence_s: Seconds after which one without a heartbeat is taken for hung.
    """

    def __init__(
        self, directory: Path, command: Sequence[str], world: int, threads: int, silence_s: float = 30.0
    ) -> None:
        self._directory = directory
        self._command = command
        self._world = world
        self._threads = threads
        # a store of an earlier session in this process reads its file once more when it is freed, and would never end
        # in one that another session wrote
        self._rendezvous = (directory / f"rendezvous-{secrets.token_hex(8)}").resolve()
        self._processes: dict[int, PythonProcess] = {}
        self._heartbeat = FileHeartbeat(directory, 0, range(world))
        self._patience = SilenceClock(silence_s, time.monotonic())
        self._hung: dict[int, float] = {}
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch_ranks, name="ranks", daemon=True)
        self._first_gone: int | None = None

    def place_of(self, rank: int) -> RankEnv:
        """The place of a rank."""
        return RankEnv(rank, self._world, rank, self._world, self._rendezvous, is_kept=True)

    def start_ranks(self) -> None:
        """Start them; their output goes to ``rank-N.log``."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        for earlier in self._directory.glob("rendezvous*"):
            earlier.unlink(missing_ok=True)
        self._heartbeat.remove_files()
        for rank in range(1, self._world):
            self._processes[rank] = self._start_rank(rank)
        self._watcher.start()

    def find_lost(self, patience_s: float = 0.0) -> PeerLostError | None:
        """Return the error of the first rank that ended, waiting a little for it; None when all run."""
        deadline = time.monotonic() + patience_s
        while self._first_gone is None and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        if self._first_gone is None:
            return None
        rank, process = self._first_gone, self._processes[self._first_gone]
        how = process.how_it_ended()
        if rank in self._hung:
            how = f"{how}, after {self._hung[rank]:.0f} s without a sign of life"
        return PeerLostError(
            f"rank {rank} ended with {how}: {process.last_output(_LAST_LINES)}; continue with --resume"
        )

    def check_all_run(self) -> None:
        """Look whether all run."""
        lost = self.find_lost()
        if lost is not None:
            raise lost

    def process_ids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def close(self) -> None:
        """Give the ranks, which have been told to end, a moment; then kill them."""
        self._is_over.set()
        for process in self._processes.values():
            process.end_or_kill()

    def __enter__(self) -> "LocalRanks":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for process in self._processes.values():
            process.kill()
        if self._watcher.is_alive():
            self._watcher.join(_SECONDS_TO_END)

    def _start_rank(self, rank: int) -> PythonProcess:
        settings = {"OMP_NUM_THREADS": str(self._threads), **self.place_of(rank).to_environment()}
        return PythonProcess(self._command, settings, self._directory / f"rank-{rank}.log", renew=True)

    def _watch_ranks(self) -> None:
        beaten = -BEAT_EVERY_S
        while not self._is_over.wait(_LOOK_EVERY_S):
            now = time.monotonic()
            if now - beaten >= BEAT_EVERY_S:
                beaten = now
                self._look_for_signs(now)
            gone = [rank for rank, process in self._processes.items() if process.poll() is not None]
            if gone:
                self._first_gone = gone[0]
                self._is_over.wait(_GRACE_S)
                break
        if self._is_over.is_set():
            with contextlib.suppress(OSError):
                self._heartbeat.end_beats()
        else:
            # rank 0 gives no more signs of life: it has to come to its end soon
            for process in self._processes.values():
                process.kill()

    def _look_for_signs(self, now: float) -> None:
        """Kill ranks that hang: waiting ranks notice only a process that has ended."""
        try:
            self._heartbeat.give_beat()
            self._patience.note_counts(self._heartbeat.read_counts(), now)
        except OSError:
            # the directory is gone; a rank that has ended is still seen
            return
        for rank, seconds in self._patience.overdue_ranks(now).items():
            if self._processes[rank].poll() is None:
                self._hung[rank] = seconds
                self._processes[rank].kill()
