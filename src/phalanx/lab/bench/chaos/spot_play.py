"""Spot traces played through on a clock: goodput of a guarded pipeline, cut anew or not, and of checkpoint restarts.

Roles are given by the very functions that give them in a run; how long a step takes comes from the pipeline on paper
(`planner.cost.guarded_step`), in which each machine has the stages that it then has.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from phalanx.errors import NoHolderError
from phalanx.lab.bench.chaos.goodput import checkpoint_interval
from phalanx.lab.bench.chaos.spot_traces import SpotEvent, SpotShape
from phalanx.pipeline import OWNER
from phalanx.pipeline.assignment.assignment import (
    Assignment,
    add_second_shadows,
    first_assignment,
    promote_shadows,
    roles_of,
    settle_assignment,
)
from phalanx.pipeline.assignment.rebalance import rebalance_assignment
from phalanx.planner.cost.guarded_step import GuardedPipeline, Line, StageDurations

_LAYER = StageDurations(forward=0.05, backward=0.10, audit=0.15, update=0.01, digest=0.18, gradient_bytes=1.23e8)
_LINE = Line(bytes_per_s=1.25e9, latency_s=2e-4)


@dataclass(frozen=True)
class SpotWork:
    """A model and its machines; the owner's is no spot machine, and has a layer at each end of the model.

    Attributes:
        layers: Layers of all middle stages together.
        layer: Durations of one layer's work on one machine.
        boundary_bytes: Size of a microbatch between two stages.
        audits: Microbatches of each stage that a guard recomputes in a step.
        state_bytes: Size of one layer's weights and moments.
        detection_s: Seconds from a loss until the owner knows of it.
        roles_s: Seconds of a change of roles, beside the states that travel.
        restart_s: Seconds from a loss until a job without a guard has begun anew with the last checkpoint.
        cut_s: Seconds of the end of a session and the beginning of the next one, with other stages.
        checkpoint_s: Seconds that a checkpoint adds to the training.
    """

    layers: int = 46
    layer: StageDurations = _LAYER
    microbatches: int = 16
    sequences: int = 128
    boundary_bytes: float = 5.2e7
    line: Line = _LINE
    audits: int = 2
    state_bytes: float = 3.7e8
    detection_s: float = 3.5
    roles_s: float = 2.0
    restart_s: float = 60.0
    cut_s: float = 30.0
    checkpoint_s: float = 5.0


@dataclass(frozen=True)
class SpotArm:
    """A way to live with preemptions.

    Attributes:
        shadows: Copies of each stage besides its holder's; 0 has no guard and begins anew from checkpoints.
        cuts: Whether layers are cut anew when that pays.
    """

    shadows: int
    cuts: bool


SPOT_ARMS = {
    "two shadows, cut anew": SpotArm(2, cuts=True),
    "one shadow, cut anew": SpotArm(1, cuts=True),
    "two shadows, fixed stages": SpotArm(2, cuts=False),
    "one shadow, fixed stages": SpotArm(1, cuts=False),
    "checkpoint restart": SpotArm(0, cuts=True),
    "checkpoint restart, fixed stages": SpotArm(0, cuts=False),
}


Places = tuple[tuple[int, ...], ...]
"""The machines with a copy of each stage, the holder first, numbered as they appear; 0 is the owner's."""


@dataclass(frozen=True)
class _PlacedPipeline(GuardedPipeline):
    """A pipeline on paper whose machines have the stages that these places say."""

    places: Places = ()

    @property
    def num_parties(self) -> int:
        return 1 + max(number for parties in self.places for number in parties)

    def party_of(self, stage: int) -> int:
        return self.places[stage][0]

    def shadows_of(self, stage: int) -> tuple[int, ...]:
        return self.places[stage][1:]


