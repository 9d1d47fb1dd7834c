"""The savers of checkpoints, at once or beside the training; what fails is said, and training goes on."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from phalanx.checkpoint import Shard
from phalanx.errors import CheckpointError, VerificationError
from phalanx.pipeline import Duplicate, Observe, PipelineEngine
from phalanx.train.engines.domain_engine import DomainEngine
from phalanx.train.records.journal import Journal
from phalanx.train.saving.savepoint import SavedCheckpoint, Savepoint

_LOWEST_PRIORITY = 19


class PlainSaver:
    """A saver that saves at once.

    Args:
        shards: Collects the state as it is now, one shard at a time.
        observe: Takes saved checkpoints and failures.

    Guarantees:
        A checkpoint that cannot be written is an event and a message, and never ends the run, unless it is the last
        one, without which the result would be lost.
    """

    def __init__(self, shards: Callable[[], Iterable[Shard]], savepoint: Savepoint, observe: Observe) -> None:
        self._shards = shards
        self._savepoint = savepoint
        self._observe = observe
        self.is_overdue = False
        """Whether one that was begun had to be given up, so that the next step should be saved."""

    def opened(self, step: int) -> None:
        """A step is about to begin, and its batch is not drawn yet."""

    def improves(self, num_steps: int) -> bool:
        """Whether a checkpoint after so many steps would be the best one, and is to be kept."""
        return self._savepoint.better(num_steps) is not None

    def poll(self) -> None:
        """Bring pending work further; called once a step."""

    def finish(self) -> None:
        """Wait until nothing is under way."""

    def state(self) -> Iterable[Shard]:
        """The state as it is now, one stage at a time."""
        self.finish()
        return self._shards()

    def begin(self, num_steps: int) -> None:
        """Save; others than this one go on meanwhile."""
        self.save_now(num_steps)

    def save_now(self, num_steps: int, *, alone: bool = False, last: bool = False) -> bool:
        """Save and wait for it.

        Args:
            last: The run ends here: a failure is an error.

        Returns:
            Whether it was saved.

        Raises:
            CheckpointError: It is the last one and cannot be written; earlier ones are untouched.
            VerificationError: A party sent a state that is not the one it signed.
        """
        self.finish()
        self.is_overdue = False
        try:
            saved = self._savepoint.write(num_steps, self._shards(), self._savepoint.state(num_steps), alone=alone)
        except CheckpointError as exc:
            self._say_failed(num_steps, str(exc))
            if last:
                raise
            return False
        self._say_saved(saved)
        return True

    def _say_saved(self, saved: SavedCheckpoint) -> None:
        self._observe("checkpoint_saved", saved.body())
        if saved.remote_failure is not None:
            self._observe("checkpoint_not_copied", {"step": saved.step, "reason": saved.remote_failure[:500]})

    def _say_failed(self, step: int, reason: str) -> None:
        self._observe("checkpoint_failed", {"step": step, "reason": reason[:500]})


class BesideSaver(PlainSaver):
    """A saver that saves now, or in a thread of the lowest priority beside the training."""

    def __init__(self, shards: Callable[[], Iterable[Shard]], savepoint: Savepoint, observe: Observe) -> None:
        super().__init__(shards, savepoint, observe)
        self._writing: Future[SavedCheckpoint] | None = None
        self._written_step = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_step_aside)

    def poll(self) -> None:
        """Bring pending work further; called once a step."""
        if self._writing is not None and self._writing.done():
            self._report()

    def finish(self) -> None:
        """Wait until nothing is under way."""
        self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written; a collection under way continues."""
        if self._writing is not None:
            self._report()

    def close(self) -> None:
        """End the session: complete collections are still written."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def _write(self, num_steps: int, shards: Iterable[Shard], state: dict[str, Any]) -> None:
        """Give shards to the writing thread."""
        self._written_step = num_steps
        self._writing = self._worker.submit(self._savepoint.write, num_steps, shards, state)

    def _report(self) -> None:
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            self._say_saved(writing.result())
        except (CheckpointError, VerificationError) as exc:
            self._say_failed(self._written_step, str(exc))


class Saver(BesideSaver):
    """A saver of a pipeline, now or in the background; one checkpoint is under way at a time.

    Guarantees:
        What is in the background is of one step, bit for bit, and checked against what holder and shadow have signed
        before it is published.
    """

    def __init__(
        self, engine: PipelineEngine, savepoint: Savepoint, observe: Observe, journal: Journal | None = None
    ) -> None:
        super().__init__(
            lambda: (Shard(copy.spec.index, copy.optimizer.state(), copy.step) for copy in engine.copies("state")),
            savepoint,
            observe,
        )
        self._engine = engine
        self._journal = journal
        self._duplicate: Duplicate | None = None
        self._state: dict[str, Any] = {}

    def opened(self, step: int) -> None:
        """Note in the journal where the run is, before the step's batch is drawn."""
        if self._journal is not None:
            self._journal.open_step(self._savepoint.state(step))

    def begin(self, num_steps: int) -> None:
        """Take a duplicate and go on; it is collected and written while further steps run.

        When the one before is still under way, it is waited for: memory for a third copy is never taken.
        """
        self.finish()
        self.is_overdue = False
        self._state = self._savepoint.state(num_steps)
        self._duplicate = self._engine.begin_duplicate()

    def poll(self) -> None:
        """Bring pending work further; called once a step."""
        if self._duplicate is not None:
            self._engine.look_for_duplicate()
            self._hand_over()
        super().poll()

    def finish(self) -> None:
        """Wait until nothing is under way."""
        if self._duplicate is not None:
            self._engine.finish_duplicate(self._duplicate)
            self._hand_over()
        self.wait()

    def drop(self) -> None:
        """Give up a collection under way, and wait for pending writes."""
        self._duplicate = None
        self.wait()

    def close(self) -> None:
        """End the session: complete collections are still written."""
        try:
            self.wait()
            self._hand_over()
            self.drop()
        finally:
            super().close()

    def _hand_over(self) -> None:
        """Give a whole duplicate to the writer."""
        duplicate = self._duplicate
        if duplicate is None or not (duplicate.is_whole or duplicate.failure):
            return
        self._duplicate = None
        if duplicate.failure is not None:
            self.is_overdue = True
            self._say_failed(duplicate.num_steps, f"copy failed: {duplicate.failure}")
            return
        self._write(duplicate.num_steps, _checked(duplicate), self._state)


