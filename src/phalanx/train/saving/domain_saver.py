"""Checkpoints of a domain's run, written beside the training where the run file says so."""

from collections.abc import Iterator
from typing import Any

from phalanx.checkpoint import Shard
from phalanx.pipeline import Observe
from phalanx.train.engines.domain_engine import DomainEngine
from phalanx.train.saving.savepoint import SavedCheckpoint, Savepoint
from phalanx.train.saving.saver import BesideSaver


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
