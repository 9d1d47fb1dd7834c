"""The records of a run while it goes: metrics, events, TensorBoard, the progress bar, a drill's ground truth."""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.config import printable_text
from phalanx.engine import UNGUARDED, StepResult
from phalanx.errors import CheckpointError, CutLogError
from phalanx.pipeline import Observe
from phalanx.security.audit import AuditLog
from phalanx.telemetry import CurveWriter, MetricsFile, ProgressDisplay, StepReading, read_metrics
from phalanx.telemetry.progress import Kind, ShownParties
from phalanx.train.batches.preferences import PreferenceScores
from phalanx.train.batches.scores import Scores, ValidationResult, validation_row
from phalanx.train.records.samples import StepSamples


class GroundTruth:
    """A reader of the attackers' own log, as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.attacked: set[tuple[str, int]] = set()
        """(party, step) of every step in which a party lied."""

    def read_new_lies(self) -> None:
        """Read new lines; a line that is still being written waits for the next call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for row in file:
                if not row.endswith(b"\n"):
                    break
                record = json.loads(row)
                self.attacked.add((record["party"], record["step"]))
                self._offset += len(row)

    def attacked_steps(self) -> set[int]:
        """Steps in which an attacker lied."""
        return {step for _, step in self.attacked}


_MAX_CHARACTERS = 2000
# a conviction must outlive even the machine: a resumed run reads here which party may not come back
LASTING = ("run_started", "run_resumed", "verdict", "evicted", "revoked", "client_excluded")
_SAID: dict[str, tuple[Kind, str]] = {
    "awaiting": ("note", "listening on {address}; waiting for {parties}"),
    "log_head_ignored": ("alarm", "the log head of {party} is ignored: {reason}"),
    "not_let_in": ("eviction", "{party} is refused: {reason}"),
    "guarantees": ("note", "from step {step} on: {said}"),
    "guarantee_weaker": ("alarm", "stage {stage} is now checked less ({now}): {meaning}"),
    "alarm": ("alarm", "step {step}: the result of the shadow of stage {stage} differs from that of the stage"),
    "drift": (
        "alarm",
        "step {step}: the results of {party} at stage {stage} drift to one side, below the tolerance; audited in full",
    ),
    "doubts_not_followed": (
        "alarm",
        "step {step}: {auditor} repeatedly doubted the weight gradient of stage {stage}, which was right each "
        "time; from now on one step in {steps_per_doubt} is recomputed for it",
    ),
    "verdict": ("verdict", "verdict: {party} is guilty: {reason}"),
    "verdict_refused": (
        "alarm",
        "step {step}: {accuser} accused {party}, but the evidence is invalid: {why}; nobody is evicted",
    ),
    "evicted": ("eviction", "{party} is evicted"),
    "revoked": ("eviction", "the certificate of {party} is revoked: {reason}"),
    "replaced": ("eviction", "step {step}: {party} is lost, not convicted ({cause}): {reason}"),
    "lost": ("eviction", "{party} is lost"),
    "left": ("note", "{party} handed over its stages and left"),
    "batch_skipped": ("alarm", "step {step}: batch {number} is dropped and the next one used instead: {reason}"),
    "spike_attributed": ("alarm", "step {step}: the spike came from the {fault}: {by} ({action})"),
    "stopped_early": (
        "note",
        "ended early after step {step}: {validations_without_improvement} validations in a row without "
        "improvement; the best was after step {best_step}",
    ),
    "leak_price": ("note", "leak meter: {rows} rows took {wall_s:.2f} s; they are measured every {every} steps"),
    "leak_limit": (
        "alarm",
        "step {step}: a canary is exposed by {exposure_bits:.1f} bits, at most {limit:g} are allowed ({action}): the "
        "model repeats what it was trained on; deduplicate the text, train shorter, or add [privacy]",
    ),
    "budget_spent": (
        "note",
        "the privacy budget is spent: epsilon {epsilon_spent:.3f} of {epsilon} at delta {delta}",
    ),
    "budget_told": (
        "note",
        "privacy: epsilon {epsilon_spent:.3f} of {epsilon} spent at delta {delta}",
    ),
    "fell_back": (
        "eviction",
        "returning from step {from_step} to the checkpoint of {to_step}: {reason}",
    ),
    "checkpoint_failed": ("alarm", "no checkpoint of step {step}, training continues: {reason}"),
    "journal_failed": ("alarm", "the journal stopped, training continues: {reason}"),
    "checkpoint_not_copied": ("alarm", "the checkpoint of step {step} exists on this disk only: {reason}"),
    "client_refused": (
        "alarm",
        "step {step}: the data of {client} is ignored: {reason}, {figure} of at most {bound}",
    ),
    "client_appraised": ("note", "the enclave appraised {client}: {evidence} evidence, by policy {policy:.16}"),
    "client_evidence_refused": (
        "alarm",
        "the enclave ignores {client}, whose evidence does not meet its policy in the run file: {reason}",
    ),
    "client_excluded": ("eviction", "step {step}: {client} is excluded: {reason}, {figure} of at most {bound}"),
    "round_lost": ("alarm", "round {round}: is lost and changed no weights: {reason}"),
    "site_left_out": ("alarm", "round {round}: continues without {site}: {reason}"),
    "site_excluded": ("eviction", "round {round}: {site} gets no further orders: {reason}"),
    "rolled_back": ("takeover", "the run returns from step {step} to step {to} and repeats the undone steps"),
    "distrusted": ("eviction", "step {step}: {party} is replaced after a fault"),
    "state_not_kept": ("alarm", "no conviction can return the run to step {step}: {reason}"),
    "takeover": ("takeover", "stage {stage} is now served by {by}; step {step} is repeated"),
}