@lru_cache(maxsize=2**16)
def _step_seconds(work: SpotWork, places: Places, *, is_guarded: bool) -> float:
    middle = len(places) - 2
    shares = [work.layers * (n + 1) // middle - work.layers * n // middle for n in range(middle)]
    paper = _PlacedPipeline(
        [_scaled(work.layer, layers) for layers in (1, *shares, 1)],
        work.microbatches,
        work.boundary_bytes,
        work.line,
        is_guarded=is_guarded,
        audits=work.audits if is_guarded else 0,
        places=places,
    )
    return paper.step_seconds()


@dataclass
class SpotPlay:
    """One arm on its way through a trace.

    Attributes:
        workers: Machines that take part now, in the order in which they came.
        steps: Steps whose result still counts.
        saved: Steps of the last checkpoint.
        lost_steps: Steps that a checkpoint did not have.
    """

    work: SpotWork
    arm: SpotArm
    shape: SpotShape
    workers: list[str]
    now: float = 0.0
    steps: int = 0
    saved: int = 0
    lost_steps: int = 0
    num_cuts: int = 0
    num_fallbacks: int = 0
    num_takeovers: int = 0
    roles: Assignment = field(default_factory=lambda: Assignment({}, {}))
    _newcomers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.roles = self._begin_roles(self.workers, len(self.workers) + 2)

    def play_trace(self, events: Sequence[SpotEvent], end_s: float) -> None:
        """Train until the end; what happens during a step interrupts it or waits for its end."""
        waiting = list(events)
        while self.now < end_s:
            while waiting and waiting[0].at_s <= self.now:
                self._take_event(waiting.pop(0))
            self._take_newcomers()
            self._cut_if_it_pays()
            step_s = self.step_seconds(self.roles)
            losses = [event for event in waiting if event.at_s < self.now + step_s and self._is_loss(event)]
            if math.isinf(step_s) or losses:
                # nothing is done before somebody goes or comes
                self.now = min([event.at_s for event in losses or waiting], default=end_s)
                continue
            self.now += step_s
            if self.now <= end_s:
                self.steps += 1
                self._save_if_due(step_s)

    def step_seconds(self, roles: Assignment) -> float:
        """Seconds of a step with these roles; no end where a job without a guard has no machine."""
        if not self.workers and not self.arm.shadows:
            return math.inf
        numbers, places = {OWNER: 0}, list[tuple[int, ...]]()
        for stage in sorted(roles.holders):
            places.append(tuple(numbers.setdefault(party, len(numbers)) for party in roles.parties_of(stage)))
        return _step_seconds(self.work, tuple(places), is_guarded=self.arm.shadows > 0)

    def _begin_roles(self, workers: Sequence[str], num_stages: int) -> Assignment:
        first = first_assignment(max(num_stages, 3), workers, guarded=self.arm.shadows > 0)
        return self._with_seconds(first, None)

    def _with_seconds(self, roles: Assignment, old: Assignment | None) -> Assignment:
        return add_second_shadows(roles, old, self.workers) if self.arm.shadows > 1 else roles

    def _is_loss(self, event: SpotEvent) -> bool:
        return event.kind == "taken" and any(self.roles.copies_of(machine) for machine in event.machines)

    def _take_event(self, event: SpotEvent) -> None:
        if event.kind == "came":
            self._newcomers += event.machines
            return
        had_role = self._is_loss(event)
        self.workers = [worker for worker in self.workers if worker not in event.machines]
        self._newcomers = [worker for worker in self._newcomers if worker not in event.machines]
        if not had_role:
            return
        if not self.arm.shadows:
            self._restart()
            return
        self.now += self.work.detection_s
        try:
            self._lose_machines(event.machines)
        except NoHolderError:
            self.num_fallbacks += 1
            self._go_back()
            self.workers += self._newcomers
            self._newcomers.clear()
            self._change_roles(self._begin_roles(self.workers, len(self.roles.holders)), None)

    def _lose_machines(self, gone: Sequence[str]) -> None:
        """Let others take over, one loss after the other: what newcomers are given meanwhile does not arrive."""
        before = roles = self.roles
        for machine in gone:
            if not roles.copies_of(machine):
                continue
            there = {OWNER, *self.workers, *gone[gone.index(machine) + 1 :]}
            wanted = promote_shadows(roles, machine, sorted(there - {OWNER}), guarded=True)
            roles = settle_assignment(self._with_seconds(wanted, roles), roles, there)
        covered = promote_shadows(roles, "", self.workers, guarded=True)
        self.num_takeovers += 1
        self._change_roles(self._with_seconds(covered, roles), before)

    def _change_roles(self, new: Assignment, old: Assignment | None) -> None:
        """Give out roles; senders transfer states in parallel, each sender one state after the other."""
        per_stage = self.work.state_bytes * self.work.layers / max(len(new.holders) - 2, 1)
        sent: dict[str, float] = {}
        for role in roles_of(new, old, {OWNER, *self.workers}):
            sent[role.source] = sent.get(role.source, 0.0) + per_stage * len(role.newcomers)
        self.now += self.work.roles_s + max(sent.values(), default=0.0) / self.work.line.bytes_per_s
        self.roles = new

    def _take_newcomers(self) -> None:
        if not self._newcomers or not (self.arm.shadows or not self.workers):
            return
        self.workers += self._newcomers
        self._newcomers.clear()
        if not self.arm.shadows:
            self.roles = self._begin_roles(self.workers, self._num_stages)
            return
        moved = rebalance_assignment(self.roles, self.workers, guarded=True)
        self._change_roles(self._with_seconds(moved, self.roles), self.roles)

    @property
    def _num_stages(self) -> int:
        return len(self.workers) + 2 if self.arm.cuts else len(self.roles.holders)

    def _cut_if_it_pays(self) -> None:
        """Cut anew where that saves more than it costs until the next preemption, in the mean."""
        machines = [*self.workers, *([] if self.arm.shadows else self._newcomers)]
        if not self.arm.cuts or not machines:
            return
        cut = self._begin_roles(machines, len(machines) + 2)
        before, after = self.step_seconds(self.roles), self.step_seconds(cut)
        cost_s = self.work.cut_s if self.arm.shadows else self.work.restart_s
        if (1.0 - after / before) * self.shape.life_s(len(machines)) <= cost_s:
            return
        self.now += cost_s
        self.num_cuts += 1
        self.workers, self._newcomers = machines, [] if not self.arm.shadows else self._newcomers
        self.roles, self.saved = cut, self.steps

    def _restart(self) -> None:
        """Begin anew with whoever is there."""
        self.num_fallbacks += 1
        self._go_back()
        self.workers += self._newcomers
        self._newcomers.clear()
        self.now += self.work.restart_s
        if self.workers:
            self.roles = self._begin_roles(self.workers, self._num_stages)

    def _go_back(self) -> None:
        self.lost_steps += self.steps - self.saved
        self.steps = self.saved

    def _save_if_due(self, step_s: float) -> None:
        every = checkpoint_interval(self.work.checkpoint_s, self.shape.life_s(len(self.workers)), step_s)
        if self.steps - self.saved >= every:
            self.now += self.work.checkpoint_s
            self.saved = self.steps


def _scaled(layer: StageDurations, layers: int) -> StageDurations:
    return StageDurations(*(layers * value for value in vars(layer).values()))
