"""What `bench overhead` runs: guards side by side with an unguarded arm of the same stages and microbatches."""

from dataclasses import dataclass

from phalanx.bench.workloads import scratch_run
from phalanx.models import LoraConfig
from phalanx.pipeline import GuardConfig
from phalanx.train import RunConfig

UNGUARDED = "unguarded"

EIGHTH = GuardConfig(audit_rate=1 / 8, step_audit_rate=1 / 32, owner_audit_rate=0.0)
SIXTEENTH = GuardConfig(audit_rate=1 / 16, step_audit_rate=1 / 64, owner_audit_rate=0.0)
SIXTY_FOURTH = GuardConfig(audit_rate=1 / 64, step_audit_rate=1 / 64, owner_audit_rate=0.0)
WITH_OWNER = GuardConfig(audit_rate=1 / 8, step_audit_rate=1 / 32)
UPDATE = EIGHTH.model_copy(update={"shadow": "update"})
ADAPTERS = EIGHTH.model_copy(update={"shadow": "adapters"})
SNAPSHOT = EIGHTH.model_copy(update={"shadow": "snapshot", "snapshot_every": 8})
REPLICA = EIGHTH.model_copy(update={"shadow": "replica"})
LOCKSTEP = EIGHTH.model_copy(update={"shadow": "lockstep"})
PAPER = GuardConfig(mode="paper")
STATISTICS = GuardConfig(mode="statistics")


@dataclass(frozen=True)
class Shift:
    """Arms that live side by side and take turns.

    Attributes:
        run: Without a guard; each arm puts its own in.
        guards: One for each arm beside the unguarded one.
        steps: Steps of one turn.
        rounds: Turns of each arm that are measured.
        warm_ups: Turns before, which are not; two steps at least, for undo copies are made at the second one.
        budget_s: No new round begins after this time; the first one always does.
    """

    run: RunConfig
    guards: tuple[GuardConfig, ...]
    steps: int
    rounds: int
    warm_ups: int
    budget_s: float

    @property
    def arms(self) -> dict[str, GuardConfig]:
        """Guards by the name of their arm, the unguarded one first."""
        named = {f"{guard.mode}-{number}": guard for number, guard in enumerate(self.guards, 1)}
        return {UNGUARDED: GuardConfig(mode="off"), **named}


def shifts(quick: bool) -> list[Shift]:
    """All shifts; every q has as many microbatches as it takes to audit at least one."""
    if quick:
        return [
            Shift(_run(4, 32, 8), (EIGHTH, UPDATE, SNAPSHOT, PAPER), steps=2, rounds=4, warm_ups=1, budget_s=130.0),
            Shift(_adapted(_run(4, 32, 8)), (ADAPTERS,), steps=2, rounds=4, warm_ups=1, budget_s=40.0),
            Shift(_run(4, 32, 16), (SIXTEENTH, REPLICA), steps=2, rounds=4, warm_ups=1, budget_s=80.0),
            Shift(_run(4, 64, 64), (SIXTY_FOURTH,), steps=1, rounds=4, warm_ups=2, budget_s=60.0),
        ]
    upkeeps = (EIGHTH, WITH_OWNER, UPDATE, SNAPSHOT, LOCKSTEP, PAPER, STATISTICS)
    return [
        Shift(_run(4, 32, 8), upkeeps, steps=2, rounds=12, warm_ups=1, budget_s=700.0),
        # a lane of a replica then has 8 microbatches, of which q = 1/8 draws one
        Shift(_run(4, 32, 16), (SIXTEENTH, REPLICA), steps=2, rounds=16, warm_ups=1, budget_s=330.0),
        Shift(_run(4, 64, 64), (SIXTY_FOURTH,), steps=1, rounds=16, warm_ups=2, budget_s=240.0),
        Shift(_adapted(_run(4, 32, 8)), (ADAPTERS,), steps=2, rounds=12, warm_ups=1, budget_s=180.0),
        # more stages change what a guard costs, not how a shadow is kept
        Shift(_run(6, 32, 8), (EIGHTH, PAPER), steps=2, rounds=12, warm_ups=1, budget_s=300.0),
        Shift(_run(6, 32, 16), (SIXTEENTH,), steps=2, rounds=16, warm_ups=1, budget_s=240.0),
        Shift(_run(6, 64, 64), (SIXTY_FOURTH,), steps=1, rounds=16, warm_ups=2, budget_s=240.0),
    ]


def _run(stages: int, batch_size: int, microbatches: int) -> RunConfig:
    run = scratch_run()
    return run.model_copy(
        update={
            "pipeline": run.pipeline.model_copy(update={"stages": stages}),
            "train": run.train.model_copy(update={"batch_size": batch_size, "microbatches": microbatches}),
        }
    )


def _adapted(run: RunConfig) -> RunConfig:
    return run.model_copy(update={"model": run.model.model_copy(update={"adapter": LoraConfig(rank=8)})})
