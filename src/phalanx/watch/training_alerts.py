"""Alerts of a training run: rules over its files, each with the sentence that says what to do."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import numpy as np

from phalanx.serve.observe.alerts import Alert
from phalanx.watch.config import RunAlertRules
from phalanx.watch.machine import MachineReading
from phalanx.watch.run_view import RunView

TRAINING_ACTIONS: dict[str, str] = {
    "non_finite": (
        "A loss or gradient is NaN or infinite. Where the log has batch_skipped, that batch is given up and the "
        "run goes on: look at its samples (phalanx data where). Where it repeats, lower optimizer.lr or set "
        "optimizer.clip_norm, and resume with --from-step before the first such step."
    ),
    "spike": (
        "The figure is far above that of the last steps. One spike mostly passes; if it stays, resume from a "
        "checkpoint before it (--resume --from-step N) with a lower optimizer.lr, and look at the batch (phalanx "
        "data where)."
    ),
    "stall": (
        "No step ends. phalanx peers RUN shows who was last heard of; restart that party, or stop the run (Ctrl-C "
        "saves) and go on with --resume."
    ),
    "slow_party": (
        "Look at the party's machine and link. A run under a guard replaces it after its patience; to hand its "
        "stages over at once, stop the party (Ctrl-C there)."
    ),
    "disk": (
        "Free space before the next checkpoint: lower checkpoint.keep, or move old runs away. A full disk ends "
        "the run; it goes on with --resume."
    ),
    "memory": (
        "The kernel may kill a process. Lower train.batch_size or raise train.microbatches, or move parties to "
        "other machines."
    ),
    "verdict": (
        "A party was convicted, and the run has gone on without it. Read the evidence (phalanx audit explain "
        "FILE) and revoke its certificate (phalanx peers RUN --revoke NAME --reason convicted)."
    ),
    "security": (
        "A party or reader broke a rule, or a stage is checked less than it was. Read the event in the section "
        "Security events of the page; for a party, phalanx peers RUN --revoke NAME; for a reader without a session, "
        "find out who has access to this machine."
    ),
    "canary": (
        "The model can recite what it was trained on. Stop the run, go back to a checkpoint before the curve "
        "rose, and train fewer epochs, remove duplicates (phalanx data build), or train with privacy noise."
    ),
    "budget": (
        "The privacy budget is nearly spent, and the run ends when it is. Plan its last steps, or leave it: a "
        "larger epsilon is a weaker promise to everybody in the data."
    ),
    "failed": "The run has failed: post_mortem.md in its directory has cause, last good step and the next command.",
    "gone": (
        "The run has neither ended nor a process on this machine: it was killed. Go on with --resume; phalanx "
        "watch RUN --card has what its files say of the cause."
    ),
}
"""What to do, by rule."""

_MIN_SHARE = 0.2
_ROBUST = 1.4826
_SPIKING = ("loss", "grad_norm")
_NUM_PACE = 100
_MAX_SEARCHED = 1000
"""Steps of one look that are searched for spikes."""


class TrainingAlerts:
    """The rules for one run and their memory.

    Args:
        start: Moment at which watching begins, in seconds since 1970; older events call nobody.
    """

    def __init__(self, rules: RunAlertRules, view: RunView, start: float) -> None:
        self._rules, self._view, self._start = rules, view, start
        self._active: dict[tuple[str, str], Alert] = {}
        self._held: dict[tuple[str, str], tuple[Alert, float]] = {}
        self._seen_rows = 0
        self.num_begun: dict[str, int] = dict.fromkeys(TRAINING_ACTIONS, 0)

    @property
    def active_alerts(self) -> list[Alert]:
        """Alerts that are not over."""
        return list(self._active.values())

    def add_intruder(self, now: float, security_class: str) -> None:
        """Take a request at a door of the watcher that was refused."""
        self._hold_alert(now, make_training_alert("security", security_class, 1, 0))

    def check_rules(self, now: float, machine: MachineReading | None) -> tuple[list[Alert], list[Alert]]:
        """Return the alerts that begin now, and the alerts that are over; call it after each `RunView.read_new`.

        Args:
            now: Seconds since 1970.
            machine: Reading of the machine; None where it was not measured.
        """
        self._take_events(now)
        events = [alert for alert, until in self._held.values() if until > now]
        self._held = {name: entry for name, entry in self._held.items() if entry[1] > now}
        machine_alerts = () if machine is None else self._check_machine(machine)
        state_alerts = (*self._check_progress(now), *self._check_curves(), *machine_alerts)
        active = {(alert.rule, alert.subject): alert for alert in (*events, *state_alerts)}
        begun = [alert for name, alert in active.items() if name not in self._active]
        over = [alert for name, alert in self._active.items() if name not in active]
        self._active = active
        for alert in begun:
            self.num_begun[alert.rule] += 1
        return begun, over

    def _hold_alert(self, now: float, alert: Alert) -> None:
        self._held[alert.rule, alert.subject] = alert, now + self._rules.hold_s

    def _take_events(self, now: float) -> None:
        """Take what happened since the last look: security events, and steps whose figures are no numbers or spike."""
        for event in self._view.new_security_events:
            if event.security_class == "suspicion" or not self._is_recent(event.time):
                continue
            rule = "verdict" if event.security_class == "verdict" else "security"
            subject = event.subject or event.kind if rule == "verdict" else event.security_class
            self._hold_alert(now, make_training_alert(rule, subject, 1, 0))
        recent = [row for row in self._view.new_rows if _moment_of(row) >= self._start]
        for row in recent:
            for figure in row.get("non_finite") or () if isinstance(row.get("non_finite"), list) else ():
                self._hold_alert(now, make_training_alert("non_finite", str(figure)[:40], float("nan"), 0))
        if self._rules.spike.on and recent:
            for figure in _SPIKING:
                self._find_spikes(now, figure, min(len(recent), _MAX_SEARCHED))

    def _is_recent(self, time: str) -> bool:
        try:
            return datetime.fromisoformat(time).timestamp() >= self._start
        except ValueError:
            return True

    def _find_spikes(self, now: float, figure: str, num_new: int) -> None:
        rule = self._rules.spike
        values = self._view.history.last_values(figure, rule.window + num_new)
        for index in range(max(0, len(values) - num_new), len(values)):
            before = values[max(0, index - rule.window) : index]
            if len(before) < rule.window * _MIN_SHARE:
                continue
            middle = float(np.median(before))
            # below a thousandth of the middle every step would be one in a run that stands still
            spread = max(_ROBUST * float(np.median(np.abs(before - middle))), 1e-3 * abs(middle), 1e-12)
            deviations = (float(values[index]) - middle) / spread
            if deviations > rule.max_deviations:
                self._hold_alert(now, make_training_alert("spike", figure, deviations, rule.max_deviations))

    def _check_progress(self, now: float) -> Iterator[Alert]:
        view, rules = self._view, self._rules
        status = view.status
        if status == "failed":
            yield make_training_alert("failed", view.name, 1, 0)
        if status == "gone":
            yield make_training_alert("gone", view.name, 1, 0)
        if status != "running":
            return
        if rules.stall.on and view.last_row is not None:
            pace = view.history.last_values("wall_s", _NUM_PACE)
            usual_s = float(np.median(pace)) if len(pace) else 0.0
            limit_s = max(rules.stall.max_s, rules.stall.max_steps * usual_s)
            age_s = now - max(_moment_of(view.last_row), self._start)
            if age_s > limit_s:
                yield make_training_alert("stall", view.name, age_s, limit_s)
        if rules.slow_party.on and view.peers is not None and not view.peers.ended:
            serving = [row for row in view.peers.parties if row.state == "serving" and row.heard is not None]
            newest = max((row.heard or 0 for row in serving), default=0)
            for row in serving:
                silence_s = newest - (row.heard or 0)
                if silence_s > rules.slow_party.max_silence_s:
                    yield make_training_alert("slow_party", row.name, silence_s, rules.slow_party.max_silence_s)

    def _check_curves(self) -> Iterator[Alert]:
        view, rules = self._view, self._rules
        for name in view.history.curve_names if rules.canary.on else ():
            if "exposure" in name.lower():
                values = view.history.last_values(name, 1000)
                if len(values) and values[-1] > rules.canary.max_exposure:
                    yield make_training_alert("canary", name, values[-1], rules.canary.max_exposure)
        budget, spent = find_budget(view.config), view.history.last_values("epsilon", 1000)
        if rules.budget.on and budget and len(spent) and spent[-1] > rules.budget.max_share * budget:
            yield make_training_alert("budget", "epsilon", spent[-1], rules.budget.max_share * budget)

    def _check_machine(self, machine: MachineReading) -> Iterator[Alert]:
        disk, memory = self._rules.disk, self._rules.memory
        if disk.on and machine.disk_free_bytes < disk.min_free_bytes:
            yield make_training_alert("disk", "run directory", machine.disk_free_bytes, disk.min_free_bytes)
        if memory.on and machine.memory_share > memory.max_share:
            yield make_training_alert("memory", "this machine", machine.memory_share, memory.max_share)


def make_training_alert(rule: str, subject: str, value: float, limit: float) -> Alert:
    """Return an alert with the sentence of its rule."""
    return Alert(rule, subject, float(value), float(limit), TRAINING_ACTIONS[rule])


def find_budget(config: Mapping[str, Any]) -> float | None:
    """Return the epsilon that a run file allows; None where it promises none."""
    table = config.get("privacy")
    epsilon = table.get("epsilon") if isinstance(table, dict) else None
    return float(epsilon) if isinstance(epsilon, int | float) and epsilon > 0 else None


def _moment_of(row: Mapping[str, Any]) -> float:
    moment = row.get("time")
    return float(moment) if isinstance(moment, int | float) else 0.0
