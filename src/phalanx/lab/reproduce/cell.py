"""One training of a table: a family, a domain, a regime, a seed, an arm and an attack."""

import contextlib
import math
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.data import BatchLoader, Corpus, validation_batches
from phalanx.engine import StepInputs
from phalanx.errors import NonFiniteLossError
from phalanx.lab.reproduce.arms import ARMS, HONEST, Arm, ArmInputs
from phalanx.lab.reproduce.attacker import Attacker, Direction, LieSchedule
from phalanx.lab.reproduce.workload import STAGES, steps_per_epoch
from phalanx.models import open_model
from phalanx.train import PipelineRun, step_inputs
from phalanx.train.batches.validation import measure_perplexity
from phalanx.train.setup.layout import make_plan

Row = dict[str, Any]

_WARM_UP_STEPS = 20
_WARM_UP_SEED = 1_000_000
_PATIENCE = 1
"""Validations without a new best after which `clean_early_stopping` ends."""


@dataclass(frozen=True)
class TableCell:
    """The parameters of a row of raw results; `direction` and `rate` are None where there is no attack."""

    family: str
    domain: str
    regime: str
    seed: int
    arm: str
    direction: Direction | None = None
    rate: float | None = None

    @property
    def cell_label(self) -> str:
        """One line for the progress."""
        attack = "" if self.direction is None else f", {self.direction} at {self.rate}"
        return f"{self.family}, {self.domain}, {self.regime}, seed {self.seed}: {self.arm}{attack}"

    def make_attacker(self) -> Attacker:
        """Return the attacker; its draws depend on the seed, the direction and the rate, not on the arm."""
        if self.arm in HONEST or self.direction is None or self.rate is None:
            return Attacker(None)
        return Attacker(LieSchedule(self.direction, self.rate, tuple(range(1, STAGES - 1)), self.seed))


@dataclass
class _LossCurve:
    """Perplexity on held-out text after each epoch, beginning with the untrained model."""

    values: list[float]

    @property
    def best_value(self) -> float:
        return min(self.values)

    @property
    def has_run_out_of_patience(self) -> bool:
        return self.values.index(self.best_value) < len(self.values) - _PATIENCE


def train_cell(cell: TableCell, run: PipelineRun, corpus: Corpus, cache: Path) -> Row:
    """Run one training to its end.

    Returns:
        The row: the cell, perplexities, counts and costs; None for what an arm does not have. A training that
        broke down with a gradient that is not finite has the status "diverged" and no last perplexity.
    """
    started, cpu = time.perf_counter(), time.process_time()
    source = open_model(run.model, cache / "models", run.train.seed)
    warm_up = _draw_batches(corpus, run, _WARM_UP_SEED, _WARM_UP_STEPS) if cell.arm == "statistics" else []
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-reproduce-")))
        attacker = cell.make_attacker()
        setting = ArmInputs(run, source, make_plan(run, source), attacker, warm_up, directory)
        arm = stack.enter_context(ARMS[cell.arm](setting))
        outcome = _train_arm(arm, run, corpus, stops_early=cell.arm == "clean_early_stopping")
        counts = asdict(arm.event_counts)
    row: Row = {**asdict(cell), **outcome, "attacked_steps": len(attacker.attacked_steps)}
    if cell.arm == "oracle_drop":
        # the oracle acts before anything is sent
        row["attacked_steps"] = counts["dropped_steps"]
    costs = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
    return row | {"lies": len(attacker.lies)} | counts | {"evicted": list(counts["evicted"])} | costs


def _train_arm(arm: Arm, run: PipelineRun, corpus: Corpus, *, stops_early: bool) -> Row:
    held_out = list(validation_batches(corpus, run.train.batch_size))
    loader = BatchLoader(corpus, run.train.batch_size, run.train.seed)
    epoch_steps = steps_per_epoch(corpus, run.train.batch_size)
    curve = _LossCurve([_nan_to_inf(measure_perplexity(arm.current_stages(), held_out))])
    status, step = "completed", 0
    while step < run.train.steps:
        stop = min(step + epoch_steps, run.train.steps)
        try:
            _train_epoch(arm, loader, range(step, stop), run.train.microbatches)
        except NonFiniteLossError:
            status = "diverged"
            break
        step = stop
        curve.values.append(_nan_to_inf(measure_perplexity(arm.current_stages(), held_out)))
        if stops_early and curve.has_run_out_of_patience:
            break
    values = [value if math.isfinite(value) else None for value in curve.values]
    best = min((value for value in values[1:] if value is not None), default=None)
    last = values[-1] if status == "completed" else None
    return {
        "status": status,
        "steps": step,
        "steps_per_epoch": epoch_steps,
        "perplexity_before": values[0],
        "perplexity_best": best,
        # early stopping keeps the model of its best validation
        "perplexity_last": best if stops_early else last,
        "perplexity_by_epoch": values[1:],
        "weights_digest": arm.weights_digest() if status == "completed" and not stops_early else None,
    }


def _train_epoch(arm: Arm, loader: BatchLoader, steps: range, microbatches: int) -> None:
    for step in steps:
        arm.step_arm(step, step_inputs(loader.next_batch(), microbatches))


def _draw_batches(corpus: Corpus, run: PipelineRun, seed: int, count: int) -> list[StepInputs]:
    loader = BatchLoader(corpus, run.train.batch_size, seed)
    return [step_inputs(loader.next_batch(), run.train.microbatches) for _ in range(count)]


def _nan_to_inf(value: float) -> float:
    return value if not math.isnan(value) else math.inf