def _step_aside() -> None:
    """Take only processor time that no other thread wants, for writes beside the training (Linux)."""
    if sys.platform.startswith("linux"):
        # a priority is each thread's own there
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _checked(duplicate: Duplicate) -> Iterator[Shard]:
    for part in duplicate.take():
        part.check()
        yield Shard(part.stage, part.tensors, part.num_steps)
        # the loop variable would keep this stage in memory while the next one is written
        del part


class DomainSaver(BesideSaver):
    """A saver of a domain, now or in the background; one checkpoint is under way at a time.

    Guarantees:
        What is in the background is of one step, bit for bit: every rank copies its part before it goes on. A
        checkpoint that cannot be written leaves the run going, and the next one can be taken.
    """

    def __init__(self, engine: DomainEngine, savepoint: Savepoint, observe: Observe) -> None:
        super().__init__(engine.shards, savepoint, observe)
        self._engine = engine

    def begin(self, num_steps: int) -> None:
        """Have every rank copy its part, and go on; parts are sent and written while further steps run.

        When the one before is still under way, it is waited for: memory for a third copy is never taken.
        """
        self.finish()
        self._written_step = num_steps
        state = self._savepoint.state(num_steps)
        self._writing = self._worker.submit(self._collect, num_steps, self._engine.duplicate(), state)

    def _collect(self, num_steps: int, shards: Iterator[Shard], state: dict[str, Any]) -> SavedCheckpoint:
        try:
            return self._savepoint.write(num_steps, shards, state)
        finally:
            # where the disk has refused, other ranks still wait to get rid of what they copied
            for _ in shards:
                pass
