"""The hooks around the steps of a run: validation and checkpoints, when it is time for them."""

from collections.abc import Callable, Iterator
from typing import Protocol

from phalanx.data import Batch, validation_batches
from phalanx.data.loader import HeldOut
from phalanx.engine import UNGUARDED, StepResult
from phalanx.errors import FailedBatchError
from phalanx.pipeline import PipelineEngine
from phalanx.train.batches.scores import Validation, say_validation
from phalanx.train.batches.validation import perplexity
from phalanx.train.config import RunConfig
from phalanx.train.records.record import RunRecorder
from phalanx.train.records.summary import Figures
from phalanx.train.saving.saver import PlainSaver

VALIDATION_BATCH = 8
"""Held-out rows at once."""


class TrainedModel(Protocol):
    """The trained model, as far as it is measured and saved."""

    def measure(self, batches: Iterator[Batch]) -> Validation:
        """Measure it on held-out batches."""
        ...

    def settle(self) -> None:
        """Wait until nothing of a finished step is under way."""
        ...


class StagesInTurn:
    """A pipeline's stages, measured by the owner alone, one behind the other."""

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine

    def measure(self, batches: Iterator[Batch]) -> float:
        """Perplexity on held-out batches."""
        return perplexity((copy.module for copy in self._engine.copies("weights")), batches)

    def settle(self) -> None:
        """Wait for verdicts that are behind."""
        self._engine.settle()


class RunHooks:
    """The loop's Hooks."""

    def __init__(
        self,
        run: RunConfig,
        trained: TrainedModel,
        corpus: HeldOut,
        recorder: RunRecorder,
        saver: PlainSaver,
        figures: Figures,
    ) -> None:
        self._run = run
        self._trained = trained
        self._corpus = corpus
        self._recorder = recorder
        self._saver = saver
        self._figures = figures
        self._went_back = False

    def opened(self, step: int) -> None:
        """A step is about to begin."""
        self._saver.opened(step)

    def begin(self, say: Callable[[str], None]) -> None:
        """Measure the untouched model."""
        value = self._measure(0)
        self._figures.validated(value, first=True)
        say(f"untouched model: {say_validation(value)}")

    def skipped(self, step: int, number: int, reason: FailedBatchError) -> None:
        """A batch was given up."""
        body: dict[str, object] = {"step": step, "number": number, "reason": str(reason)}
        self._figures.observe("batch_skipped", body)
        self._recorder.observe("batch_skipped", body)

    def validate(self, num_steps: int) -> Validation | None:
        """Validate after so many finished steps, when it is time for it."""
        every = self._run.train.validate_every
        if num_steps == self._run.train.steps or (every and num_steps % every == 0):
            value = self._measure(num_steps)
            self._figures.validated(value)
            return value
        # the first line has the untouched model's, so that a curve has its beginning
        return self._figures.first_validation if num_steps == 1 else None

    def stepped(
        self, result: StepResult, *, tokens: int, wall_s: float, lr: float, validation: Validation | None
    ) -> None:
        """A step was applied."""
        self._went_back = self._went_back or (result.guard or UNGUARDED).steps_redone > 0
        self._recorder.stepped(result, tokens=tokens, wall_s=wall_s, lr=lr, validation=validation)

    def save(self, num_steps: int) -> None:
        """Save a checkpoint, or begin to, when it is time for it."""
        saver, every = self._saver, self._run.checkpoint.every
        saver.poll()
        last = num_steps == self._run.train.steps
        if not (self._went_back or last or saver.is_overdue or (every and num_steps % every == 0)):
            return
        beside = self._run.checkpoint.asynchronous and not (last or self._went_back or saver.is_overdue)
        if not beside or self._run.guard.commit_lag:
            # what the log says before it is what the checkpoint's figures have counted
            self._trained.settle()
        # the log must not be behind a checkpoint that survives the machine's crash
        self._recorder.observe("checkpoint", {"step": num_steps})
        self._recorder.log.sync()
        if beside:
            saver.begin(num_steps)
        elif saver.save_now(num_steps, alone=self._went_back, last=last):
            # after a rollback no older one stays: it may hold what was undone
            self._went_back = False

    def _measure(self, num_steps: int) -> Validation:
        value = self._trained.measure(validation_batches(self._corpus, VALIDATION_BATCH))
        self._recorder.validated(value, num_steps)
        return value
