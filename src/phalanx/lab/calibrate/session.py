"""``phalanx calibrate``: a run file to a table of honest differences."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from phalanx.config import digest_config
from phalanx.data import Batch, BatchLoader, prepare_corpus
from phalanx.errors import ConfigError
from phalanx.lab.calibrate.measure import PathComparison
from phalanx.lab.calibrate.paths import PathPair, pairs_of
from phalanx.lab.calibrate.result import fit_all, message_rows, operator_rows, suggest_tolerance, threshold_rows
from phalanx.models import open_model
from phalanx.pipeline import StepPlan, local_numeric_class
from phalanx.train import PipelineRun, step_inputs
from phalanx.train.records.run_directory import cache_beside
from phalanx.train.setup.honest_run import HonestRun
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.preflight import load_own_code
from phalanx.train.setup.process import deterministic_kernels
from phalanx.train.setup.stage_source import StageLibrary

MESSAGES = 512
QUICK_MESSAGES = 128
"""Of each pair and direction; what is left is rounded up to whole steps."""


def calibrate(run: PipelineRun, *, quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Train a few honest steps and measure how far honest computations of the same messages lie apart.

    Args:
        run: Run made by `load_run`; its guard and attack have no part in this.
        quick: 128 messages instead of 512, and no compiled path.
        console: Console for progress; standard error by default.

    Returns:
        One JSON object: ``rows`` by pair of paths and direction, ``operators``, ``absent`` paths with the reason,
        ``thresholds`` with their bound, and the ``suggested`` tolerance; a figure without a measurement is None.

    Raises:
        ConfigError: The run has no middle stage.
        NonFiniteLossError: Honest training gives NaN.
    """
    console = console or Console(stderr=True)
    cache = cache_beside(Path("runs") / run.name)
    load_own_code(run)
    with deterministic_kernels(run.train.threads):
        source = open_model(run.model, cache / "models", run.train.seed)
        plan = make_plan(run, source)
        steps = steps_for(plan, QUICK_MESSAGES if quick else MESSAGES)
        console.print("preparing text")
        corpus = prepare_corpus(run.data, cache / "data", run.train.seed, source.tokenizer_path)
        loader = BatchLoader(corpus, run.train.batch_size, run.train.seed)
        pairs, absent = pairs_of(plan)
        if quick:
            pairs, absent = without_compiled(pairs, absent)
        measurement = PathComparison(plan, pairs, absent)
        with _make_progress(console) as bar:
            measure_steps(HonestRun(plan, StageLibrary(source, plan, None)), measurement, steps, loader.next_batch, bar)
    fits = fit_all(measurement.figures)
    table = threshold_rows(fits)
    return {
        "name": "calibrate",
        "run": run.name,
        "quick": quick,
        "config_digest": digest_config(run),
        "numeric_class": local_numeric_class(plan.device).model_dump(),
        "precision": plan.precision,
        "tolerance": plan.guard.tolerance,
        "num_steps": steps,
        "rows": message_rows(measurement.figures, fits, plan.guard.tolerance),
        "operators": operator_rows(measurement.figures),
        "absent": measurement.absent,
        "thresholds": table,
        "suggested": suggest_tolerance(table, fits, plan.precision),
    }


def measure_steps(
    honest: HonestRun, measurement: PathComparison, steps: int, next_batch: Callable[[], Batch], bar: Progress
) -> None:
    """Take honest steps and compare every middle stage's messages, and its operators on one microbatch a step.

    Args:
        honest: At step 0.
    """
    plan = honest.plan
    task = bar.add_task("calibrate", total=steps * plan.microbatches * (len(plan.stages) - 2))
    for step in range(steps):
        bar.update(task, description=f"step {step + 1} of {steps}")
        cases = honest.compute_step(step, step_inputs(next_batch(), plan.microbatches))
        for stage in sorted({case.stage for case in cases}):
            mine = [case for case in cases if case.stage == stage]
            measurement.compare_paths(mine, honest.copies[stage])
            bar.advance(task, len(mine))
        honest.update_stages(step)
        measurement.drop_weight_copies()


def steps_for(plan: StepPlan, messages: int) -> int:
    """Steps that give so many messages of middle stages in each direction, at most the run's own."""
    middle = len(plan.stages) - 2
    if middle < 1:
        raise ConfigError(
            f"calibrate: pipeline.stages = {len(plan.stages)} leaves no stage in other hands, so nothing is ever "
            "compared; set it to 3 or more"
        )
    return min(plan.total_steps, math.ceil(messages / (plan.microbatches * middle)))


def without_compiled(pairs: list[PathPair], absent: dict[str, str]) -> tuple[list[PathPair], dict[str, str]]:
    """Leave out what takes longer to compile than all the rest takes to run."""
    compiled = {pair.path.name: "left out by --quick" for pair in pairs if pair.path.compiled}
    return [pair for pair in pairs if not pair.path.compiled], absent | compiled


def _make_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )
