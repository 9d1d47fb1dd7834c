"""What `bench detection` plays: every attack of the table in every place, its baselines, and honest companies."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from phalanx.attacks import ATTACKS, AttackLine, check_attack
from phalanx.errors import ConfigError
from phalanx.models import LoraConfig
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.testing import tiny_run
from phalanx.train import RunConfig, TrainConfig

GUARDS: dict[str, GuardConfig] = {
    "watchful": GuardConfig(audit_rate=1 / 4, step_audit_rate=1 / 8, owner_audit_rate=1 / 8, keep_steps=64),
    "default": GuardConfig(),
    "statistics": GuardConfig(mode="statistics"),
    "off": GuardConfig(mode="off"),
}
"""Guards by the name in the rows; `watchful` has rates that show every layer in some dozens of steps."""

FIRST_ATTACKED_STEP = 2
"""The screen has learnt by then, and there is an earlier step to replay."""

_STEPS = 64
_SILENT_STEPS = 8
"""Every silence costs patience."""
_BASELINE_STEPS = 8
_DEFAULT_STEPS = {"quick": 16, "full": 64}
_PATIENCE_S = 2.0
_WIDTH, _SEQUENCE, _BATCH, _MICROBATCHES = 32, 16, 16, 8
_ALONE = {"quick": ((1,),), "full": ((1,), (2,))}
_PAIRS = {
    "quick": ((4, (1, 2)), (6, (1, 4))),
    "full": tuple((6, pair) for pair in ((1, 2), (2, 3), (3, 4), (1, 3), (1, 4))),
}
_RATES = {"quick": (0.5,), "full": (0.3, 0.5, 0.7, 1.0)}
_SHOWN_BY_BASELINES = ("screen", "audit")

Schedule = Literal["gpipe", "1f1b"]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Cell:
    """One company to play.

    Attributes:
        run: With its guard and its attack; kind "none" is an honest company.
        guard: Name of the guard.
        steps: To be made at most; with an attacker it ends two steps after the last one is out.
        num_classes: Numeric classes that the workers claim; with more than one, distances are compared.
    """

    run: RunConfig
    guard: str
    steps: int
    num_classes: int = 1


def cells(*, quick: bool) -> list[Cell]:
    """Everything that is played, honest companies last."""
    size = "quick" if quick else "full"
    attacks = [attack for kind, line in ATTACKS.items() for attack in _attacks(kind, line, _RATES[size])]
    return [*_attacked(attacks, size), *_honest(quick=quick)]


def needs_two(kind: str) -> bool:
    """Whether an attack is one of several parties together."""
    try:
        check_attack(AttackConfig(kind=kind, stages=(1,)))
    except ConfigError:
        return True
    return False


def _attacks(kind: str, line: AttackLine, rates: Iterable[float]) -> Iterator[AttackConfig]:
    chosen: tuple[Direction, ...] = ("forward", "backward")
    directions = (None,) if line.direction is None or line.fixed else chosen
    for direction, rate in product(directions, rates):
        yield AttackConfig(kind=kind, direction=direction, rate=rate, from_step=FIRST_ATTACKED_STEP)


def _attacked(attacks: Iterable[AttackConfig], size: str) -> Iterator[Cell]:
    for attack in attacks:
        together = needs_two(attack.kind)
        places = _PAIRS[size] if together else tuple((4, alone) for alone in _ALONE[size])
        for stages, where in places:
            placed = attack.model_copy(update={"stages": where})
            yield Cell(small_run(stages, "watchful", attack=placed), "watchful", _at_most(_STEPS, attack))
        # the rate that every table of ours has
        if attack.rate == 0.5:
            yield from _compared(attack.model_copy(update={"stages": places[0][1]}), places[0][0], size)


def _compared(attack: AttackConfig, stages: int, size: str) -> Iterator[Cell]:
    """The default guard, and for lies in messages the baselines, against the same attacker."""
    if size == "quick" and attack.direction == "backward":
        return
    yield Cell(small_run(stages, "default", attack=attack), "default", _at_most(_DEFAULT_STEPS[size], attack))
    if ATTACKS[attack.kind].direction is not None and ATTACKS[attack.kind].caught_by in _SHOWN_BY_BASELINES:
        for guard in ("statistics", "off"):
            yield Cell(small_run(stages, guard, attack=attack), guard, _BASELINE_STEPS)


def _at_most(steps: int, attack: AttackConfig) -> int:
    return min(steps, _SILENT_STEPS) if ATTACKS[attack.kind].caught_by == "liveness" else steps


def _honest(*, quick: bool) -> Iterator[Cell]:
    steps = 8 if quick else 200
    schedules: tuple[Schedule, ...] = ("gpipe", "1f1b")
    for stages, schedule in product(range(3, 7), schedules):
        yield Cell(small_run(stages, "watchful", schedule=schedule), "watchful", steps)
    for stages in (4, 6):
        full = GUARDS["watchful"].model_copy(update={"audit_rate": 1.0})
        yield Cell(_with_guard(small_run(stages, "watchful"), full), "q = 1", 2 * steps)
        yield Cell(_with_guard(small_run(stages, "watchful"), full), "q = 1", 2 * steps, num_classes=2)
        lockstep = full.model_copy(update={"shadow": "lockstep", "step_audit_rate": 0.0})
        yield Cell(_with_guard(small_run(stages, "watchful"), lockstep), "lockstep", 2 * steps)
        yield Cell(small_run(stages, "watchful", adapter=LoraConfig(rank=4)), "watchful", steps)
        yield Cell(small_run(stages, "default"), "default", steps)
    yield Cell(_with_guard(small_run(4, "watchful"), GuardConfig(mode="paper")), "paper", steps)
    yield Cell(small_run(4, "statistics"), "statistics", steps)


def small_run(
    stages: int,
    guard: str,
    *,
    attack: AttackConfig | None = None,
    schedule: Schedule = "1f1b",
    adapter: LoraConfig | None = None,
) -> RunConfig:
    """A GPT-2 of width 32 with two layers in each middle stage: 16 sequences of 16 tokens a step, in 8 microbatches."""
    layers = (1, *(2 for _ in range(stages - 2)), 1)
    pipeline = PipelineConfig(
        stages=stages, schedule=schedule, layers=layers, step_timeout_s=60.0, patience_s=_PATIENCE_S
    )
    run = tiny_run(num_layers=sum(layers), pipeline=pipeline, adapter=adapter)
    architecture = {**(run.model.architecture or {}), "n_embd": _WIDTH, "n_positions": _SEQUENCE}
    return RunConfig(
        model=run.model.model_copy(update={"architecture": architecture}),
        data=run.data.model_copy(update={"sequence_length": _SEQUENCE}),
        train=TrainConfig(steps=200, seed=7, batch_size=_BATCH, microbatches=_MICROBATCHES),
        optimizer=run.optimizer,
        pipeline=pipeline,
        guard=GUARDS[guard],
        attack=attack or AttackConfig(),
    )


def _with_guard(run: RunConfig, guard: GuardConfig) -> RunConfig:
    return run.model_copy(update={"guard": guard})
