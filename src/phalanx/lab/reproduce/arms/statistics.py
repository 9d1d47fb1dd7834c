"""Monitoring by statistics alone, as fairly as we can make it.

Choices, all in its favour: thresholds come from an honest warm-up with the very model and data (twenty real steps on
a throw-away copy, then the averages are taken anew at the weights that training starts from); a flagged message is
dropped with its microbatch and the rest of the step is scaled up to the full batch; after violations in three steps a
stage is replaced by an honest copy with the right weights, which costs nothing here.
"""

from collections import Counter
from collections.abc import Sequence

from phalanx.engine import StepInputs
from phalanx.lab.reproduce.arms.arm import ArmInputs
from phalanx.lab.reproduce.arms.monitor import StatisticsMonitor
from phalanx.lab.reproduce.arms.undefended import SimulatedArm
from phalanx.lab.reproduce.attacker import Attacker
from phalanx.lab.reproduce.simulator import Simulator, StageTensor

STEPS_TO_BAN = 3
_RECENTRING = 4


class StatisticsArm(SimulatedArm):
    """A defence that drops unusual messages, and replaces a stage that sends them often."""

    def __init__(self, setting: ArmInputs) -> None:
        super().__init__(setting)
        self.monitor = StatisticsMonitor()
        self._flagged: set[int] = set()
        self._violations: Counter[int] = Counter()
        self.event_counts.alarms = self.event_counts.honest_accused = self.event_counts.lies_missed = 0
        warm_up(self.monitor, setting)

    def accepts_message(self, message: StageTensor, /) -> bool:
        """Judge one message by what its kind has looked like so far; the owner's own are not judged."""
        if message.source not in self.simulator.middle_range:
            return True
        accepted = self.monitor.judge_message(message.source, message.direction, message.tensor) is None
        plan = self.attacker.plan
        is_lie = (
            plan is not None
            and plan.direction == message.direction
            and self.attacker.lying_stage_at(message.step) == message.source
        )
        counts = self.event_counts
        if not accepted:
            self._flagged.add(message.source)
            counts.alarms = (counts.alarms or 0) + 1
            counts.honest_accused = (counts.honest_accused or 0) + (not is_lie)
        elif is_lie:
            counts.lies_missed = (counts.lies_missed or 0) + 1
        return accepted

    def step_arm(self, step: int, inputs: StepInputs) -> None:
        """Run one attempt; stages that got no gradient at all keep their weights."""
        simulator = self.simulator
        self._flagged.clear()
        attempt = simulator.run_attempt(step, inputs, self)
        taken = simulator.take_gradients()
        simulator.abandon_attempt()
        gradients = {
            stage: {name: g * (len(inputs.ids) / attempt.survivors[stage]) for name, g in stage_gradients.items()}
            for stage, stage_gradients in taken.items()
            if attempt.survivors[stage]
        }
        if not gradients:
            self.event_counts.dropped_steps += 1
        else:
            simulator.update_copies(step, gradients, simulator.combined_clip(gradients))
        self._ban_flagged()

    def _ban_flagged(self) -> None:
        self._violations.update(self._flagged)
        for stage in sorted(self._flagged):
            if self._violations[stage] == STEPS_TO_BAN:
                self.attacker.removed.add(stage)
                self.event_counts.evicted += (f"stage-{stage}",)


def warm_up(monitor: StatisticsMonitor, setting: ArmInputs) -> None:
    """Calibrate a monitor on honest steps; nothing of them is kept but its thresholds and averages."""
    _learn_profiles(monitor, setting, setting.warm_up, updates=True)
    monitor.reset_averages()
    _learn_profiles(monitor, setting, setting.warm_up[:_RECENTRING], updates=False)


def _learn_profiles(
    monitor: StatisticsMonitor, setting: ArmInputs, batches: Sequence[StepInputs], *, updates: bool
) -> None:
    honest = Simulator(setting.source, setting.plan, Attacker(None))
    for step, inputs in enumerate(batches):
        honest.run_attempt(step, inputs, _Learner(monitor, honest))
        gradients = honest.take_gradients()
        if updates:
            honest.update_copies(step, gradients, honest.combined_clip(gradients))


class _Learner:
    def __init__(self, monitor: StatisticsMonitor, honest: Simulator) -> None:
        self._monitor = monitor
        self._middle = honest.middle_range

    def accepts_message(self, message: StageTensor, /) -> bool:
        if message.source in self._middle:
            self._monitor.learn_message(message.source, message.direction, message.tensor)
        return True