def describe_event(kind: str, body: dict[str, object]) -> tuple[Kind, str] | None:
    """Describe an event for people, with its style; None where it needs no mention."""
    if kind not in _SAID:
        return None
    style, text = _SAID[kind]
    values = {name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in body.items()}
    return style, printable_text(text.format(**values), _MAX_CHARACTERS)


@contextlib.contextmanager
def announce_waits(log: AuditLog, console: Console) -> Iterator[Observe]:
    """Show the run's waits before it has a recorder; log them once workers have reported their heads of the log.

    A log that was cut is left as it is.
    """
    pending: list[tuple[str, dict[str, Any]]] = []

    def announce(kind: str, body: dict[str, Any]) -> None:
        pending.append((kind, body))
        words_of_event = describe_event(kind, body)
        if words_of_event is not None:
            console.print(words_of_event[1], markup=False, highlight=False)

    try:
        yield announce
    except CutLogError:
        pending.clear()
        raise
    finally:
        for kind, body in pending:
            log.append_event(kind, body)


@dataclass
class RunningTotals:
    """Running figures of a run, of this session and those before it."""

    steps: int = 0
    """Applied steps."""
    last_step: int = -1
    """Number of the last applied step; with none lost, one less than `steps`."""
    tokens: int = 0
    audits: int = 0
    alarms: int = 0
    wall_s: float = 0.0
    """Time inside steps; validation, checkpoints and waiting for workers are not in it."""
    loss_first: float | None = None
    loss_last: float | None = None

    def count_step(self, result: StepResult, tokens: int, wall_s: float) -> None:
        """Count one applied step."""
        self.steps += 1
        self.last_step = result.step
        self.tokens += tokens
        guard = result.guard or UNGUARDED
        self.audits += guard.num_audits
        self.alarms += guard.num_alarms
        self.wall_s += wall_s
        # sites that bring noise tell no loss, and those of a killed owner told it to that one
        if math.isfinite(result.loss):
            self.loss_first = result.loss if self.loss_first is None else self.loss_first
            self.loss_last = result.loss

    def to_json(self, *, is_private: bool) -> dict[str, Any]:
        """Return the totals for a checkpoint; of private rows nothing that depends on which were drawn."""
        untold: dict[str, Any] = {"tokens": 0, "wall_s": 0.0, "loss_first": None, "loss_last": None}
        return asdict(self) | (untold if is_private else {})

    def complete_from(self, metrics: Path) -> None:
        """Take from `metrics.jsonl` what a checkpoint of private rows has left out."""
        if self.wall_s or not metrics.exists():
            return
        rows = [row for row in read_metrics(metrics) if row["step"] <= self.last_step]
        losses = [row["loss"] for row in rows if row["loss"] is not None]
        self.tokens, self.wall_s = sum(row["tokens"] for row in rows), sum(row["wall_s"] for row in rows)
        self.loss_first, self.loss_last = (losses[0], losses[-1]) if losses else (None, None)

    def load_json(self, saved: dict[str, Any]) -> None:
        """Take over the totals of earlier sessions."""
        field_names = {item.name for item in fields(self)}
        if set(saved) != field_names:
            raise CheckpointError(
                f"checkpoint: totals {sorted(saved)}, expected {sorted(field_names)}; use an older one"
            )
        for key, value in saved.items():
            setattr(self, key, value)


