"""The outlook of a run's guard: its findings, their times and its cost, printed before training."""

from phalanx.pipeline import PRESETS, GuardConfig
from phalanx.planner.guard.finding import (
    AuditRates,
    DetectionOdds,
    GuardPrice,
    measured_costs,
    odds_by_lie,
    price_guard,
)
from phalanx.planner.guard.price_law import StepSize, measured_law
from phalanx.train.config import PipelineRun, StagedRun


def watch_of(run: StagedRun) -> AuditRates | None:
    """How closely the stages in other hands are looked at; None where there are none, or nothing is recomputed."""
    guard, stages = run.guard, run.pipeline.stages
    if guard.mode != "phalanx" or stages <= 2:
        return None
    lockstep = guard.shadow_upkeep.in_lockstep
    return AuditRates(
        stages=stages,
        microbatches=run.train.microbatches,
        audit_rate=1.0 if lockstep else guard.audit_rate,
        # a copy in lock-step recomputes every weight gradient
        step_audit_rate=1.0 if lockstep else guard.step_audit_rate,
        owner_audit_rate=guard.owner_audit_rate,
        gradient_screen=guard.screens_gradients,
        reach=guard.keep_states,
        kept_every=guard.keep_states,
        min_audits=guard.min_audits,
        shadows=guard.shadows,
    )


def predict_guard(run: StagedRun, size: StepSize) -> tuple[list[DetectionOdds], GuardPrice] | None:
    """Return the expected findings and the cost of a run's guard; None where nothing is recomputed."""
    watch = watch_of(run)
    if watch is None:
        return None
    price = price_guard(watch, measured_law(), size, run.guard.shadow_upkeep.bytes_sent)
    return odds_by_lie(watch, measured_costs()), price


def preset_rows(run: StagedRun, size: StepSize) -> list[dict[str, str]]:
    """Compare the presets for a run: steps to detection, steps redone, CPU time, bytes and memory."""
    rows = []
    for name in PRESETS:
        guard = GuardConfig(preset=name, shadow=run.guard.shadow, shadows=run.guard.shadows)
        predicted = predict_guard(run.model_copy(update={"guard": guard}), size)
        if predicted is None:
            continue
        odds, price = predicted
        rows.append(
            {
                "preset": name + (" (this run)" if run.guard.preset_in_force == name else ""),
                "every lie found within": f"{max(finding.certain_steps or 0 for finding in odds)} steps",
                "redone at most": f"{2 * guard.keep_states} steps",
                "CPU": f"+{100 * price.extra_compute:.1f} %",
                "bytes": f"+{100 * price.extra_bytes:.0f} %",
                "memory": f"+{price.memory_bytes / 2**20:.0f} MiB",
            }
        )
    return rows


def second_shadow_note(run: StagedRun, size: StepSize) -> str | None:
    """Price a second shadow of each stage, whether the run has it or not; None where it can have none."""
    if not run.guard.sends_gradient:
        return None
    guards = [run.guard.model_copy(update={"shadows": shadows}) for shadows in (1, 2)]
    predicted = [predict_guard(run.model_copy(update={"guard": guard}), size) for guard in guards]
    prices = [prediction[1] for prediction in predicted if prediction is not None]
    if len(prices) < len(guards):
        return None
    cpu = prices[1].extra_compute - prices[0].extra_compute
    share = prices[1].extra_bytes - prices[0].extra_bytes
    memory_bytes = prices[1].memory_bytes - prices[0].memory_bytes
    has, costs = ("has", "costs") if run.guard.shadows > 1 else ("would have", "would cost")
    return (
        f"second shadow (guard.shadows = 2): each stage {has} a third copy, so that holder and shadow can be lost at "
        f"once; it {costs} up to {100 * cpu:.1f} % CPU, {100 * share:.0f} % bytes and {memory_bytes / 2**20:.0f} MiB "
        "of memory more"
    )


def outlook_rows(odds: list[DetectionOdds]) -> list[dict[str, str]]:
    """The table of findings, in words."""
    return [
        {
            "a lie about": finding.lie,
            "found after": "-" if finding.expected_steps is None else f"{finding.expected_steps:.1f} steps",
            "99.9 % within": "never" if finding.certain_steps is None else f"{finding.certain_steps} steps",
            "then undone": "yes" if finding.is_undone else "no",
            "missed if it lies in one step only": f"{100 * finding.slip_probability(1):.1f} %",
        }
        for finding in odds
    ]


def short_run_note(odds: list[DetectionOdds], steps: int) -> str | None:
    """Name the chance that a run ends before its guard finds a lie; None where the run is long enough for all of them.

    Args:
        odds: A stage that lies in every step.
        steps: Of the run; 0 where epochs decide.
    """
    if not steps:
        return None
    late = [finding for finding in odds if finding.certain_steps is None or finding.certain_steps > steps]
    if not late:
        return None
    missed = max(finding.slip_probability(steps) for finding in late)
    return (
        f"this run is short: with {steps} steps it ends before some of these lies are found, with a chance of up to "
        f"{100 * missed:.1f} %, and such a lie stays in its weights; a stricter guard.preset or more steps lower that"
    )


def idle_guard_warning(run: StagedRun) -> str | None:
    """Say that a guard is asked for and has nothing to check; None where it has, or none is asked for."""
    stages = run.pipeline.stages
    if not run.guard.is_enabled or stages > 2 or not isinstance(run, PipelineRun):
        return None
    return (
        f'WARNING: guard.mode = "{run.guard.mode}" checks nothing here: pipeline.stages = {stages}, and the first '
        'and the last stage belong to the owner; set pipeline.stages to 3 or more, or guard.mode = "off"'
    )


def preset_in_words(guard: GuardConfig) -> str:
    """The preset that is in force, with the keys that the run file writes out in its place, or that there is none."""
    if guard.preset_in_force is not None or guard.preset is None:
        return guard.preset_in_force or "none, rates are set one by one"
    changed = [
        f"{key} = {getattr(guard, key):g}" for key, value in guard.preset_values.items() if getattr(guard, key) != value
    ]
    return f"{guard.preset}, with {', '.join(changed)}"


def price_note(guard: GuardConfig, cost: GuardPrice) -> str:
    """Describe the guard's cost in one sentence."""
    memory_text = ""
    if guard.keep_states:
        every = f"{cost.disk_per_number:.0f} bytes on the owner's disk for each saved state"
        memory_text = f" and {every}, one every {guard.keep_states} steps,"
    return (
        f"guard preset: {preset_in_words(guard)}; estimated extra CPU {100 * cost.extra_compute:.1f} % of an unguarded "
        f"run, extra bytes {100 * cost.extra_bytes:.0f} %: {cost.bytes_per_number:.1f} bytes a step{memory_text} for "
        "each number that workers train"
    )
