"""The trust in a run: what rests on the word of unchecked parties, and which stages lean below the tolerance."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.train.records.check_record import CheckRecord

_WHERE = ("stage", "party", "direction")


@dataclass
class Drifts:
    """Counts of the events `drift` by stage, party and direction; they convict no party, but a reader must see them."""

    _rows: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    def observe(self, kind: str, body: Mapping[str, Any]) -> None:
        """Follow one event; others than `drift` change nothing."""
        if kind != "drift":
            return
        place = tuple(body[key] for key in _WHERE)
        row = self._rows.setdefault(
            place, {**dict(zip(_WHERE, place, strict=True)), "first_step": body["step"], "times": 0, "bias_sigmas": 0.0}
        )
        row["last_step"] = body["step"]
        row["times"] += 1
        row["bias_sigmas"] = max(row["bias_sigmas"], body["bias_sigmas"], key=abs)

    def drift_rows(self) -> list[dict[str, Any]]:
        """One row a stage, party and direction, with its first and last step and the strongest lean."""
        return [dict(self._rows[place]) for place in sorted(self._rows)]


class LoggedDoubts:
    """What the log says of the work that convicted parties have left in the weights; a completed run says it last."""

    def __init__(self) -> None:
        self._convicted: set[str] = set()
        self._said: list[str] = []
        self._is_complete = False

    def read_event(self, kind: str, body: Mapping[str, Any]) -> None:
        """Read one line."""
        if kind in ("run_started", "run_resumed"):
            self._said.clear()
            self._is_complete = False
        elif kind == "verdict":
            self._convicted.add(str(body.get("party", "a party")))
        elif kind == "in_doubt":
            whose = f"of stage {body['stage']} were computed by {body['party']}, which was convicted"
            self._said.append(f"{describe_ranges(body['steps'])} {whose}, and not recomputed in full")
        elif kind == "run_completed":
            self._is_complete = True

    def doubt_sentences(self) -> tuple[str, ...]:
        """Return one sentence a stage and party."""
        if self._convicted and not self._is_complete:
            names = ", ".join(sorted(self._convicted))
            return (f"convicted: {names}; the run has not ended, so the steps in doubt are not known yet",)
        return tuple(self._said)


_MAX_RANGES = 8


def trust_figures(
    record: CheckRecord, drifts: Drifts, checkpoints: Sequence[int], *, guarded: bool | None
) -> dict[str, Any]:
    """Return the figures for ``summary.json``.

    Args:
        drifts: The stages that lean to one side.
        guarded: Whether workers' stages were guarded at all; None where the run has none. It may have taken some
            over from another run.
    """
    if guarded is None and record.is_empty:
        return {}
    doubts = record.list_doubts()
    first = min((doubt.steps[0][0] for doubt in doubts), default=None)
    before = [step for step in checkpoints if first is not None and step <= first]
    return {
        # without a guard no party is ever convicted
        "in_doubt": None if guarded is False and not doubts else bool(doubts),
        "steps_in_doubt": [doubt.to_json() for doubt in doubts],
        "checkpoint_before_doubt": max(before, default=None),
        "steps_believed": {str(stage): steps for stage, steps in record.unverified_counts().items()},
        "checks": {str(stage): row for stage, row in record.checks_by_stage().items()},
        "drifts": drifts.drift_rows(),
    }


def describe_trust(summary: dict[str, Any]) -> list[str]:
    """Describe the steps that cannot be trusted at the end of a run, a line each; empty if all can be."""
    lines = [
        f"IN DOUBT: {describe_ranges(row['steps'])} of stage {row['stage']} were computed by {row['party']}, which was "
        f"{_describe_fate(row['convicted_in'])}. They were not recomputed in full and are in the weights."
        for row in summary.get("steps_in_doubt", ())
    ]
    if lines:
        step = summary["checkpoint_before_doubt"]
        back = (
            "no earlier checkpoint is left: train again to remove them"
            if step is None
            else f"--resume --from-step {step} returns to a checkpoint before them"
        )
        lines.append(f"  {back}; with guard.keep_states a run undoes such steps itself")
    for row in summary.get("drifts", ()):
        lines.append(
            f"DRIFT: {row['party']} drifted to one side at stage {row['stage']} ({row['direction']}), first seen in "
            f"step {row['first_step']}, last in step {row['last_step']}; below the tolerance, so no party is blamed."
        )
    return lines


def drill_result(summary: Mapping[str, Any]) -> str | None:
    """Describe the result of a completed drill in one sentence; None if no party was told to lie.

    Args:
        summary: As in ``summary.json``; what liars did is in it where they were started on this machine.
    """
    injected = summary.get("attacks_injected")
    if not injected or summary.get("status") != "completed":
        return None
    lies = f"{injected} step{'s' if injected > 1 else ''}"
    if summary["guard"] == "off":
        return f"What this run shows: a party lied in {lies}, and without a guard the lie was not detected."
    verdicts = summary["verdicts"]
    if not verdicts:
        return f"What this run shows: a party lied in {lies}, and no party was named."
    named = ", ".join(f"{one['party']} at stage {one['stage']} in step {one['step']}" for one in verdicts)
    wrong = summary["false_accusations"]
    accused = f"; {wrong} of the verdicts are against honest parties" if wrong else ""
    if summary["in_doubt"]:
        left = "but steps of its work that were not recomputed are in the weights (IN DOUBT, above)"
    elif summary["steps_redone"]:
        left = f"{summary['steps_redone']} earlier steps were repeated, and no lie is in the weights"
    else:
        left = "the lie was discarded and the step repeated, so that no lie is in the weights"
    return (
        f"What this run shows: of {lies} with a lie the guard detected {summary['detections']} and named {named}; "
        f"the party was excluded, {left}{accused}."
    )


def _describe_fate(convicted_in: Sequence[int]) -> str:
    steps = ", ".join(map(str, convicted_in))
    return f"convicted in step {steps}" if steps else "replaced after a fault, without a conviction"


def describe_ranges(ranges: Iterable[Sequence[int]]) -> str:
    """Ranges of steps as a reader says them."""
    parts = [(f"{first}", "step") if first == last else (f"{first} to {last}", "steps") for first, last in ranges]
    noun = parts[0][1] if len(parts) == 1 else "steps"
    more = f" and {len(parts) - _MAX_RANGES} more ranges" if len(parts) > _MAX_RANGES else ""
    return f"{noun} {', '.join(text for text, _ in parts[:_MAX_RANGES])}{more}"
