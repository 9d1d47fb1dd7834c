"""The rollback to the last certified checkpoint, in the same process, when no party that is left can serve a stage."""

from dataclasses import dataclass

from phalanx.errors import TrainingError
from phalanx.models import ModelSource
from phalanx.pipeline import Observe, PipelineEngine, StepPlan
from phalanx.telemetry import MetricsFile
from phalanx.train.saving.savepoint import Savepoint
from phalanx.train.saving.saver import Saver
from phalanx.train.setup.stage_source import StageLibrary


@dataclass(frozen=True)
class CheckpointRollback:
    """A rollback of a whole run: loader, figures and metrics here, every stage at the parties that are left.

    Guarantees:
        The run ends with the bits of an undisturbed one, as far as the checkpoint has them. The steps since the
        checkpoint are lost and done again; the event `fell_back` counts them.

    Attributes:
        plan: The run, as every party sees it.
        metrics: Loses its lines of lost steps.
        observe: Writes to the audit log, and counts.
    """

    source: ModelSource
    plan: StepPlan
    savepoint: Savepoint
    saver: Saver
    metrics: MetricsFile
    observe: Observe

    def restart_from_checkpoint(self, engine: PipelineEngine, reason: TrainingError) -> int:
        """Begin again from the last checkpoint.

        Raises:
            TrainingError: The given one: without a guard no state is known to be right, and without a
                checkpoint there is none to go back to.
            CheckpointError: The checkpoint is damaged.
            PeerLostError: No party that is left got ready in time.
        """
        self.saver.drop_collection()
        checkpoint = self.savepoint.open_newest() if self.plan.guard.is_enabled else None
        if checkpoint is None:
            raise reason
        applied = engine.next_step
        step = self.savepoint.rewind_run(checkpoint, self.metrics)
        body = {"from_step": applied, "to_step": step, "steps_lost": applied - step, "reason": str(reason)}
        self.observe("fell_back", body)
        library = StageLibrary(self.source, self.plan, checkpoint)
        engine.fall_back(library, step, library.stage_digests())
        return step