class RunRecorder:
    """The loop's Recorder; observes, never decides."""

    def __init__(
        self,
        metrics: MetricsFile,
        log: AuditLog,
        board: CurveWriter,
        progress: ProgressDisplay,
        truth: GroundTruth,
        totals: RunningTotals,
    ) -> None:
        self.totals = totals
        self.truth = truth
        self.log = log
        self.samples = StepSamples()
        self.figures: Mapping[str, float] = {}
        """What the source of the present batch says of it."""
        self.evaluation: Mapping[str, Mapping[str, float | int | None]] = {}
        """Figures of suites after the present step by ``suite.metric``; empty where it was not evaluated."""
        self.objectives: Mapping[str, Mapping[str, float]] = {}
        """Loss, weight and rows of each objective in the present step; empty where there is one."""
        self._metrics = metrics
        self._board = board
        self._progress = progress
        self._accuracy: float | None = None

    def show_parties(self, parties: ShownParties) -> None:
        """Show the parties beside the progress from now on."""
        self._progress.show_parties(parties)

    def observe_event(self, kind: str, body: dict[str, object]) -> None:
        """Write an event to the audit log and print it for people."""
        self.log.append_event(kind, body)
        if kind in LASTING:
            self.log.sync_events()
        self._progress.count_decision(kind, body.get("party"))
        words_of_event = describe_event(kind, body)
        if words_of_event is not None:
            self._progress.print_message(words_of_event[1], words_of_event[0])

    def record_validation(self, value: ValidationResult, num_steps: int) -> None:
        """A validation after so many finished steps ended."""
        self._board.add_scalars(value.curve_points(), num_steps)
        self._board.add_histograms(value.histograms, num_steps)
        for number, sample in enumerate(value.samples):
            self._board.add_text(f"samples/{number}", f"{sample.prompt}{sample.text}", num_steps)
            self._progress.print_message(f"  {sample.prompt!r} -> {sample.text!r}", "note")

    def record_step(
        self, result: StepResult, *, tokens: int, wall_s: float, lr: float, validation: ValidationResult | None
    ) -> None:
        """Record an applied step; `validation` is the measurement after it, where there was one."""
        self.truth.read_new_lies()
        totals, guard = self.totals, result.guard or UNGUARDED
        totals.count_step(result, tokens, wall_s)
        rate = tokens / wall_s
        self._metrics.append_record(
            {
                "step": result.step,
                "time": time.time(),
                "batch": result.batch,
                "samples_digest": self.samples.digest_of_step(result.step),
                "loss": result.loss,
                **self.figures,
                "lr": lr,
                "grad_norm": result.gradient_norm,
                "tokens": tokens,
                "tokens_per_s": rate,
                "wall_s": wall_s,
                "attempts": guard.attempts,
                "audits": guard.num_audits,
                "alarms": guard.num_alarms,
                "attacked": result.step in self.truth.attacked_steps(),
                "repaired": guard.attempts > 1,
                **(validation_row(None) if validation is None else validation.metrics_row()),
                **({"evaluation": self.evaluation} if self.evaluation else {}),
                **({"objectives": self.objectives} if self.objectives else {}),
                "phases": result.phases,
                "bytes": result.bytes_by_link,
                "bytes_claimed": list(result.claimed_links),
                **({"party_phases": result.party_phases} if result.party_phases else {}),
            }
        )
        figures = {f"train/{name}": value for name, value in self.figures.items()}
        figures |= {
            f"evaluation/{name.replace('.', '/', 1)}": figure["value"]
            for name, figure in self.evaluation.items()
            if figure["value"] is not None
        }
        figures |= {f"train/{name}/loss": part["loss"] for name, part in self.objectives.items()}
        self._board.add_scalars(
            {"train/loss": result.loss, "train/lr": lr, "train/tokens_per_s": rate, **figures}, result.step
        )
        self._progress.show_step(result.step + 1, self._make_reading(result, rate, wall_s, validation))
        if validation is not None and result.step > 0:
            self._progress.print_message(f"step {result.step + 1}: {validation}")

    def _make_reading(
        self, result: StepResult, rate: float, wall_s: float, validation: ValidationResult | None
    ) -> StepReading:
        if validation is not None and isinstance(validation.own, Scores | PreferenceScores):
            self._accuracy = validation.own.accuracy
        is_unaudited, wait_s = result.guard is None, self.figures.get("data_wait_s")
        is_untold = result.num_targets == 0 and math.isnan(result.loss)
        return StepReading(
            result.loss,
            rate,
            self.totals.audits,
            self.totals.alarms,
            self._accuracy,
            update_norm=result.gradient_norm if is_untold else None,
            epsilon=self.figures.get("epsilon"),
            data_share=wait_s / wall_s if is_unaudited and wait_s is not None else None,
            memory_bytes=self.figures.get("peak_memory_bytes", 0.0),
            mfu=self.figures.get("mfu"),
        )
