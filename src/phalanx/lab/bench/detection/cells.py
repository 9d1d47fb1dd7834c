"""The list of companies that `bench detection` simulates: honest ones, every attack against every preset, baselines."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Literal

from phalanx.errors import ConfigError
from phalanx.lab.attacks import ATTACKS, AttackEntry, check_attack
from phalanx.lab.bench.detection.cell import DetectionCell, small_run
from phalanx.lab.bench.detection.honest import FP32, MATH, honest_cells
from phalanx.pipeline import AttackConfig, Preset

FIRST_ATTACKED_STEP = 2
"""The screen has learnt by then, and there is an earlier step to replay."""

_STEPS = 64
_SILENT_STEPS = 8
"""Steps of a cell with a silent party: each silence costs the owner's whole patience."""
_BASELINE_STEPS = 8
_QUICK_STEPS = 16
PRESET_STEPS: Mapping[Preset, int] = {"standard": 256, "strict": 256, "light": 64}
"""In the order in which they are played; the owner's audits find a league in 218 steps of `standard` with 99.9 %.

A table of all attacks at all rates has no time for `economy`: see `economy_cells`.
"""
_ECONOMY_STEPS = 1765
"""Within which it finds a league with 99.9 %."""
_Place = tuple[int, tuple[int, ...]]
_ALONE: dict[str, tuple[_Place, ...]] = {"quick": ((4, (1,)),), "full": ((4, (1,)), (4, (2,)))}
_PAPERS_PLACES: dict[str, tuple[_Place, ...]] = {"quick": (), "full": tuple((6, (stage,)) for stage in range(1, 5))}
_PAIRS: dict[str, tuple[_Place, ...]] = {
    "quick": ((4, (1, 2)), (6, (1, 4))),
    "full": tuple((6, pair) for pair in ((1, 2), (2, 3), (3, 4), (1, 3), (1, 4))),
}
_RATES = {"quick": (0.5,), "full": (0.3, 0.5, 0.7, 1.0)}
_SHOWN_BY_BASELINES = ("screen", "audit")
_PAPERS_OWN = ("forward_sign_flip", "backward_gaussian")
_SMALL = 1
"""The turn of lies that statistics cannot see."""
_SMALLEST_DRIFT = 1e-4
_ON_THE_PROTOCOL = ("links", "liveness", "referee")
_SLY = ("crash_when_challenged", "audit_aware", "adaptive")

Direction = Literal["forward", "backward"]


def detection_cells(*, quick: bool) -> list[DetectionCell]:
    """Everything that is played; what answers most comes first, for the whole takes long."""
    size = "quick" if quick else "full"
    attacks = [attack for kind, entry in ATTACKS.items() for attack in _attack_configs(kind, entry, _RATES[size])]
    return [*honest_cells(quick=quick), *sorted(_attacked_cells(attacks, size), key=_place_in_line)]


def economy_cells(*, quick: bool) -> list[DetectionCell]:
    """Every attack of the table once against `economy`, in every step, for as long as the owner may take to find it."""
    cells = []
    for kind, entry in ATTACKS.items():
        attack = next(iter(_attack_configs(kind, entry, (1.0,))))
        stages, attacked = _attack_places(kind, "quick")[0]
        run = small_run(stages, "economy", attack=attack.model_copy(update={"stages": attacked}))
        cells.append(DetectionCell(run, "economy", _at_most(_QUICK_STEPS if quick else _ECONOMY_STEPS, attack)))
    return cells


def _place_in_line(cell: DetectionCell) -> tuple[int, int]:
    guards = ("standard", "watchful", "strict", "light")
    return guards.index(cell.guard) if cell.guard in guards else len(guards), _turn_of(cell.run.attack)


def _turn_of(attack: AttackConfig) -> int:
    if attack.kind in _PAPERS_OWN:
        return 0
    if attack.kind == "lazy_int8" or attack.strength == _SMALLEST_DRIFT:
        return _SMALL
    if ATTACKS[attack.kind].caught_by in _ON_THE_PROTOCOL or attack.kind in _SLY or needs_two(attack.kind):
        return 2
    return 3


def needs_two(kind: str) -> bool:
    """Whether an attack is one of several parties together."""
    try:
        check_attack(AttackConfig(kind=kind, stages=(1,)))
    except ConfigError:
        return True
    return False


def _attack_configs(kind: str, line: AttackEntry, rates: Iterable[float]) -> Iterator[AttackConfig]:
    chosen: tuple[Direction, ...] = ("forward", "backward")
    directions = (None,) if line.direction is None or line.fixed else chosen
    strengths = (None, _SMALLEST_DRIFT) if kind == "drift" else (None,)
    for strength, direction, rate in product(strengths, directions, rates):
        yield AttackConfig(kind=kind, direction=direction, strength=strength, rate=rate, from_step=FIRST_ATTACKED_STEP)


def _attacked_cells(attacks: Iterable[AttackConfig], size: str) -> Iterator[DetectionCell]:
    presets: Mapping[Preset, int] = {"standard": _QUICK_STEPS} if size == "quick" else PRESET_STEPS
    for attack in attacks:
        places = _attack_places(attack.kind, size)
        for (stages, stages_attacked), (preset, steps) in product(places, presets.items()):
            placed = attack.model_copy(update={"stages": stages_attacked})
            yield DetectionCell(small_run(stages, preset, attack=placed), preset, _at_most(steps, attack))
        # the rate that every table of ours has
        if attack.rate == 0.5:
            first = attack.model_copy(update={"stages": places[0][1]})
            yield from _baseline_cells(first, places[0][0])
            if _turn_of(attack) == _SMALL:
                yield _across_paths(first, places[0][0])


def _attack_places(kind: str, size: str) -> tuple[_Place, ...]:
    if needs_two(kind):
        return _PAIRS[size]
    more = _PAPERS_PLACES[size] if kind in _PAPERS_OWN else ()
    return (*_ALONE[size], *more)


def _across_paths(attack: AttackConfig, stages: int) -> DetectionCell:
    """A cell with a small lie among parties that differ in bits anyway: the distance alone can find it."""
    run = small_run(stages, "watchful", attack=attack)
    run = run.model_copy(update={"guard": run.guard.model_copy(update={"classes": "mixed"})})
    return DetectionCell(run, "watchful", _STEPS, (FP32, MATH))


def _baseline_cells(attack: AttackConfig, stages: int) -> Iterator[DetectionCell]:
    """Yield the baselines, against the same attacker, for lies in messages."""
    if ATTACKS[attack.kind].direction is not None and ATTACKS[attack.kind].caught_by in _SHOWN_BY_BASELINES:
        yield DetectionCell(small_run(stages, "off", attack=attack), "off", _BASELINE_STEPS)


def _at_most(steps: int, attack: AttackConfig) -> int:
    return min(steps, _SILENT_STEPS) if ATTACKS[attack.kind].caught_by == "liveness" else steps
