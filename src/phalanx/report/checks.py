"""The checks of each worker's stage, and the steps that are in doubt."""

from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.report.bars import part_bars
from phalanx.report.figures import format_amount, format_count, format_plural, parse_number, short_text
from phalanx.report.read import RunRecord
from phalanx.report.shell import make_section
from phalanx.report.svg import Markup, make_element
from phalanx.report.tables import make_table
from phalanx.train.records.proof import verify_run

_MOST = 64
_KINDS = {
    "messages": "Drawn messages",
    "whole_step": "Whole step",
    "owner": "Owner",
    "state": "State agreed",
}
_PARTS = ("recomputed in full", "on its party's word", "in doubt")
_COLOURS = ("f0", "f1", "f5")


def checks_section(record: RunRecord) -> Markup | None:
    """Return the section; None where the summary says nothing of it."""
    checks = _as_object(record.summary.get("checks"))
    stages = {short_text(stage, 10): _as_object(row) for stage, row in list(checks.items())[:_MOST]}
    if not stages:
        return None
    remark = (
        "Steps of each stage that other parties held. Recomputed in full: all messages, the weight gradient and "
        "the update, by the owner or by a party that was not convicted. In doubt: the work of a convicted party."
    )
    parts = [(f"stage {stage}", _cost_parts(record, stage, row)) for stage, row in stages.items()]
    drawn = part_bars(parts, format_count, "Steps of each stage by kind of check", colours=_COLOURS)
    heads = ["Stage", "Steps", *(f"{name}, last step" for name in _KINDS.values())]
    rows = [
        [stage, format_count(row.get("steps")), *(_last_words(_as_object(row.get(kind))) for kind in _KINDS)]
        for stage, row in stages.items()
    ]
    return make_section(
        "Checks", remark, drawn, make_table(heads, rows, "figures"), *_doubt_section(record), *_drift_section(record)
    )


def num_in_doubt(record: RunRecord) -> float:
    """Return how many steps of all stages together are in doubt."""
    return sum(parse_number(row.get("num_steps")) or 0.0 for row in _list_rows(record, "steps_in_doubt"))


def _cost_parts(record: RunRecord, stage: str, row: dict[str, Any]) -> dict[str, float]:
    steps = _as_number(row.get("steps"))
    believed = min(steps, _as_number(_as_object(record.summary.get("steps_believed")).get(stage)))
    doubted = sum(
        _as_number(row.get("num_steps"))
        for row in _list_rows(record, "steps_in_doubt")
        if short_text(row.get("stage"), 10) == stage
    )
    doubted = min(believed, doubted)
    return dict(zip(_PARTS, (steps - believed, believed - doubted, doubted), strict=True))


def _last_words(row: dict[str, Any]) -> str:
    if parse_number(row.get("last")) is None:
        return "never"
    return f"{format_amount(row['last'], 12)} ({format_count(row.get('steps'))} in all)"


def _doubt_section(record: RunRecord) -> list[Markup]:
    doubts = _list_rows(record, "steps_in_doubt")
    if not doubts:
        return []
    rows = [
        [
            short_text(row.get("party"), 80),
            short_text(row.get("stage"), 10),
            short_text(row.get("convicted_in"), 40),
            f"{format_plural(_as_number(row.get('num_steps')), 'step')}: {_describe_ranges(row.get('steps'))}",
            "never" if parse_number(row.get("last_verified")) is None else format_amount(row["last_verified"], 12),
        ]
        for row in doubts[:_MOST]
    ]
    back = record.summary.get("checkpoint_before_doubt")
    advice = (
        "No earlier checkpoint is left; the steps are in the weights."
        if parse_number(back) is None
        else f"They are in the weights; the checkpoint of step {format_amount(back, 12)} is from before them."
    )
    heads = ["Party", "Stage", "Convicted in step", "In doubt", "Last recomputed in full"]
    return [
        make_element("h3", {}, "Steps in doubt"),
        make_element("p", {"class": "remark"}, advice),
        make_table(heads, rows),
    ]


def _drift_section(record: RunRecord) -> list[Markup]:
    drifts = _list_rows(record, "drifts")
    if not drifts:
        return []
    keys = ("party", "stage", "direction", "first_step", "last_step", "bias_sigmas")
    rows = [[short_text(row.get(key), 60) for key in keys] for row in drifts[:_MOST]]
    heads = ["Drifts to one side", "Stage", "Direction", "First seen in step", "Last in step", "Strongest, sigmas"]
    remark = "Below the tolerance: audited in full from then on, without blame."
    return [make_element("h3", {}, "Drifts"), make_element("p", {"class": "remark"}, remark), make_table(heads, rows)]


def _describe_ranges(value: Any) -> str:
    ranges = [item for item in value if isinstance(item, list) and len(item) == 2] if isinstance(value, list) else []
    shown = [
        short_text(first, 12) if first == last else f"{short_text(first, 12)} to {short_text(last, 12)}"
        for first, last in ranges
    ]
    return ", ".join(shown[:_MOST]) + (f" and {len(shown) - _MOST} more" if len(shown) > _MOST else "")


def _list_rows(record: RunRecord, key: str) -> list[dict[str, Any]]:
    value = record.summary.get(key)
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _as_number(value: Any) -> float:
    return max(0.0, parse_number(value) or 0.0)


# about five signatures a recomputed microbatch: some seconds for so many steps
_MAX_STEPS = 5000


def proven_steps(run_dir: Path, record: RunRecord) -> str:
    """Return the proof that a run's audit log gives, in one sentence, or why it proves nothing."""
    num_steps = len(record.events_of("step"))
    if num_steps > _MAX_STEPS:
        return f"Not checked here: {num_steps} steps are on record; phalanx audit verify draws their audits again."
    if not record.events:
        return "Not proven: there is no audit log."
    try:
        proof = verify_run(run_dir)
    except PhalanxError as exc:
        return f"Not proven: {exc}."
    doubts = "".join(f" Not proven: {doubt}." for doubt in proof.unproven)
    remarks = "".join(f" {remark.capitalize()}." for remark in proof.remarks)
    return f"Proven by the audit log: {proof.conclusion}.{remarks}{doubts}"
