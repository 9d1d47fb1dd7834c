"""``phalanx bench pipeline``: the cost of the pipeline and its guard, beside plain training, in one run."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.lab.bench.measure.harness import cache_directory, print_progress, scratch_directory
from phalanx.lab.bench.measure.machine import bench_head, load_average
from phalanx.lab.bench.measure.workloads import GUARDS, PLAIN, Workload, pipeline_workloads, prepare_run
from phalanx.lab.bench.overhead.arm import ArmProcess, ArmSpec, Block
from phalanx.lab.bench.overhead.rows import ArmMeasurement, Row, model_rows
from phalanx.train import PipelineRun

_PLAIN_THREADS = (1, 2)
_HOPELESS = 4.0
"""Factor: a number of threads that takes so many times longer than the best one is not measured; its figure is null."""


def bench_pipeline(quick: bool) -> dict[str, Any]:
    """Measure both models; progress goes to standard error."""
    return measure_pipeline(pipeline_workloads(quick), quick=quick)


def measure_pipeline(what: Sequence[Workload], *, quick: bool) -> dict[str, Any]:
    """Measure these workloads; see `bench_pipeline`."""
    load = load_average()
    rows: list[Row] = []
    for workload in what:
        with scratch_directory() as directory:
            rows += _measure_model(workload, directory)
    return {
        **bench_head("pipeline", load, quick=quick),
        "rows": rows,
    }


def _measure_model(workload: Workload, directory: Path) -> list[Row]:
    run = workload.run
    cache = cache_directory()
    print_progress(f"{workload.model}: preparing")
    prepare_run(run, cache)
    tokens = run.train.batch_size * run.data.sequence_length
    rows: dict[str, Row] = {}
    threads = set(_PLAIN_THREADS)
    for number, shift in enumerate(workload.shifts):
        with contextlib.ExitStack() as stack:
            crew: dict[str, ArmProcess] = {}
            for arm in (PLAIN, *shift):
                spec = _arm_spec(run, arm, directory / str(number), cache)
                # the plain arm may use fewer than it has
                num_threads = max(_PLAIN_THREADS) if arm == PLAIN else 1
                crew[arm] = stack.enter_context(ArmProcess(spec, {"OMP_NUM_THREADS": str(num_threads)}))
                print_progress(f"{workload.model}: {arm} is ready")
            if number == 0:
                threads = _useful_thread_counts(crew[PLAIN])
            arms, plain = _take_turns(workload, crew, threads)
        for row in model_rows(workload.model, arms, plain, tokens):
            # what an earlier shift has measured stays
            rows.setdefault(str(row["arm"]), row)
    return list(rows.values())


def _arm_spec(run: PipelineRun, arm: str, directory: Path, cache: Path) -> ArmSpec:
    return ArmSpec(
        arm=arm,
        plain=arm == PLAIN,
        run=run if arm == PLAIN else run.model_copy(update={"guard": GUARDS[arm]}),
        directory=str(directory / arm),
        cache=str(cache.resolve()),
    )


def _take_turns(
    workload: Workload, crew: dict[str, ArmProcess], hopeful: set[int]
) -> tuple[dict[str, ArmMeasurement], dict[int, ArmMeasurement]]:
    arms = {arm: ArmMeasurement() for arm in crew if arm != PLAIN}
    plain = {threads: ArmMeasurement() for threads in _PLAIN_THREADS}
    started = time.monotonic()
    for turn in range(workload.warm_ups + workload.rounds):
        is_measured = turn >= workload.warm_ups
        if turn > workload.warm_ups and time.monotonic() - started > workload.budget_s:
            print_progress(f"{workload.model}: the time is up after {turn - workload.warm_ups} rounds")
            break
        # the plain arm has had its first steps, with either number of threads
        for threads in sorted(hopeful) if is_measured else ():
            _record_block(plain[threads], crew[PLAIN].run_steps(workload.steps, threads), is_measured)
        for arm, measured in arms.items():
            _record_block(measured, crew[arm].run_steps(workload.steps), is_measured)
        print_progress(f"{workload.model}: turn {turn + 1} of {workload.warm_ups + workload.rounds}")
    return arms, plain


def _useful_thread_counts(plain: ArmProcess) -> set[int]:
    """Return the numbers of threads that one first step does not rule out: on busy cores, threads that spin starve."""
    trial = {threads: plain.run_steps(1, threads).wall_s for threads in _PLAIN_THREADS}
    best = min(trial.values())
    for threads, wall_s in trial.items():
        print_progress(f"plain with {threads} threads: {wall_s:.1f} s for the first step")
    return {threads for threads, wall_s in trial.items() if wall_s <= _HOPELESS * best}


def _record_block(measured: ArmMeasurement, block: Block, is_measured: bool) -> None:
    if is_measured:
        measured.blocks.append(block)
    else:
        measured.before = block.report.usage
