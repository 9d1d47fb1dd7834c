"""The real guard: owner and workers of a real company in one process, everything but the sockets as in a run."""

import contextlib
from collections.abc import Iterator
from typing import Self

from phalanx.engine import UNGUARDED, StepInputs
from phalanx.lab.reproduce.arms.arm import ArmInputs, Counts
from phalanx.models import StageModule
from phalanx.testing import MemoryCompany


class VerifiedArm:
    """A `MemoryCompany` with workers that lie as the paper's attacker does; a convicted worker does not come back.

    A worker lies in everything that it serves. The stages of excluded workers are served by their shadows.
    """

    def __init__(self, setting: ArmInputs) -> None:
        self.attacker = setting.attacker
        workers = setting.run.pipeline.worker_names
        self._parties = {name: number for number, name in enumerate(workers, start=1)}
        actors = {name: self.attacker.actor_for(number) for name, number in self._parties.items()}
        self._company = MemoryCompany(setting.run, setting.directory, actors)
        self._redone = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._company)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step_arm(self, step: int, inputs: StepInputs) -> None:
        """Train one verified step."""
        result = self._company.engine.train_turn(step, inputs)
        self._redone += (result.guard or UNGUARDED).attempts - 1

    def current_stages(self) -> Iterator[StageModule]:
        """Yield the verified weights, collected from the parties that hold them."""
        for copy in self._company.engine.fetch_stages("weights"):
            yield copy.module

    def weights_digest(self) -> str:
        """SHA-256 over all parameters by name."""
        return self._company.weights_digest()

    @property
    def event_counts(self) -> Counts:
        """The counts so far: a conviction is an alarm; a lie is missed if its party was not convicted in that step."""
        company = self._company
        liars = {lie.party for lie in self.attacker.lies}
        honest = [name for name in company.evicted if self._parties.get(name) not in liars]
        return Counts(
            redone_steps=self._redone,
            alarms=len(company.verdicts),
            honest_accused=len(honest),
            lies_missed=self._count_missed(),
            evicted=tuple(company.evicted),
        )

    def _count_missed(self) -> int:
        convicted = {(self._parties.get(verdict.party), verdict.step) for verdict in self._company.verdicts}
        return sum((lie.party, lie.step) not in convicted for lie in self.attacker.lies)
