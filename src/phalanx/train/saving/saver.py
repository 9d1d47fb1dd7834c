"""The savers of checkpoints, at once or beside the training; what fails is said, and training goes on."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from phalanx.checkpoint import Shard, WrittenPieces
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

    def note_step_begin(self, step: int) -> None:
        """A step is about to begin, and its batch is not drawn yet."""

    def would_be_best(self, num_steps: int) -> bool:
        """Whether a checkpoint after so many steps would be the best one, and is to be kept."""
        return self._savepoint.improved_best(num_steps) is not None

    def advance_pending(self) -> None:
        """Bring pending work further; called once a step."""

    def finish_pending(self) -> None:
        """Wait until nothing is under way."""

    def current_shards(self) -> Iterable[Shard]:
        """The state as it is now, one stage at a time."""
        self.finish_pending()
        return self._shards()

    def begin_save(self, num_steps: int) -> None:
        """Save; others than this one go on meanwhile."""
        self.save_now(num_steps)

    def save_now(self, num_steps: int, *, alone: bool = False, last: bool = False) -> bool:
        """Save and wait for it.

        Args:
            last: The run ends here: a failure is an error.

        Raises:
            CheckpointError: It is the last one and cannot be written; earlier ones are untouched.
            VerificationError: A party sent a state that is not the one it signed.
        """
        self.finish_pending()
        self.is_overdue = False
        try:
            saved = self._savepoint.write_checkpoint(
                num_steps, self._collect_state(), self._savepoint.saved_state(num_steps), alone=alone
            )
        except CheckpointError as exc:
            self._report_failed(num_steps, str(exc))
            if last:
                raise
            return False
        self._report_saved(saved)
        return True

    def _collect_state(self) -> Iterable[Shard] | WrittenPieces:
        return self._shards()

    def _report_saved(self, saved: SavedCheckpoint) -> None:
        self._observe("checkpoint_saved", saved.event_body())
        if saved.remote_failure is not None:
            self._observe("checkpoint_not_copied", {"step": saved.step, "reason": saved.remote_failure[:500]})

    def _report_failed(self, step: int, reason: str) -> None:
        self._observe("checkpoint_failed", {"step": step, "reason": reason[:500]})


class BackgroundSaver(PlainSaver):
    """A saver that saves now, or in a thread of the lowest priority beside the training."""

    def __init__(self, shards: Callable[[], Iterable[Shard]], savepoint: Savepoint, observe: Observe) -> None:
        super().__init__(shards, savepoint, observe)
        self._writing: Future[SavedCheckpoint] | None = None
        self._written_step = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_lower_priority)

    def advance_pending(self) -> None:
        if self._writing is not None and self._writing.done():
            self._report_write()

    def finish_pending(self) -> None:
        self.wait_for_write()

    def wait_for_write(self) -> None:
        """Wait until nothing is being written; a collection under way continues."""
        if self._writing is not None:
            self._report_write()

    def close(self) -> None:
        """End the session: complete collections are still written."""
        try:
            self.wait_for_write()
        finally:
            self._worker.shutdown()

    def _submit_write(self, num_steps: int, shards: Iterable[Shard], state: dict[str, Any]) -> None:
        self._written_step = num_steps
        self._writing = self._worker.submit(self._savepoint.write_checkpoint, num_steps, shards, state)

    def _report_write(self) -> None:
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            self._report_saved(writing.result())
        except (CheckpointError, VerificationError) as exc:
            self._report_failed(self._written_step, str(exc))


class Saver(BackgroundSaver):
    """A saver of a pipeline, now or in the background; one checkpoint is under way at a time.

    Guarantees:
        What is in the background is of one step, bit for bit, and checked against what holder and shadow have signed
        before it is published.
    """

    def __init__(
        self, engine: PipelineEngine, savepoint: Savepoint, observe: Observe, journal: Journal | None = None
    ) -> None:
        super().__init__(
            lambda: (
                Shard(copy.spec.index, copy.optimizer.state_tensors(), copy.step_count)
                for copy in engine.fetch_stages("state")
            ),
            savepoint,
            observe,
        )
        self._engine = engine
        self._journal = journal
        self._duplicate: Duplicate | None = None
        self._state: dict[str, Any] = {}

    def note_step_begin(self, step: int) -> None:
        """Note in the journal where the run is, before the step's batch is drawn."""
        if self._journal is not None:
            self._journal.open_step(self._savepoint.saved_state(step))

    def begin_save(self, num_steps: int) -> None:
        """Take a duplicate and go on; it is collected and written while further steps run.

        When the one before is still under way, it is waited for: memory for a third copy is never taken.
        """
        self.finish_pending()
        self.is_overdue = False
        self._state = self._savepoint.saved_state(num_steps)
        self._duplicate = self._engine.begin_duplicate()

    def advance_pending(self) -> None:
        if self._duplicate is not None:
            self._engine.update_duplicate()
            self._hand_over()
        super().advance_pending()

    def finish_pending(self) -> None:
        if self._duplicate is not None:
            self._engine.finish_duplicate(self._duplicate)
            self._hand_over()
        self.wait_for_write()

    def drop_collection(self) -> None:
        """Give up a collection under way, and wait for pending writes."""
        self._duplicate = None
        self.wait_for_write()

    def close(self) -> None:
        try:
            self.wait_for_write()
            self._hand_over()
            self.drop_collection()
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
            self._report_failed(duplicate.num_steps, f"copy failed: {duplicate.failure}")
            return
        self._submit_write(duplicate.num_steps, _check_parts(duplicate), self._state)


