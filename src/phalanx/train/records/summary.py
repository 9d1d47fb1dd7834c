"""The final figures of a run; null where they were not measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from phalanx.checkpoint import BestCheckpoint
from phalanx.config import digest_config
from phalanx.data.config import HELD_OUT
from phalanx.errors import CheckpointError
from phalanx.pipeline import weaker_guarantee
from phalanx.train.batches.preferences import PreferenceScores, read_preference_scores
from phalanx.train.batches.scores import (
    MeanReward,
    Scores,
    Validation,
    ValidationResult,
    read_named,
    read_scores,
    set_figures,
)
from phalanx.train.config import RunConfig, SplitRun
from phalanx.train.records.check_record import CheckRecord
from phalanx.train.records.comparison import HeldOutMeasure, measures_of_perplexity, measures_of_scores, worse_figures
from phalanx.train.records.record import GroundTruth, RunningTotals
from phalanx.train.records.trust import Drifts, trust_figures
from phalanx.train.train_section import EarlyStoppingConfig


@dataclass(frozen=True)
class ValidationTrend:
    """The trend of a run's validations.

    Attributes:
        best_step: Finished steps at the best one; None where no loss was finite.
        without: Validations since then, in a row, that were no improvement.
    """

    best_step: int | None
    best_loss: float
    without: int


def trend_of(losses: Sequence[tuple[int, float]], min_improvement: float) -> ValidationTrend:
    """Follow validation losses in their order; one that is no finite number is no improvement."""
    best_step, best_loss, without = None, math.inf, 0
    for step, loss in losses:
        if math.isfinite(loss) and (best_step is None or loss < best_loss - min_improvement):
            best_step, best_loss, without = step, loss, 0
        else:
            without += 1
    return ValidationTrend(best_step, best_loss, without)


@dataclass
class StoppingRecord:
    """The validation losses that an early end is decided by; a part of every checkpoint, and nothing else decides.

    Attributes:
        losses: Finished steps and loss of each validation on the set that decides, oldest first.
        on: Name of that set; None where there was no validation yet.
    """

    losses: list[tuple[int, float]] = field(default_factory=list)
    on: str | None = None

    def add_validation(self, num_steps: int, loss: float, on: str) -> None:
        """Take a validation after so many steps; those on another set, by another rule, count no more."""
        self.losses = self.losses if on == self.on else []
        self.on = on
        self.forget_from(num_steps)
        self.losses.append((num_steps, loss))

    def forget_from(self, num_steps: int) -> None:
        """Forget the validations after so many steps and more: the steps before them are done again."""
        self.losses = [row for row in self.losses if row[0] < num_steps]

    def is_over(self, rule: EarlyStoppingConfig | None) -> bool:
        """Whether the run ends here."""
        if rule is None or rule.on != self.on:
            return False
        return trend_of(self.losses, rule.min_improvement).without >= rule.patience

    def decision_facts(self, rule: EarlyStoppingConfig) -> dict[str, Any]:
        """What a decision rests on, for log and summary."""
        trend = trend_of(self.losses, rule.min_improvement)
        return {
            "step": self.losses[-1][0],
            "on": rule.on,
            "best_step": trend.best_step,
            "best_loss": trend.best_loss if trend.best_step is not None else None,
            "validations_without_improvement": trend.without,
        }

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data; a loss that is no finite number is null."""
        rows = [[step, loss if math.isfinite(loss) else None] for step, loss in self.losses]
        return {"on": self.on, "losses": rows}

    @classmethod
    def from_json(cls, saved: object) -> "StoppingRecord":
        """Read the trend of a checkpoint."""
        rows = saved.get("losses") if isinstance(saved, dict) and set(saved) == {"on", "losses"} else None
        if not isinstance(saved, dict) or not isinstance(rows, list) or not all(_is_row(row) for row in rows):
            raise CheckpointError(f"checkpoint: validations {saved!r:.80}, expected steps and losses; use an older one")
        return cls([(step, math.inf if loss is None else loss) for step, loss in rows], str(saved["on"]))


