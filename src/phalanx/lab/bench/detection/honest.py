"""The honest companies of `bench detection`: on one path of this machine, and on several paths that differ in bits."""

from collections.abc import Iterator
from itertools import product

from phalanx.lab.bench.detection.cell import GUARDS, DetectionCell, small_run
from phalanx.lab.calibrate import NumericPath
from phalanx.models import LoraConfig
from phalanx.pipeline import PRESETS, GuardConfig
from phalanx.planner.schedules import verifiable_schedules

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
        paths: The first one is the run's own and the owner's.
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
