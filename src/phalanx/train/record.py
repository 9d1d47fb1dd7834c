"""Everything that a run leaves behind while it goes: metrics, events, TensorBoard, the progress bar."""

import time
from dataclasses import dataclass, field

from phalanx.pipeline import StepResult
from phalanx.security.audit import AuditLog
from phalanx.telemetry import MetricsFile, Progress, Reading, TensorBoardWriter
from phalanx.train.ground_truth import GroundTruth

_SAID = {
    "alarm": ("alarm", "step {step}: the shadow of stage {stage} got another result than stage {stage} sent"),
    "verdict": ("verdict", "verdict: {party} is guilty: {reason}"),
    "evicted": ("eviction", "{party} is evicted"),
    "lost": ("eviction", "{party} is gone"),
    "takeover": ("takeover", "stage {stage} is now served by {by}; step {step} is done again"),
}


@dataclass
class Totals:
    """Running figures of a run, of this session and those before it."""

    losses: list[float] = field(default_factory=list)
    tokens: int = 0
    audits: int = 0
    alarms: int = 0
    wall_s: float = 0.0


class RunRecorder:
    """The loop's Recorder; observes, never decides."""

    def __init__(
        self,
        metrics: MetricsFile,
        log: AuditLog,
        board: TensorBoardWriter,
        progress: Progress,
        truth: GroundTruth,
        totals: Totals,
    ) -> None:
        self.totals = totals
        self.truth = truth
        self.log = log
        self._metrics = metrics
        self._board = board
        self._progress = progress
        self._validation: float | None = None
        self._started = time.perf_counter()

    def observe(self, kind: str, body: dict[str, object]) -> None:
        """Write an event to the audit log and say what a person wants to know."""
        self.log.append(kind, body)
        if kind in _SAID:
            style, text = _SAID[kind]
            self._progress.message(text.format(**body), style)  # type: ignore[arg-type]

    def validated(self, perplexity: float, num_steps: int) -> None:
        """A validation ended; its figure goes with the next step's line."""
        self._validation = perplexity
        self._board.scalars({"validation/perplexity": perplexity}, num_steps)

    def stepped(self, result: StepResult, *, tokens: int, wall_s: float, lr: float) -> None:
        """A step was applied."""
        self.truth.refresh()
        totals = self.totals
        totals.losses.append(result.loss)
        totals.tokens += tokens
        totals.audits += result.num_audits
        totals.alarms += result.num_alarms
        totals.wall_s += wall_s
        self._metrics.append(
            {
                "step": result.step,
                "loss": result.loss,
                "lr": lr,
                "grad_norm": result.gradient_norm,
                "tokens": tokens,
                "tokens_per_s": tokens / wall_s,
                "wall_s": wall_s,
                "attempts": result.attempts,
                "audits": result.num_audits,
                "alarms": result.num_alarms,
                "attacked": result.step in self.truth.attacked_steps(),
                "repaired": result.attempts > 1,
                "validation_perplexity": self._validation,
                "phases": result.phases,
                "bytes": result.bytes_by_link,
            }
        )
        self._validation = None
        self._board.scalars({"train/loss": result.loss, "train/lr": lr, "train/tokens_per_s": tokens / wall_s}, result.step)
        reading = Reading(result.loss, tokens / wall_s, totals.audits, totals.alarms)
        self._progress.update(result.step + 1, reading)
