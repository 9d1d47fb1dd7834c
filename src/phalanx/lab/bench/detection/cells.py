"""The list of companies that `bench detection` simulates: honest ones, every attack against every preset, baselines."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Literal

from phalanx.errors import ConfigError
from phalanx.lab.attacks import ATTACKS, AttackEntry, check_attack
from phalanx.lab.bench.detection.cell import GUARDS, DetectionCell, small_run
from phalanx.lab.calibrate import NumericPath
from phalanx.models import LoraConfig
from phalanx.pipeline import PRESETS, AttackConfig, GuardConfig, Preset
from phalanx.planner.schedules import verifiable_schedules
from phalanx.train import PipelineRun

FP32 = NumericPath("fp32", "fp32", threads=1)
TWO_THREADS = NumericPath("fp32, 2 threads", "fp32", threads=2)
MATH = NumericPath("fp32, math attention", "fp32", threads=1, kernel="math")
COMPILED = NumericPath("fp32, compiled", "fp32", threads=1, compiled=True)
BF16 = NumericPath("bf16", "bf16", threads=1)
BF16_MATH = NumericPath("bf16, math attention", "bf16", threads=1, kernel="math")
BF16_NO_ONEDNN = NumericPath("bf16, no oneDNN", "bf16", threads=1, mkldnn=False)

_BF16_TOLERANCE = 0.2
"""Where `phalanx calibrate` puts at most one honest bf16 message in a million beyond it; see docs/tolerance.md."""
_PATIENCE_S = 300.0
"""Patience of these runs: compiling takes long, and no party here is silent on purpose."""
_ON_PATHS: tuple[tuple[int, tuple[NumericPath, ...]], ...] = (
    (4, (FP32, MATH)),
    (6, (FP32, MATH)),
    (4, (FP32, TWO_THREADS)),
    (6, (FP32, MATH, TWO_THREADS)),
    (4, (BF16, BF16_MATH)),
    (4, (BF16, BF16_NO_ONEDNN)),
    (4, (BF16, FP32)),
    (4, (FP32, COMPILED)),
)


def honest_cells(*, quick: bool) -> Iterator[DetectionCell]:
    """Yield every honest configuration; those with compiled paths only without `quick`."""
    for stages, paths in _ON_PATHS:
        if not (quick and COMPILED in paths):
            yield cell_on_paths(stages, paths, 8 if quick else 300)
    yield from _cells_on_one_path(8 if quick else 200)


def cell_on_paths(
    stages: int, paths: tuple[NumericPath, ...], steps: int, tolerance: float | None = None
) -> DetectionCell:
    """Make a company with workers that compute on these paths in turn, every message audited.

    Args:
        tolerance: tau; left out, the default in fp32, and what calibration suggests where bf16 takes part.
    """
    in_bf16 = any(path.precision == "bf16" for path in paths)
    wide = {"tolerance": _BF16_TOLERANCE} if in_bf16 else {}
    chosen = wide if tolerance is None else {"tolerance": tolerance}
    guard = GUARDS["watchful"].model_copy(update={"audit_rate": 1.0, "classes": "mixed", **chosen})
    run = small_run(stages, "watchful")
    run = run.model_copy(
        update={
            "guard": guard,
            "train": run.train.model_copy(update={"precision": paths[0].precision}),
            "pipeline": run.pipeline.model_copy(update={"patience_s": _PATIENCE_S, "step_timeout_s": 4 * _PATIENCE_S}),
        }
    )
    return DetectionCell(run, "q = 1", steps, paths)


def _cells_on_one_path(steps: int) -> Iterator[DetectionCell]:
    for stages, schedule in product(range(3, 7), verifiable_schedules()):
        yield DetectionCell(small_run(stages, "watchful", schedule=schedule), "watchful", steps)
    for stages in (4, 6):
        full = GUARDS["watchful"].model_copy(update={"audit_rate": 1.0})
        yield _guarded_cell(stages, "q = 1", full, steps)
        lockstep = full.model_copy(update={"shadow": "lockstep", "step_audit_rate": 0.0})
        yield _guarded_cell(stages, "lockstep", lockstep, steps)
        yield DetectionCell(small_run(stages, "watchful", adapter=LoraConfig(rank=4)), "watchful", steps)
        yield from (DetectionCell(small_run(stages, name), name, steps) for name in PRESETS)


def _guarded_cell(stages: int, name: str, guard: GuardConfig, steps: int) -> DetectionCell:
    return DetectionCell(small_run(stages, "watchful").model_copy(update={"guard": guard}), name, steps)


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


def exact_cells(*, quick: bool) -> list[DetectionCell]:
    """The same attacks against `standard` with exact numerics, 4 microbatches of 2 sequences, at most 64 steps."""
    cells = []
    for cell in economy_cells(quick=quick):
        train = cell.run.train.model_copy(update={"numerics": "exact", "batch_size": 8, "microbatches": 4})
        run = PipelineRun(**cell.run.written | {"train": train, "guard": GUARDS["standard"]})
        cells.append(DetectionCell(run, "standard", min(cell.steps, _STEPS)))
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
