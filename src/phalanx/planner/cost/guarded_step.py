"""Wall time of guarded steps where every party has a machine of its own, played through from measured durations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.planner.schedules import Action, stage_actions

OWNER = 0
"""The party that has the first and the last stage; the others have one middle stage each and shadow the next one's."""


@dataclass(frozen=True)
class StageDurations:
    """Seconds of one stage's work on a machine that does nothing else.

    Attributes:
        forward: Of one microbatch, likewise `backward` and `audit`.
        update: Of the optimizer, the copy that it can be undone from included.
        gradient_bytes: Bytes of its weight gradient.
    """

    forward: float
    backward: float
    audit: float = 0.0
    update: float = 0.0
    digest: float = 0.0
    gradient_bytes: float = 0.0


@dataclass(frozen=True)
class Line:
    """A line between any two parties, in each direction.

    Attributes:
        latency_s: From the end of sending until the message is there.
        message_s: Seconds that a message keeps each end from other work.
    """

    bytes_per_s: float
    latency_s: float
    message_s: float = 0.0


@dataclass
class _Clocks:
    """When each party is free, and when each direction between two of them is."""

    line: Line
    free: list[float]
    links: dict[tuple[int, int], float] = field(default_factory=dict)

    def work(self, party: int, ready: float, seconds: float) -> float:
        """Let a party work once its input is there and it is free; returns the end."""
        self.free[party] = max(self.free[party], ready) + seconds
        return self.free[party]

    def send(self, sender: int, receiver: int, size_bytes: float) -> float:
        """Send a party's newest result; returns the arrival, which is now where sender and receiver are one."""
        if sender == receiver:
            return self.free[sender]
        start = max(self.work(sender, 0.0, self.line.message_s), self.links.get((sender, receiver), 0.0))
        self.links[sender, receiver] = start + size_bytes / self.line.bytes_per_s
        return self.links[sender, receiver] + self.line.latency_s


@dataclass(frozen=True)
class GuardedPipeline:
    """A verified pipeline on paper.

    Attributes:
        stages: At least three stages; the first and the last one are the owner's.
        audits: Microbatches of each middle stage that are recomputed in a step; 0 with `is_guarded` False.
        shadows: Copies of a middle stage besides its holder's, each with a gradient and an update.
    """

    stages: Sequence[StageDurations]
    microbatches: int
    boundary_bytes: float
    line: Line
    schedule: str = "1f1b"
    is_guarded: bool = True
    audits: int = 1
    shadows: int = 1

    def step_seconds(self, num_steps: int = 4) -> float:
        """Seconds of a step in a row of them, whose updates overlap with the beginning of the next one."""
        clocks = _Clocks(self.line, [0.0] * self.num_parties)
        begins = [0.0] * len(self.stages)
        decisions = []
        for _ in range(num_steps):
            ends = self._play_passes(clocks, begins)
            decisions.append(self._decide(clocks, ends))
            begins = self._apply(clocks, decisions[-1])
        return decisions[-1] - decisions[-2]

    @property
    def num_parties(self) -> int:
        """How many parties there are."""
        return len(self.stages) - 1

    def party_of(self, stage: int) -> int:
        """The party that holds a stage."""
        return OWNER if stage == len(self.stages) - 1 else stage

    def shadow_of(self, stage: int) -> int:
        """The party that shadows a middle stage: the next worker's holder, or the owner where there is one worker."""
        return self.shadows_of(stage)[0]

    def shadows_of(self, stage: int) -> tuple[int, ...]:
        """All shadows of a middle stage: the next workers' holders, or the owner where there are no more."""
        workers = len(self.stages) - 2
        return tuple(OWNER if n >= workers else (stage - 1 + n) % workers + 1 for n in range(1, self.shadows + 1))

    def _play_passes(self, clocks: _Clocks, begins: Sequence[float]) -> list[float]:
        """Play all microbatches; returns when each stage has done its last one."""
        last, ends = len(self.stages) - 1, list(begins)
        waiting = [
            list(stage_actions(self.schedule, stage, len(self.stages), self.microbatches)) for stage in range(last + 1)
        ]
        arrived: dict[tuple[str, int, int], float] = {}
        while any(waiting):
            stage, ready = self._next_stage(clocks, waiting, arrived, begins)
            action, party = waiting[stage].pop(0), self.party_of(stage)
            times = self.stages[stage]
            is_forward = action.direction == "forward"
            ends[stage] = clocks.work(party, ready, times.forward if is_forward else times.backward)
            target = stage + 1 if is_forward else stage - 1
            if 0 <= target <= last:
                place = (action.direction, target, action.microbatch)
                arrived[place] = clocks.send(party, self.party_of(target), self.boundary_bytes)
                ends[stage] = clocks.free[party]
        return ends

    def _next_stage(
        self,
        clocks: _Clocks,
        waiting: Sequence[Sequence[Action]],
        arrived: Mapping[tuple[str, int, int], float],
        begins: Sequence[float],
    ) -> tuple[int, float]:
        """Return the stage whose next work begins first, the last one of equals, and when its input is there."""
        last, ready = len(self.stages) - 1, dict[int, float]()
        for stage, actions in enumerate(waiting):
            if not actions:
                continue
            direction, microbatch = actions[0]
            is_source = (stage, direction) in ((0, "forward"), (last, "backward"))
            came = begins[stage] if is_source else arrived.get((direction, stage, microbatch))
            if came is not None:
                ready[stage] = max(came, begins[stage])
        stage = min(ready, key=lambda stage: (max(clocks.free[self.party_of(stage)], ready[stage]), -stage))
        return stage, ready[stage]

    def _decide(self, clocks: _Clocks, ends: Sequence[float]) -> float:
        """Return when the owner knows that the step may be applied: all stages are done, all audits agree."""
        line, middle = self.line, range(1, len(self.stages) - 1)
        reports = [max(clocks.free[OWNER], *ends), *(ends[stage] + line.latency_s for stage in middle)]
        if not self.is_guarded:
            return max(reports)
        # each stage commits and sends its gradient before it audits another one
        watched = [stage for stage in middle if self.shadows_of(stage)]
        gradients = {
            (stage, shadow): clocks.send(self.party_of(stage), shadow, self.stages[stage].gradient_bytes)
            for stage in watched
            for shadow in self.shadows_of(stage)
        }
        reports += [arrival + line.latency_s for arrival in gradients.values()]
        for stage in watched:
            # the order, then the inputs that the shadow asks for
            fetched = ends[stage] + 4 * line.latency_s + 2 * self.audits * self.boundary_bytes / line.bytes_per_s
            audit = self.audits * self.stages[stage].audit
            ended = clocks.work(self.shadow_of(stage), max(gradients[stage, self.shadow_of(stage)], fetched), audit)
            reports.append(ended + line.latency_s)
        return max(reports)

    def _apply(self, clocks: _Clocks, decision: float) -> list[float]:
        """Let all copies be updated; returns when each stage can begin the next step."""
        begins = []
        for stage, times in enumerate(self.stages):
            party = self.party_of(stage)
            came = decision + (0.0 if party == OWNER else self.line.latency_s)
            begins.append(clocks.work(party, came, times.update))
        if self.is_guarded:
            for stage in range(1, len(self.stages) - 1):
                times = self.stages[stage]
                clocks.work(self.party_of(stage), 0.0, times.digest)
                for shadow in self.shadows_of(stage):
                    clocks.work(shadow, 0.0, times.update + times.digest)
        return begins
