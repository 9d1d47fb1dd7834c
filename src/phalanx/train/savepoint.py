"""What a checkpoint of a run holds beside the tensors, written and read in one place."""

from dataclasses import asdict

from phalanx.checkpoint import (
    Checkpoint,
    Shard,
    drop_checkpoints_after,
    latest_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from phalanx.config import digest
from phalanx.data import BatchLoader
from phalanx.errors import CheckpointError
from phalanx.pipeline import PipelineEngine
from phalanx.telemetry import MetricsFile
from phalanx.train.config import RunConfig
from phalanx.train.record import Totals
from phalanx.train.run_directory import RunDirectory
from phalanx.train.summary import Figures


class Savepoint:
    """Moves the state of a run between memory and the run directory's checkpoints."""

    def __init__(
        self, run: RunConfig, home: RunDirectory, loader: BatchLoader, figures: Figures, totals: Totals
    ) -> None:
        self._run = run
        self._home = home
        self._loader = loader
        self._figures = figures
        self._totals = totals

    def save(self, engine: PipelineEngine, num_steps: int, *, alone: bool = False) -> None:
        """Write a checkpoint after so many finished steps; `alone` removes all older ones.

        Raises:
            CheckpointError: It cannot be written; earlier ones are untouched.
            VerificationError: A party sent a state that is not the one it signed.
        """
        state = {
            "run": self._home.run_id,
            "config_digest": digest(self._run),
            "step": num_steps,
            "loader": self._loader.state(),
            "figures": self._figures.to_json(),
            "totals": asdict(self._totals),
        }
        shards = (Shard(copy.spec.index, copy.optimizer.state(), copy.step) for copy in engine.copies("state"))
        keep = 1 if alone else self._run.checkpoint.keep
        save_checkpoint(self._home.checkpoints, num_steps, shards, state, sign=self._home.owner, keep=keep)

    def forget_after(self, step: int) -> None:
        """Remove checkpoints of later steps: they hold what a rollback undoes."""
        drop_checkpoints_after(self._home.checkpoints, step)

    def open(self) -> Checkpoint | None:
        """Open and verify the newest checkpoint; None when none was written yet.

        Raises:
            CheckpointError: It is damaged, foreign, or of another config.
        """
        path = latest_checkpoint(self._home.checkpoints)
        if path is None:
            return None
        return open_checkpoint(path, self._home.owner.public, run=self._home.run_id, config_digest=digest(self._run))

    def rewind(self, checkpoint: Checkpoint | None, metrics: MetricsFile) -> int:
        """Take loader, figures, totals and metrics back to a checkpoint, or to the beginning.

        Returns:
            The next step.

        Raises:
            CheckpointError: The checkpoint's state is not what this version writes.
        """
        start = 0 if checkpoint is None else checkpoint.step
        if checkpoint is not None:
            try:
                self._loader.load_state(checkpoint.state["loader"])
                self._figures.load_json(checkpoint.state["figures"])
                self._totals.load_json(checkpoint.state["totals"])
            except (KeyError, TypeError, AttributeError) as exc:
                raise CheckpointError(f"{checkpoint.path}: its state lacks {exc}; use an older checkpoint") from exc
            if self._totals.steps != start or start > self._run.train.steps:
                raise CheckpointError(
                    f"{checkpoint.path}: is of step {start}, its totals count {self._totals.steps} steps, "
                    f"the run has {self._run.train.steps}; use an older checkpoint"
                )
        metrics.truncate_after(start - 1)
        return start
