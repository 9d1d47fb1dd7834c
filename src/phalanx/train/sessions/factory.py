"""The interface between a session and an engine: it is prepared, finds its state, runs, and is finished."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from phalanx.checkpoint import Checkpoint
from phalanx.checkpoint.export import RunTokenizer
from phalanx.data.config import HELD_OUT
from phalanx.data.loader import HeldOut
from phalanx.engine import Engine
from phalanx.errors import TrainingError
from phalanx.models import ModelSource
from phalanx.telemetry import MetricsFile
from phalanx.train.batches.evaluations import SuiteEvaluator
from phalanx.train.batches.leak_meter import LeakMeter
from phalanx.train.batches.mixed import LearnedPart
from phalanx.train.batches.samples import TextSampler
from phalanx.train.config import RunConfig
from phalanx.train.loop import Loader
from phalanx.train.records.record import RunRecorder
from phalanx.train.saving.savepoint import Savepoint
from phalanx.train.saving.saver import PlainSaver
from phalanx.train.sessions.context import SessionContext
from phalanx.train.sessions.hooks import TrainedModel

RunT_contra = TypeVar("RunT_contra", bound=RunConfig, contravariant=True)


@dataclass(frozen=True)
class RunMaterial:
    """The material of a run: model, text and batches.

    Attributes:
        sampler: Has the model write texts; None where the run file asks for none.
        vocabulary: Digest of the vocabulary; None where this process has no text.
        tokenizer: Tokenizer that the run directory keeps; None where a run exports no whole model.
        evaluator: Asks the model by suites; None where the run file has none.
        pairs: Held-out pairs of further objectives, each with its own measure.
    """

    source: ModelSource
    corpus: HeldOut
    loader: Loader
    named: Mapping[str, HeldOut] = field(default_factory=dict)
    sampler: TextSampler | None = None
    vocabulary: str | None = None
    tokenizer: RunTokenizer | None = None
    evaluator: SuiteEvaluator | None = None
    leak_meter: LeakMeter | None = None
    pairs: tuple[LearnedPart, ...] = ()

    @property
    def validation_sets(self) -> Mapping[str, HeldOut]:
        """All that the model is measured on by name; without further sets, the held-out rows must be there."""
        held_out = {HELD_OUT: self.corpus} if self.corpus.num_validation_sequences or not self.named else {}
        return {**held_out, **self.named}


@dataclass(frozen=True)
class EngineStart:
    """The point and the records with which an engine begins.

    Attributes:
        checkpoint: The state of that step; None for a run that begins from nothing.
    """

    start: int
    checkpoint: Checkpoint | None
    savepoint: Savepoint
    metrics: MetricsFile
    recorder: RunRecorder


class RunningEngine(Protocol):
    """An engine at work, with the parts that measure, save and end it."""

    @property
    def engine(self) -> Engine:
        """Runs steps."""

    @property
    def trained_model(self) -> TrainedModel:
        """Measures the model."""

    @property
    def saver(self) -> PlainSaver:
        """Saves the model."""

    def record_end(self) -> None:
        """Record the end of a run once its last step is applied: the weights' digest, and the engine's own figures."""

    def return_to_checkpoint(self, reason: TrainingError) -> int:
        """Begin again from the last checkpoint; return the next step."""


class EngineSetup(Protocol):
    """One engine of one session, before it runs."""

    @property
    def material(self) -> RunMaterial:
        """The material of the run."""

    def recover_state(self, savepoint: Savepoint) -> None:
        """Make the state that the run goes on from its newest checkpoint."""

    def open_engine(self, opening: EngineStart) -> AbstractContextManager[RunningEngine]:
        """Record where the session begins, and have the engine ready at that step."""


class EngineFactory(Protocol[RunT_contra]):
    """A factory of one kind of engine: pipeline, domain or split."""

    def prepare_setup(self, context: SessionContext[RunT_contra]) -> AbstractContextManager[EngineSetup]:
        """Open model and text; processes are ended with the context."""