def _lower_priority() -> None:
    """Take only processor time that no other thread wants, for writes beside the training (Linux)."""
    if sys.platform.startswith("linux"):
        # a priority is each thread's own there
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _check_parts(duplicate: Duplicate) -> Iterator[Shard]:
    for part in duplicate.take_stages():
        part.check_digest()
        yield Shard(part.stage, part.tensors, part.num_steps)
        # the loop variable would keep this stage in memory while the next one is written
        del part


class DomainSaver(BackgroundSaver):
    """A saver of a domain, now or in the background; one checkpoint is under way at a time.

    Guarantees:
        What is in the background is of one step, bit for bit: every rank copies its part before it goes on. A
        checkpoint that cannot be written leaves the run going, and the next one can be taken.
    """

    def __init__(
        self, engine: DomainEngine, savepoint: Savepoint, observe: Observe, *, is_sharded: bool = False
    ) -> None:
        super().__init__(engine.state_shards, savepoint, observe)
        self._engine = engine
        self._is_sharded = is_sharded

    def begin_save(self, num_steps: int) -> None:
        """Have every rank copy its part, and go on; parts are sent and written while further steps run.

        When the one before is still under way, it is waited for: memory for a third copy is never taken.
        """
        self.finish_pending()
        self._written_step = num_steps
        state = self._savepoint.saved_state(num_steps)
        if self._is_sharded:
            try:
                gather = self._engine.write_pieces(self._savepoint.directory)
            except CheckpointError as exc:
                self._report_failed(num_steps, str(exc))
                return
            self._writing = self._worker.submit(lambda: self._savepoint.write_checkpoint(num_steps, gather(), state))
            return
        self._writing = self._worker.submit(self._write_collected, num_steps, self._engine.duplicate_shards(), state)

    def _collect_state(self) -> Iterable[Shard] | WrittenPieces:
        if self._is_sharded:
            return self._engine.write_pieces(self._savepoint.directory)()
        return super()._collect_state()

    def _write_collected(self, num_steps: int, shards: Iterator[Shard], state: dict[str, Any]) -> SavedCheckpoint:
        try:
            return self._savepoint.write_checkpoint(num_steps, shards, state)
        finally:
            # where the disk has refused, other ranks still wait to get rid of what they copied
            for _ in shards:
                pass
