"""The arms of `bench overhead`: guards beside an unguarded arm of the same stages and microbatches."""

from dataclasses import dataclass, replace

from phalanx.lab.bench.measure.workloads import scratch_run
from phalanx.models import LoraConfig
from phalanx.pipeline import PRESETS, GuardConfig
from phalanx.train import PipelineRun

UNGUARDED = "unguarded"

BY_PRESET = tuple(GuardConfig(preset=name) for name in PRESETS)
EIGHTH = GuardConfig(audit_rate=1 / 8, step_audit_rate=1 / 32, owner_audit_rate=0.0, gradient_screen=False)
SIXTEENTH = EIGHTH.model_copy(update={"audit_rate": 1 / 16, "step_audit_rate": 1 / 64})
SIXTY_FOURTH = SIXTEENTH.model_copy(update={"audit_rate": 1 / 64})
WITH_OWNER = EIGHTH.model_copy(update={"owner_audit_rate": 1 / 64})
SCREENED = WITH_OWNER.model_copy(update={"gradient_screen": True})
ADAPTERS = EIGHTH.model_copy(update={"shadow": "adapters"})
LOCKSTEP = EIGHTH.model_copy(update={"shadow": "lockstep"})
PAPER = GuardConfig(
    audit_rate=1.0,
    step_audit_rate=0.0,
    owner_audit_rate=0.0,
    shadow="lockstep",
    screen=False,
    gradient_screen=False,
)
"""The duplicated block of Lu et al. 2023: every message of a stage is recomputed by a copy in lock-step."""

NARROW, WIDE = 288, 576
MODELS = {NARROW: "scratch-10m", WIDE: "scratch-34m"}
"""Names of the models from scratch, by width."""


@dataclass(frozen=True)
class InterleavedGuards:
    """Arms that live side by side and take turns.

    Attributes:
        run: Without a guard; each arm puts its own in.
        guards: One for each arm beside the unguarded one.
        warm_ups: Turns before, which are not; two steps at least, for undo copies are made at the second one.
        budget_s: No new round begins after this time; the first one always does.
    """

    model: str
    run: PipelineRun
    guards: tuple[GuardConfig, ...]
    steps: int
    rounds: int
    warm_ups: int
    budget_s: float

    @property
    def guards_by_arm(self) -> dict[str, GuardConfig]:
        """Guards by the name of their arm, the unguarded one first."""
        named = {f"{guard.mode}-{number}": guard for number, guard in enumerate(self.guards, 1)}
        return {UNGUARDED: GuardConfig(mode="off"), **named}


def overhead_shifts(quick: bool) -> list[InterleavedGuards]:
    """All shifts; every q has as many microbatches as it takes to audit at least one."""
    if quick:
        return [
            make_shift(4, 32, 8, BY_PRESET, rounds=6, budget_s=130.0),
            make_shift(4, 32, 8, (EIGHTH, PAPER), rounds=4, budget_s=130.0),
            _with_adapter(make_shift(4, 32, 8, (ADAPTERS,), rounds=4, budget_s=40.0)),
            make_shift(4, 32, 16, (SIXTEENTH,), rounds=4, budget_s=60.0),
            make_shift(4, 64, 64, (SIXTY_FOURTH,), rounds=4, budget_s=60.0),
        ]
    upkeeps = (EIGHTH, WITH_OWNER, LOCKSTEP, PAPER)
    return [
        *preset_shifts(),
        make_shift(4, 32, 8, (WITH_OWNER, SCREENED), rounds=12, budget_s=300.0),
        make_shift(4, 32, 8, upkeeps, rounds=12, budget_s=700.0),
        make_shift(4, 32, 16, (SIXTEENTH,), rounds=16, budget_s=240.0),
        make_shift(4, 64, 64, (SIXTY_FOURTH,), rounds=16, budget_s=240.0),
        _with_adapter(make_shift(4, 32, 8, (ADAPTERS,), rounds=12, budget_s=180.0)),
        # more stages change what a guard costs, not how a shadow is kept
        make_shift(6, 32, 8, (EIGHTH, PAPER), rounds=12, budget_s=300.0),
        make_shift(6, 32, 16, (SIXTEENTH,), rounds=16, budget_s=240.0),
        make_shift(6, 64, 64, (SIXTY_FOURTH,), rounds=16, budget_s=240.0),
        *wide_shifts(),
        *long_shifts(),
    ]


def preset_shifts() -> list[InterleavedGuards]:
    """The presets at M = 8, where one microbatch at least makes 1/8 of q = 1/16, and at M = 32, where it does not."""
    return [
        make_shift(4, 32, 8, BY_PRESET, rounds=12, budget_s=400.0),
        make_shift(4, 64, 32, BY_PRESET, rounds=8, budget_s=400.0),
    ]


def wide_shifts() -> list[InterleavedGuards]:
    """The three rates on a model twice as wide, where signatures, digests and copies weigh less."""
    return [
        make_shift(stages, batch_size, microbatches, (guard,), rounds=16, budget_s=240.0, width=WIDE)
        for stages in (4, 6)
        for batch_size, microbatches, guard in ((32, 8, EIGHTH), (32, 16, SIXTEENTH), (64, 64, SIXTY_FOURTH))
    ]


def long_shifts() -> list[InterleavedGuards]:
    """Six stages of the wide model, twice as many tokens a step: costs per step or per weight weigh half."""
    return [
        make_shift(6, batch_size, microbatches, (guard,), rounds=16, budget_s=360.0, width=WIDE)
        for batch_size, microbatches, guard in ((64, 8, EIGHTH), (64, 16, SIXTEENTH), (128, 64, SIXTY_FOURTH))
    ]


def make_shift(
    stages: int,
    batch_size: int,
    microbatches: int,
    guards: tuple[GuardConfig, ...],
    *,
    rounds: int,
    budget_s: float,
    width: int = NARROW,
) -> InterleavedGuards:
    """One shift of a model from scratch, in which every guard has an arm beside the unguarded one."""
    run = scratch_run(width)
    run = run.model_copy(
        update={
            "pipeline": run.pipeline.model_copy(update={"stages": stages}),
            "train": run.train.model_copy(update={"batch_size": batch_size, "microbatches": microbatches}),
        }
    )
    # a step of many microbatches or of the wide model is long enough to be a turn
    steps = 2 if width == NARROW and microbatches < 64 else 1
    return InterleavedGuards(MODELS[width], run, guards, steps, rounds, warm_ups=2 // steps, budget_s=budget_s)


def _with_adapter(shift: InterleavedGuards) -> InterleavedGuards:
    model = shift.run.model.model_copy(update={"adapter": LoraConfig(rank=8)})
    return replace(shift, run=shift.run.model_copy(update={"model": model}))