def _is_row(row: object) -> bool:
    if not isinstance(row, list) or len(row) != _COLUMNS:
        return False
    step, loss = row
    return type(step) is int and (loss is None or type(loss) is float)


_COLUMNS = 2


class RoundsSummary(Protocol):
    """The rounds of a federated run."""

    def summary_fields(self) -> dict[str, Any]:
        """Return what summary and report say."""


class SpentBudget(Protocol):
    """The privacy budget of a run, or the budgets of several sites."""

    @property
    def is_spent(self) -> bool:
        """Whether it pays for no further step."""

    def summary_fields(self) -> dict[str, Any]:
        """Return what summary and report say."""


@dataclass
class Figures:
    """The figures of a session, beside the totals of its steps."""

    status: str = "failed"
    wall_s: float = 0.0
    unigram_perplexity: float | None = None
    validation_first: float | None = None
    validation_last: float | None = None
    final_weights_digest: str | None = None
    failure: dict[str, Any] | None = None
    """What ended a run that failed."""
    takeovers: int = 0
    steps_redone: int = 0
    steps_lost: int = 0
    """Applied steps that were given up because no party could serve a stage, and done again from a checkpoint."""
    skipped_batches: set[tuple[int, int]] = field(default_factory=set)
    """Step and number of every batch that was given up; one that is met again after a resume is the same one."""
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    replaced: list[dict[str, Any]] = field(default_factory=list)
    """Parties that were there and were given up without a verdict: step, and `silent`, `late` or `refused`."""
    verdicts_refused: int = 0
    """Judgements that named a party and that the evidence did not bear out."""
    guarantees: dict[str, str] = field(default_factory=dict)
    """By stage, the weakest one that the run has had."""
    resumed_from: int | None = None
    world: dict[str, int] | None = None
    """Processes, stages and axes of this session, where they may be others than the run file's."""
    usage: dict[str, dict[str, float]] = field(default_factory=dict)
    party_phases: dict[str, dict[str, Any]] = field(default_factory=dict)
    signed_log_head: dict[str, Any] | None = None
    scores_first: Scores | PreferenceScores | None = None
    scores_last: Scores | PreferenceScores | None = None
    reward_first: float | None = None
    """Mean reward of texts to held-out prompts, of the untouched model."""
    reward_last: float | None = None
    named_first: dict[str, float | PreferenceScores] = field(default_factory=dict)
    """Perplexity of further validation sets by name, or the scores of their pairs, of the untouched model."""
    named_last: dict[str, float | PreferenceScores] = field(default_factory=dict)
    stopping: StoppingRecord = field(default_factory=StoppingRecord)
    """What an early end is decided by; empty where the run file has none."""
    candidate: BestCheckpoint | None = None
    """What the latest validation says of a checkpoint of its step, where the run file keeps the best one."""
    best: BestCheckpoint | None = None
    """The checkpoint with the best validation among those that are there."""
    texts: dict[str, Any] | None = None
    """Of a classification: the task, its texts and what one knows without a model; None of any other run."""
    split: dict[str, Any] | None = None
    """Tier, evidence, release and cost of a split run; None of any other."""
    rollouts: dict[str, Any] | None = None
    """Workers of rollouts in this session: the convicted, those left out, and requests without an answer in time."""
    tracking: list[dict[str, Any]] = field(default_factory=list)
    """Of each metrics sink of this session: sent and dropped rows, and why it ended early."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """Figures of the latest evaluation by suites in this session, and its step; empty where there was none."""
    checks: CheckRecord = field(default_factory=CheckRecord)
    drifts: Drifts = field(default_factory=Drifts)
    checkpoints: tuple[int, ...] = ()
    """Steps of the checkpoints that are there."""
    budget: SpentBudget | None = None
    """What the run's steps are charged to; None of a run without ``[privacy]``."""
    rounds: RoundsSummary | None = None
    """Of a federated run; None of any other."""
    leak: dict[str, Any] | None = None
    """The leak meter's last figures, its step, and the measurements and seconds of this session."""

    _SAVED = ("validation_first", "validation_last")
    _SCORES = ("scores_first", "scores_last")
    _REWARDS = ("reward_first", "reward_last")
    _NAMED = ("named_first", "named_last")

    @property
    def first_validation(self) -> ValidationResult:
        """Of the untouched model."""
        first_score: Validation | None = self.validation_first if self.scores_first is None else self.scores_first
        if self.reward_first is not None:
            first_score = MeanReward(self.reward_first)
        return ValidationResult(first_score, self.named_first)

    def note_validation(self, value: Validation | ValidationResult, *, first: bool = False) -> None:
        """Note what held-out text says."""
        result = value if isinstance(value, ValidationResult) else ValidationResult(value)
        which = "first" if first else "last"
        if isinstance(result.own, Scores | PreferenceScores):
            setattr(self, f"scores_{which}", result.own)
        elif isinstance(result.own, MeanReward):
            setattr(self, f"reward_{which}", _finite_or_none(result.own.reward))
        elif result.own is not None:
            setattr(self, f"validation_{which}", result.own)
        setattr(self, f"named_{which}", dict(result.named))

    def note_leak(self, step: int, figures: dict[str, float], wall_s: float) -> None:
        """Note a measurement of the leak meter."""
        before = self.leak or {"measurements": 0, "wall_s": 0.0}
        price = {"measurements": before["measurements"] + 1, "wall_s": before["wall_s"] + wall_s}
        self.leak = {"step": step, **{name: _finite_or_none(value) for name, value in figures.items()}, **price}

    def held_out_measures(self) -> list[HeldOutMeasure]:
        """What the run's own held-out rows said at first and at last; of a run without such, its named sets."""
        measures = measures_of_scores(self.scores_first, self.scores_last)
        measures.append(HeldOutMeasure("held-out reward", self.reward_first, self.reward_last, is_better_low=False))
        if self.validation_first is not None:
            measures += measures_of_perplexity("held-out loss", self.validation_first, self.validation_last)
        elif self.scores_first is None and self.reward_first is None:
            for name, first in self.named_first.items():
                last = self.named_last.get(name)
                if isinstance(first, float) and not isinstance(last, PreferenceScores):
                    measures += measures_of_perplexity(f"loss on {name}", first, last)
        return measures

    def observe(self, kind: str, body: dict[str, Any]) -> None:
        """Count a decision of the guard."""
        self.checks.observe(kind, body)
        self.drifts.observe(kind, body)
        self._observe_parties(kind, body)
        if kind == "takeover":
            self.takeovers += 1
        elif kind == "rolled_back":
            self.steps_redone += body["step"] - body["to"]
            # a model that held what is undone was measured after these
            self.stopping.forget_from(body["to"] + 1)
        elif kind == "batch_skipped":
            self.skipped_batches.add((body["step"], body["number"]))
        elif kind == "fell_back":
            self.steps_lost += body["steps_lost"]

    def _observe_parties(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "verdict":
            self.verdicts.append({key: body[key] for key in ("party", "stage", "step", "offence", "reason")})
        elif kind in ("evicted", "lost"):
            (self.evicted if kind == "evicted" else self.lost).append(body["party"])
        elif kind == "replaced":
            self.replaced.append({key: body[key] for key in ("party", "step", "cause")})
        elif kind == "verdict_refused":
            self.verdicts_refused += 1
        elif kind == "guarantees":
            for stage, name in body["stages"].items():
                self.guarantees[stage] = weaker_guarantee(name, self.guarantees.get(stage, name))

    def to_json(self) -> dict[str, Any]:
        """Return the figures for a resumed run that the audit log lacks; what is no finite number is null."""
        scores = {
            key: _plain_scores(scores_of_key)
            for key in self._SCORES
            if (scores_of_key := getattr(self, key)) is not None
        }
        saved = {key: _finite_or_none(getattr(self, key)) for key in self._SAVED}
        named = {key: _plain_named(named_of_key) for key in self._NAMED if (named_of_key := getattr(self, key))}
        stopping = {"stopping": self.stopping.to_json()} if self.stopping.losses else {}
        rewards = {key: reward for key in self._REWARDS if (reward := getattr(self, key)) is not None}
        return {**saved, **scores, **rewards, **named, **stopping, "checks": self.checks.to_json()}

    def load_json(self, saved: dict[str, Any]) -> None:
        """Take over what an earlier session knew."""
        scores = {key: saved[key] for key in self._SCORES if key in saved}
        if set(saved) - {*scores, *self._REWARDS, *self._NAMED, "stopping"} != {*self._SAVED, "checks"}:
            raise CheckpointError(
                f"checkpoint: figures {sorted(saved)}, expected {sorted((*self._SAVED, 'checks'))}; use an older one"
            )
        self.checks.load_json(saved["checks"])
        for key in self._SAVED:
            setattr(self, key, saved[key])
        for key in self._REWARDS:
            setattr(self, key, saved.get(key))
        for key, value in scores.items():
            is_of_pairs = isinstance(value, dict) and "margin" in value
            setattr(self, key, read_preference_scores(value) if is_of_pairs else read_scores(value))
        for key in self._NAMED:
            setattr(self, key, read_named(saved.get(key, {})))
        self.stopping = StoppingRecord.from_json(saved["stopping"]) if "stopping" in saved else StoppingRecord()


def summarise_run(run: RunConfig, figures: Figures, totals: RunningTotals, truth: GroundTruth) -> dict[str, Any]:
    """Everything for ``summary.json``, with the keys that scripts rely on."""
    guard = run.stage_guard
    # what remote workers did they alone know; what the owner found it knows wherever they are
    is_attack_known = not run.remote_workers
    # an enclave opens no state but its newest
    checkpoints = () if isinstance(run, SplitRun) else figures.checkpoints
    liars = {party for party, _ in truth.attacked}
    guilty = [(verdict["party"], verdict["step"]) for verdict in figures.verdicts]
    detections = set(guilty) & truth.attacked if is_attack_known else set(guilty)
    return {
        "status": figures.status,
        "failure": figures.failure,
        "steps": totals.steps,
        "tokens": totals.tokens,
        "loss_first": _finite_or_none(totals.loss_first),
        "loss_last": _finite_or_none(totals.loss_last),
        "unigram_perplexity": _finite_or_none(figures.unigram_perplexity),
        "validation_perplexity_first": _finite_or_none(figures.validation_first),
        "validation_perplexity": _finite_or_none(figures.validation_last),
        **(_reward_fields(figures) if run.train.learns_from_texts else {}),
        **({"validation_sets": _named_set_fields(figures)} if {*run.validation_names} - {HELD_OUT} else {}),
        "worse_than_before": worse_figures(figures.held_out_measures()),
        **_ending_fields(run, figures),
        "tokens_per_s": totals.tokens / totals.wall_s if totals.wall_s else None,
        "wall_s": figures.wall_s,
        "world": figures.world or run.world,
        "seed": run.train.seed,
        "config_digest": digest_config(run),
        "final_weights_digest": figures.final_weights_digest,
        "guard": _guard_mode(run),
        "preset": guard.preset_in_force if guard is not None and guard.is_enabled else None,
        "guarantees": figures.guarantees,
        "audits": totals.audits,
        "attacks_injected": len(truth.attacked) if is_attack_known else None,
        "attacked_steps": sorted(truth.attacked_steps()) if is_attack_known else None,
        "detections": len(detections),
        "false_accusations": sum(party not in liars for party, _ in guilty) if is_attack_known else None,
        "verdicts": figures.verdicts,
        "evicted": figures.evicted,
        "lost": figures.lost,
        "replaced": figures.replaced,
        "verdicts_refused": figures.verdicts_refused,
        "takeovers": figures.takeovers,
        "steps_redone": figures.steps_redone,
        "batches_skipped": len(figures.skipped_batches),
        "steps_lost": figures.steps_lost + totals.last_step + 1 - totals.steps,
        "resumed_from": figures.resumed_from,
        "usage_cpu_s": figures.usage,
        **({"party_phases": figures.party_phases} if figures.party_phases else {}),
        "audit_log_head": _log_head_fields(figures.signed_log_head),
        "audit_log_head_signed": figures.signed_log_head,
        **trust_figures(
            figures.checks, figures.drifts, checkpoints, guarded=None if guard is None else guard.is_enabled
        ),
        **_preference_fields(figures),
        **_optional_sections(figures),
    }


def _optional_sections(figures: Figures) -> dict[str, Any]:
    """Return what only some runs have."""
    sections = {
        "classification": None if figures.texts is None else _classification_fields(figures),
        "rollouts": figures.rollouts,
        "tracking": figures.tracking or None,
        "evaluation": figures.evaluation or None,
        "split": figures.split,
        "privacy": None if figures.budget is None else figures.budget.summary_fields(),
        "leak": figures.leak,
        "federated": None if figures.rounds is None else figures.rounds.summary_fields(),
    }
    return {name: section for name, section in sections.items() if section is not None}


def _classification_fields(figures: Figures) -> dict[str, Any]:
    """Return the task's facts, and the model's first and last scores; null where they were not measured."""
    facts: dict[str, Any] = dict(figures.texts or {})
    for suffix, scores in (("_first", figures.scores_first), ("", figures.scores_last)):
        for name in ("accuracy", "macro_f1", "loss"):
            facts[f"{name}{suffix}"] = None if scores is None else _finite_or_none(getattr(scores, name))
    return facts


def _preference_fields(figures: Figures) -> dict[str, Any]:
    """What the model makes of held-out pairs at first and at last; nothing of a run without pairs."""
    measured = {"_first": figures.scores_first, "": figures.scores_last}
    preferences = {
        f"{name}{suffix}": value
        for suffix, scores in measured.items()
        if isinstance(scores, PreferenceScores)
        for name, value in _plain_scores(scores).items()
    }
    return {"preferences": preferences} if preferences else {}


def _named_set_fields(figures: Figures) -> dict[str, dict[str, float | None]]:
    """The first and the last figures of each further validation set."""
    pairs: dict[str, dict[str, float | None]] = {}
    for suffix, values in (("_first", figures.named_first), ("", figures.named_last)):
        for name, value in values.items():
            pair = {f"{figure}{suffix}": _finite_or_none(score) for figure, score in set_figures(value).items()}
            pairs.setdefault(name, {}).update(pair)
    return pairs


def _reward_fields(figures: Figures) -> dict[str, float | None]:
    return {"validation_reward_first": figures.reward_first, "validation_reward": figures.reward_last}


def _ending_fields(run: RunConfig, figures: Figures) -> dict[str, Any]:
    """What a run with such settings says of its early end and of its best checkpoint; null where there is none."""
    rule, facts = run.train.early_stopping, dict[str, Any]()
    if rule is not None:
        facts["stopped_early"] = figures.stopping.decision_facts(rule) if figures.stopping.is_over(rule) else None
    if run.checkpoint.best is not None:
        facts["best_checkpoint"] = None if figures.best is None else _best_checkpoint_fields(figures.best, figures)
    return facts


def _best_checkpoint_fields(best: BestCheckpoint, figures: Figures) -> dict[str, Any]:
    first = min((doubt.steps[0][0] for doubt in figures.checks.list_doubts()), default=None)
    # its model has all steps before its number
    return {**best.to_json(), "in_doubt": first is not None and first < best.step}


def has_guard(run: RunConfig) -> bool:
    """Whether somebody checks what other parties of a run compute."""
    return run.stage_guard is not None and run.stage_guard.is_enabled


def _log_head_fields(signed: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if signed is None else {name: signed[name] for name in ("num_events", "digest")}


def _guard_mode(run: RunConfig) -> str:
    if isinstance(run, SplitRun):
        return run.split.mode
    return "off" if run.stage_guard is None else run.stage_guard.mode


def _plain_scores(scores: Scores | PreferenceScores) -> dict[str, float | None]:
    return {name: _finite_or_none(score) for name, score in asdict(scores).items()}


def _plain_named(values: Mapping[str, float | PreferenceScores]) -> dict[str, Any]:
    return {
        name: _plain_scores(value) if isinstance(value, PreferenceScores) else _finite_or_none(value)
        for name, value in values.items()
    }


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
