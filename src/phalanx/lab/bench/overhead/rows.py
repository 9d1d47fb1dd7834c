"""Flat rows from measured blocks: medians with their range, ratios within a round, parts that add up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from phalanx.lab.bench.measure.workloads import GUARDS, PLAIN
from phalanx.lab.bench.overhead.arm import Block

PHASES = ("compute", "send", "wait", "screen", "audit", "shadow_apply", "state_digest", "commit", "optimizer")
"""Phases of the owner's wall time that have a column; what lies between them is "other"."""

PARTS = (
    "hashing",
    "signing",
    "screen",
    "audit",
    "shadow_upkeep",
    "state_digest",
    "commit",
    "same_work",
    "copies_and_other",
)
SAME_WORK = ("compute", "optimizer")
"""Phases in which both arms do the very same: a difference there is the machine's, not the guard's."""

Row = dict[str, str | int | float | None]


@dataclass
class ArmMeasurement:
    """One arm's blocks, round by round; `before` is the usage at the end of the warm-up."""

    blocks: list[Block] = field(default_factory=list)
    before: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def wall_s(self) -> list[float]:
        """Wall seconds a step, by round."""
        return [block.wall_s / block.steps for block in self.blocks]

    @property
    def cpu_s(self) -> list[float]:
        """CPU seconds a step of all the arm's processes, by round."""
        return [block.cpu_s / block.steps for block in self.blocks]

    @property
    def step_count(self) -> int:
        """Steps measured."""
        return sum(block.steps for block in self.blocks)

    def cpu_of(self, purpose: str) -> float:
        """CPU seconds a step for one purpose, over all parties; 0 when no party spent any."""
        after = self.blocks[-1].report.usage
        spent = sum(
            seconds.get(purpose, 0.0) - self.before.get(party, {}).get(purpose, 0.0) for party, seconds in after.items()
        )
        return spent / self.step_count


def model_rows(
    model: str, arms: Mapping[str, ArmMeasurement], threads: Mapping[int, ArmMeasurement], tokens: int
) -> list[Row]:
    """The rows of one model.

    Args:
        threads: The plain arm by its number of threads; the faster one is the baseline.
    """
    measured = {number: timing for number, timing in threads.items() if timing.blocks}
    best = min(measured, key=lambda number: median(measured[number].wall_s))
    plain = measured[best]
    everyone = {PLAIN: plain, **arms}
    rows = []
    for name, arm in everyone.items():
        row: Row = {"model": model, "arm": name, "threads": best if name == PLAIN else 1, "steps": arm.step_count}
        guard = GUARDS.get(name)
        row["q"] = None if guard is None or not guard.is_enabled else guard.audit_rate
        row["shadow"] = None if guard is None or not guard.is_enabled else guard.shadow
        row["tokens_per_step"] = tokens
        row |= _median_and_range("wall_s_per_step", arm.wall_s)
        row |= _median_and_range("cpu_s_per_step", arm.cpu_s)
        row |= _median_and_range("tokens_per_s", [tokens / wall for wall in arm.wall_s])
        for number in (1, 2):
            timing = measured.get(number) if name == PLAIN else None
            row[f"tokens_per_s_{number}_threads"] = None if timing is None else tokens / median(timing.wall_s)
        row |= _median_and_range("tokens_ratio_to_plain", _round_ratios(plain.wall_s, arm.wall_s))
        row |= _median_and_range("cpu_ratio_to_unguarded", _round_ratios(arm.cpu_s, arms["unguarded"].cpu_s))
        row |= _wall_shares(arm)
        row |= guard_cost(arm if guard is not None and guard.is_enabled else None, arms["unguarded"])
        row["loss_last"] = arm.blocks[-1].report.losses[-1]
        row["audits_per_step"] = None if row["q"] is None else sum(b.report.audits for b in arm.blocks) / arm.step_count
        row["alarms"] = None if row["q"] is None else sum(block.report.alarms for block in arm.blocks)
        row |= _bytes_columns(arm, arms.values())
        rows.append(row)
    return rows


def _median_and_range(name: str, values: Sequence[float]) -> Row:
    return {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def _round_ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round: both arms had their turn within seconds, so a busy machine slowed both."""
    return [a / b for a, b in zip(above, below, strict=False)]


def _wall_shares(arm: ArmMeasurement) -> Row:
    """Shares of the owner's wall time by phase; they add up to 1 with "other". The plain arm has no phases."""
    wall = sum(block.wall_s for block in arm.blocks)
    has_phases = any(block.report.wall_by_phase for block in arm.blocks)
    shares: Row = dict.fromkeys(f"wall_share_{name}" for name in (*PHASES, "other"))
    if has_phases:
        phase_shares = {name: sum(b.report.wall_by_phase.get(name, 0.0) for b in arm.blocks) / wall for name in PHASES}
        shares |= {f"wall_share_{name}": share for name, share in phase_shares.items()}
        shares["wall_share_other"] = 1.0 - sum(phase_shares.values())
    return shares


def guard_cost(arm: ArmMeasurement | None, base: ArmMeasurement) -> Row:
    """What a guard costs in CPU time and where, as shares of the unguarded arm's.

    `extra_compute` is the larger, conservative figure: against an unguarded arm without its own hashing
    and signing of frames, which the transport does with the guard off as well. The parts add up to
    `extra_over_unguarded`.
    """
    names = ("extra_compute", "extra_over_unguarded", *(f"part_{part}" for part in PARTS))
    row: Row = dict.fromkeys(names)
    if arm is None:
        return row
    unguarded, guarded = sum(base.cpu_s) / len(base.cpu_s), sum(arm.cpu_s) / len(arm.cpu_s)
    bare = unguarded - base.cpu_of("hashing") - base.cpu_of("signing")
    row["extra_compute"] = guarded / bare - 1.0
    row["extra_over_unguarded"] = guarded / unguarded - 1.0

    def more(purpose: str) -> float:
        return (arm.cpu_of(purpose) - base.cpu_of(purpose)) / unguarded

    parts = {part: more(part) for part in PARTS if part not in ("shadow_upkeep", "same_work", "copies_and_other")}
    # both ends hash a gradient; the sender does it inside shadow_send, so its half is not counted twice
    parts["shadow_upkeep"] = sum(more(f"shadow_{what}") for what in ("send", "receive", "apply")) - parts["hashing"] / 2
    parts["same_work"] = sum(more(phase) for phase in SAME_WORK)
    parts["copies_and_other"] = guarded / unguarded - 1.0 - sum(parts.values())
    return row | {f"part_{part}": parts[part] for part in PARTS}


def _bytes_columns(arm: ArmMeasurement, all_arms: Any) -> Row:
    links = sorted(
        {link for arm_timing in all_arms for block in arm_timing.blocks for link in block.report.bytes_by_link}
    )
    row: Row = {"bytes_per_step": None, **{f"bytes_per_step_{link}": None for link in links}}
    if any(block.report.bytes_by_link for block in arm.blocks):
        for link in links:
            moved = sum(block.report.bytes_by_link.get(link, 0) for block in arm.blocks)
            row[f"bytes_per_step_{link}"] = moved / arm.step_count
        row["bytes_per_step"] = (
            sum(b for block in arm.blocks for b in block.report.bytes_by_link.values()) / arm.step_count
        )
    return row
