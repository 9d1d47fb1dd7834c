"""The hooks around the steps of a run: validation and checkpoints, when it is time for them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from phalanx.checkpoint import BestCheckpoint, Shard
from phalanx.data import Batch, validation_batches
from phalanx.data.batch import BatchPart
from phalanx.data.config import HELD_OUT
from phalanx.data.loader import HeldOut
from phalanx.engine import NO_LIMITS, UNGUARDED, StepLimits, StepResult
from phalanx.errors import FailedBatchError, SpikeError
from phalanx.objectives import RolloutSettings
from phalanx.pipeline import PipelineEngine
from phalanx.policy import check_exposure, raise_breaches
from phalanx.telemetry import Histogram
from phalanx.telemetry.histogram import HistogramOf
from phalanx.train.batches.evaluations import SuiteEvaluator
from phalanx.train.batches.leak_meter import LeakMeter
from phalanx.train.batches.mixed import LearnedPart, describe_parts, losses_of_parts
from phalanx.train.batches.preferences import PreferenceScores
from phalanx.train.batches.rollouts import check_fresh
from phalanx.train.batches.samples import TextSample, TextSampler
from phalanx.train.batches.scores import StageJudge, Validation, ValidationResult
from phalanx.train.batches.validation import measure_perplexities, summed_losses
from phalanx.train.config import RunConfig
from phalanx.train.records.device_use import DeviceUse
from phalanx.train.records.record import RunRecorder
from phalanx.train.records.stability import StabilityJudge
from phalanx.train.records.summary import Figures
from phalanx.train.saving.saver import PlainSaver

_PARTS: dict[str, HistogramOf] = {"weight": "weights", "exp_avg": "gradients", "momentum_buffer": "gradients"}
"""What of a state is drawn. A gradient itself is a worker's word and is gone after its step; the optimizer's first
moment is part of the state that holder and shadow have signed."""


def shard_histograms(shards: Iterable[Shard], bins: int) -> Iterator[Histogram]:
    """Yield a histogram of every parameter, and of its gradients' running mean where the optimizer keeps one.

    Args:
        shards: The state, one stage at a time.
    """
    for shard in shards:
        for key, tensor in shard.tensors.items():
            part, _, name = key.partition("/")
            if part in _PARTS:
                yield histogram_of(_PARTS[part], name, tensor, bins)


def histogram_of(of: HistogramOf, name: str, tensor: Tensor, bins: int) -> Histogram:
    """Return the histogram of one tensor; where all values are equal, they are in the middle of an interval of 1."""
    values = tensor.detach().to("cpu", torch.float32).flatten()
    finite = values[torch.isfinite(values)]
    num_odd = values.numel() - finite.numel()
    if finite.numel() == 0:
        return Histogram(of, name, 0.0, 1.0, (0,) * bins, num_odd)
    low, high = (float(bound) for bound in torch.aminmax(finite))
    if not high > low:
        low, high = low - 0.5, high + 0.5
    # counts in float64, for above 2 ** 24 float32 counts no further
    counts = torch.histc(finite.double(), bins, low, high)
    return Histogram(of, name, low, high, tuple(int(bin_count) for bin_count in counts), num_odd)


VALIDATION_BATCH = 8
"""Held-out rows at once."""


OnValidation = Callable[[int, ValidationResult], None]
"""Is told of a validation after so many finished steps."""


@dataclass(frozen=True)
class ValidationPlan:
    """The sets that a run is validated on, and who is told of it.

    Attributes:
        on_validation: Called once a step with a validation is recorded and saved; None where nobody asks.
        leak_meter: Measures a leak at its own interval; None where the run file has no ``[leak_meter]``.
        evaluator: Asks the model by suites at its own interval; None where the run file has no ``[evaluate]``.
        pairs: Held-out pairs of further objectives, each with its own measure.
    """

    sets: Mapping[str, HeldOut]
    on_validation: OnValidation | None = None
    leak_meter: LeakMeter | None = None
    evaluator: SuiteEvaluator | None = None
    pairs: tuple[LearnedPart, ...] = ()


class TrainedModel(Protocol):
    """The trained model, as far as it is measured and saved."""

    def measure_sets(self, sets: Sequence[Iterable[Batch]]) -> Sequence[Validation]:
        """Measure it on the held-out batches of each set."""

    def measure_rows(self, rows: Sequence[Batch]) -> Sequence[float]:
        """Sum of nats of each batch of one row."""

    def settle_steps(self) -> None:
        """Wait until nothing of a finished step is under way."""


@runtime_checkable
class JudgedModel(TrainedModel, Protocol):
    """A model of which this process can have each stage, and the loss of each microbatch."""

    @property
    def microbatch_losses(self) -> Sequence[float]:
        """Summed losses of the microbatches of the last step, in the order of the rows."""

    def judge_stages(self, judge: StageJudge, sets: Sequence[Iterable[Batch]]) -> Sequence[Validation]:
        """Measure the model on each set by a measure of stages."""


@runtime_checkable
class WritesTexts(Protocol):
    """A trained model that can continue prompts."""

    def sample_texts(self) -> tuple[TextSample, ...]:
        """Texts of the model as it is; none where the run file asks for none."""


class StagesInTurn:
    """A pipeline's stages, measured by the owner alone, one behind the other.

    Args:
        sampler: Has the model write texts; None where the run file asks for none.
    """

    def __init__(
        self, engine: PipelineEngine, sampler: TextSampler | None = None, judge: StageJudge = measure_perplexities
    ) -> None:
        self._engine = engine
        self._sampler = sampler
        self._judge = judge

    def measure_sets(self, sets: Sequence[Iterable[Batch]]) -> Sequence[Validation]:
        """Measure the model on the held-out batches of each set.

        Guarantees:
            The weights are those that holder and shadow have signed after the last verified step, and the owner alone
            computes with them: no figure is another party's claim.
        """
        return self.judge_stages(self._judge, sets)

    @property
    def microbatch_losses(self) -> Sequence[float]:
        """Summed losses of the microbatches of the last step."""
        return self._engine.microbatch_losses

    def judge_stages(self, judge: StageJudge, sets: Sequence[Iterable[Batch]]) -> Sequence[Validation]:
        """As `measure_sets`, by another measure."""
        return judge((copy.module for copy in self._engine.fetch_stages("weights")), sets)

    def measure_rows(self, rows: Sequence[Batch]) -> list[float]:
        """Sum of nats of each row, as `measure_sets` measures."""
        stages = (copy.module for copy in self._engine.fetch_stages("weights"))
        return [total for total, _ in summed_losses(stages, [[row] for row in rows])]

    def sample_texts(self) -> tuple[TextSample, ...]:
        """Texts of the model as it is, which needs the weights of all stages at once in this process."""
        if self._sampler is None:
            return ()
        return tuple(self._sampler.write_samples([copy.module for copy in self._engine.fetch_stages("weights")]))

    def agreed_weights(self) -> dict[str, Tensor]:
        """All weights by name, as holder and shadow have signed them after the last verified step."""
        modules = [copy.module for copy in self._engine.fetch_stages("weights")]
        return {name: parameter.detach() for module in modules for name, parameter in module.all_parameters().items()}

    def settle_steps(self) -> None:
        """Wait for verdicts that are behind."""
        self._engine.settle_last_step()


class RunHooks:
    """The loop's Hooks."""

    def __init__(
        self,
        run: RunConfig,
        trained: TrainedModel,
        validations: ValidationPlan,
        recorder: RunRecorder,
        saver: PlainSaver,
        figures: Figures,
    ) -> None:
        self._run = run
        self._on_validation = validations.on_validation
        self._unreported_validation: ValidationResult | None = None
        self._trained = trained
        self._sets, self._pairs = validations.sets, validations.pairs
        self._parts: tuple[BatchPart, ...] = ()
        self._recorder = recorder
        self._saver = saver
        self._figures = figures
        self._leak_meter, self._evaluator = validations.leak_meter, validations.evaluator
        self._is_leaking = False
        self._policy = None if run.policy is None else run.policy.read_policy().policy
        self._went_back = False
        self._use = DeviceUse(run)
        rule = run.train.stability
        # an engine with a guard repeats such a step itself, with its audits
        self._stability = (
            None
            if rule is None
            else StabilityJudge(rule, run.train.max_failed_batches, is_repeated=run.stage_guard is not None)
        )
        self._drawn, self._passed = Counter[int](), Counter[int]()
        """Batches of each step that were drawn in this session, and that a return to a checkpoint passed."""

    def note_position(self, step: int) -> None:
        """A step is about to begin."""
        self._saver.note_step_begin(step)
        self._use.start_step()

    def note_batch(self, step: int, batch: Batch) -> None:
        """A batch was drawn for a step."""
        self._use.end_batch_wait()
        self._recorder.samples.note_samples(step, batch.indices)
        if self._stability is not None:
            self._drawn[step] += 1
            self._stability.begin_batch()
        self._recorder.figures, self._parts = batch.figures, batch.parts

    def make_limits(self, step: int) -> StepLimits:
        """What a step is measured by before it is applied."""
        return NO_LIMITS if self._stability is None else self._stability.make_limits(step)

    def decide_retry(self, step: int, number: int, reason: FailedBatchError) -> bool:
        """Whether the same batch is tried once more, as `StabilityJudge` decides.

        Raises:
            ReturnError: The run goes back to a checkpoint instead.
        """
        judge = self._stability
        if judge is None or not isinstance(reason, SpikeError):
            return False
        if judge.decide_repeat(step, reason):
            return True
        if number > self._run.train.max_failed_batches:
            self._recorder.observe_event("spike_attributed", judge.attribute_spikes(step, "state", judge.spikes))
        return False

    def load_steps(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take over the steps that were applied so far, from the lines of the metrics."""
        if self._stability is not None:
            self._stability.load_steps(rows)

    def pass_batches(self, step: int, reason: Exception) -> None:
        """Record that all batches since a checkpoint of a step are passed: step by step they are not used again."""
        num_passed = self._forget_batches(step)
        for number in range(1, num_passed + 1):
            self._record_skipped(step, number, reason)
        self._passed[step] = num_passed

    def redo_steps(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Forget the batches and spikes since a checkpoint of a step: these steps are done again."""
        self._forget_batches(step)
        if self._stability is not None:
            self._stability.load_steps(rows)
            self._stability.forget_spikes()

    def _forget_batches(self, step: int) -> int:
        counters = (self._drawn, self._passed)
        return sum(counter.pop(later) for counter in counters for later in list(counter) if later >= step)

    def measure_untouched(self, say: Callable[[str], None]) -> None:
        """Measure the untouched model."""
        value = self._measure_model(0)
        self._figures.note_validation(value, first=True)
        say(f"untouched model: {value}")

    def record_skipped_batch(self, step: int, number: int, reason: FailedBatchError) -> None:
        """A batch was given up."""
        self._record_skipped(step, self._passed[step] + number, reason)

    def _record_skipped(self, step: int, number: int, reason: Exception) -> None:
        body: dict[str, object] = {"step": step, "number": number, "reason": str(reason)}
        self._figures.observe("batch_skipped", body)
        self._recorder.observe_event("batch_skipped", body)
        self._use.restart_batch_wait()

    def validate_if_due(self, num_steps: int) -> ValidationResult | None:
        """Validate after so many finished steps, when it is time for it."""
        every = self._run.train.validate_every
        is_regular = bool(every) and num_steps % every == 0
        if is_regular or num_steps == self._run.train.steps:
            value = self._measure_model(num_steps)
            self._figures.note_validation(value)
            self._note_losses(value, num_steps, is_regular=is_regular)
            self._unreported_validation = value
            return value
        # the first line has the untouched model's, so that a curve has its beginning
        return self._figures.first_validation if num_steps == 1 else None

    def note_step(
        self, result: StepResult, *, tokens: int, wall_s: float, lr: float, validation: ValidationResult | None
    ) -> None:
        """Record an applied step with its figures, leak measurement and evaluation.

        Args:
            lr: Learning rate by the schedule; a factor after a spike is multiplied with it here.

        Raises:
            StaleRolloutsError: Its texts were written by weights that were undone meanwhile.
        """
        if isinstance(self._run.train.objective, RolloutSettings):
            check_fresh(result)
        self._went_back = self._went_back or (result.guard or UNGUARDED).steps_redone > 0
        self._recorder.figures = {**self._recorder.figures, **self._use.usage_figures(tokens / wall_s)}
        if self._leak_meter is not None and self._leak_meter.is_due(result.step + 1, self._run.train.steps):
            self._recorder.figures = {**self._recorder.figures, **self._measure_leak(self._leak_meter, result.step)}
        if self._parts and isinstance(self._trained, JudgedModel):
            losses = losses_of_parts(self._parts, self._trained.microbatch_losses)
            self._recorder.objectives = describe_parts(self._parts, losses)
        judge, step = self._stability, result.step
        # read before the step counts, as it was for the engine
        lr = lr if judge is None else lr * judge.make_limits(step).rate_factor
        self._note_evaluation(step + 1)
        self._recorder.record_step(result, tokens=tokens, wall_s=wall_s, lr=lr, validation=validation)
        event = None if judge is None else judge.note_applied(step, result.loss, result.gradient_norm)
        if event is not None:
            self._recorder.observe_event("spike_attributed", event)

    def _note_evaluation(self, num_steps: int) -> None:
        """Ask the model by the suites of the run file, when it is time for it."""
        self._recorder.evaluation = {}
        if self._evaluator is not None and self._evaluator.is_due(num_steps):
            # the weights of a checkpoint of this step
            self._trained.settle_steps()
            result = self._evaluator.evaluate_model(num_steps, self._trained.measure_rows)
            self._recorder.evaluation = result.brief_figures
            self._figures.evaluation = {"step": num_steps, "figures": result.brief_figures}

    def save_if_due(self, num_steps: int) -> None:
        """Save a checkpoint, or begin to, when it is time for it; then tell of the step's validation."""
        self._save_when_due(num_steps)
        value, self._unreported_validation = self._unreported_validation, None
        if value is not None and self._on_validation is not None:
            self._on_validation(num_steps, value)

    def _save_when_due(self, num_steps: int) -> None:
        saver, every = self._saver, self._run.checkpoint.every
        saver.advance_pending()
        last = self.is_over(num_steps)
        # the best one is not given up for what comes after it
        at_once = last or self._went_back or saver.is_overdue or saver.would_be_best(num_steps)
        if not (at_once or (every and num_steps % every == 0)):
            return
        beside = self._run.checkpoint.asynchronous and not at_once
        guard = self._run.stage_guard
        if not beside or (guard is not None and guard.commit_lag):
            # what the log says before it is what the checkpoint's figures have counted
            self._trained.settle_steps()
        # the log must not be behind a checkpoint that survives the machine's crash
        self._recorder.observe_event("checkpoint", {"step": num_steps})
        self._recorder.log.sync_events()
        if beside:
            saver.begin_save(num_steps)
        elif saver.save_now(num_steps, alone=self._went_back, last=last):
            # after a rollback no older one stays: it may hold what was undone
            self._went_back = False

    def is_over(self, num_steps: int) -> bool:
        """Whether the run ends after so many steps: its last one, or one where validation brings nothing any more."""
        train, budget = self._run.train, self._figures.budget
        is_spent = budget is not None and budget.is_spent
        return (
            num_steps >= train.steps
            or is_spent
            or self._is_leaking
            or self._figures.stopping.is_over(train.early_stopping)
        )

    def measure_resumed_leak(self, step: int) -> None:
        """Measure the leak where a run goes on, so that one that was stopped for it does not."""
        meter = self._leak_meter
        if step and meter is not None and meter.config.action == "stop" and meter.config.max_exposure is not None:
            self._measure_leak(meter, step - 1)

    def _measure_leak(self, meter: LeakMeter, step: int) -> Mapping[str, float]:
        self._trained.settle_steps()
        reading = meter.measure_leak(self._trained.measure_sets)
        if self._figures.leak is None:
            steps_s = self._recorder.totals.wall_s / max(1, self._recorder.totals.steps) * meter.config.every
            price: dict[str, object] = {"rows": meter.num_rows, "every": meter.config.every, "wall_s": reading.wall_s}
            self._recorder.observe_event(
                "leak_price", {**price, "share": reading.wall_s / steps_s if steps_s else None}
            )
        self._figures.note_leak(step, reading.figures, reading.wall_s)
        if self._policy is not None:
            breaches = check_exposure(self._policy, reading.figures.get("exposure_bits"))
            raise_breaches(self._policy, breaches, f"to go on after step {step}")
        if meter.is_above(reading):
            self._is_leaking = meter.config.action == "stop"
            body: dict[str, object] = {"step": step, "exposure_bits": reading.figures["exposure_bits"]}
            body |= {"limit": meter.config.max_exposure, "action": meter.config.action}
            self._recorder.observe_event("leak_limit", body)
        return reading.metrics_row()

    def report_early_stop(self) -> None:
        """Say why the run ends before its last step, where it does."""
        rule = self._run.train.early_stopping
        if rule is not None and self._figures.stopping.is_over(rule):
            self._recorder.observe_event("stopped_early", self._figures.stopping.decision_facts(rule))
        if self._figures.budget is not None:
            spent = self._figures.budget.summary_fields()
            self._recorder.observe_event("budget_spent" if self._figures.budget.is_spent else "budget_told", spent)

    def _measure_model(self, num_steps: int) -> ValidationResult:
        batches = [validation_batches(corpus, VALIDATION_BATCH) for corpus in self._sets.values()]
        scores = dict(zip(self._sets, self._trained.measure_sets(batches), strict=True))
        held_out = scores.pop(HELD_OUT, None)
        named = {name: value for name, value in scores.items() if isinstance(value, float | PreferenceScores)}
        for part in self._pairs:
            if part.judge is not None and isinstance(self._trained, JudgedModel):
                (value,) = self._trained.judge_stages(part.judge, [validation_batches(part.corpus, VALIDATION_BATCH)])
                named |= {part.name: value} if isinstance(value, PreferenceScores) else {}
        samples = self._trained.sample_texts() if isinstance(self._trained, WritesTexts) else ()
        result = ValidationResult(held_out, named, samples, self._take_histograms(num_steps))
        self._recorder.record_validation(result, num_steps)
        return result

    def _take_histograms(self, num_steps: int) -> tuple[Histogram, ...]:
        """Return histograms of the present state's tensors; none where the run file has no ``[train.histograms]``."""
        settings = self._run.train.histograms
        # before the first step there is no gradient
        if settings is None or not num_steps:
            return ()
        self._trained.settle_steps()
        return tuple(shard_histograms(self._saver.current_shards(), settings.bins))

    def _note_losses(self, value: ValidationResult, num_steps: int, *, is_regular: bool) -> None:
        """Take what early end and best checkpoint are decided by.

        A validation at the last step alone counts for no early end: a longer run would not have had it.
        """
        rule, best = self._run.train.early_stopping, self._run.checkpoint.best
        if rule is not None and is_regular:
            self._figures.stopping.add_validation(num_steps, value.loss_on(rule.on), rule.on)
        if best is not None:
            self._figures.candidate = BestCheckpoint(num_steps, best, value.loss_on(best))
